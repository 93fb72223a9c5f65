"""Everything that can be known before training starts: model, tokenizer, data, plan. Checks all, writes nothing.

The one exception is the cache of tokenised data, which comes last, when everything else is known to fit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch

from greedysnake.compiling import missing_for_compiling
from greedysnake.config import Config
from greedysnake.data.batches import Batches
from greedysnake.data.corpus import Progress
from greedysnake.data.files import find_sources
from greedysnake.data.tokenizers import Tokenizer, load_tokenizer
from greedysnake.errors import ConfigError, GreedySnakeError, PlanError, explained, naming
from greedysnake.learning_rate import LearningRate
from greedysnake.models.huggingface import CausalLM
from greedysnake.models.sequential import Model
from greedysnake.ops import Plan
from greedysnake.options import TrainingOptions
from greedysnake.report.trackers import require_trackers
from greedysnake.run_model import (
    make_model,
    model_configuration,
    require_positions,
    require_vocabulary,
    require_weights,
    values_of,
)
from greedysnake.runs import Run, find_run
from greedysnake.runtime.arguments import check_moments
from greedysnake.runtime.directory import own_directories
from greedysnake.runtime.engine import Engine
from greedysnake.runtime.flat import FlatBlock
from greedysnake.runtime.footprint import Footprint, foresee, missing_room, outline, require_disk
from greedysnake.runtime.host import ram_bytes
from greedysnake.runtime.opening import Stored, stored_in
from greedysnake.runtime.optimizer import AdamW
from greedysnake.settings import Plain
from greedysnake.shapes import Share
from greedysnake.sizes import format_size

CACHE = "data"


@dataclass(frozen=True)
class Prepared:
    """What a training needs, all of it checked."""

    config: Config
    share: Share
    model: CausalLM
    tokenizer: Tokenizer
    train: Batches
    validation: Batches | None
    num_steps: int
    rate: LearningRate
    footprint: Footprint
    device: str
    ram: int
    model_values: dict[str, Plain]
    """What transformers' configuration says of the model, kept with a checkpoint."""
    run: Run | None
    """What its folder says of the run that is continued; None for a new one."""
    num_done: int
    """Steps that its checkpoint has behind it."""

    @property
    def resume(self) -> bool:
        """There is a checkpoint of this run."""
        return self.run is not None

    @property
    def num_micro_batches(self) -> int:
        """Of a step, on each rank."""
        return self.config.training.gradient_accumulation_steps

    @property
    def num_step_micro_batches(self) -> int:
        """Of a step, on all ranks together."""
        return self.num_micro_batches * self.share.num_ranks


@explained("use")
def prepare(config: Config, progress: Progress | None = None, share: Share | None = None) -> Prepared:
    """Loads what is needed to check the rest; a ConfigError, PlanError or StorageError says what cannot work.

    `progress` is called while rows are tokenised, with the numbers of rows and tokens so far. `share` is that of the
    rank; where several ranks prepare at once, one of them tokenises and the others wait for it.
    """
    share = share or Share()
    run = find_run(config)
    config = config.with_default_blocks((run and run.config.engine.layers_per_block) or 1)
    with naming("engine.storage: "):
        first = own_directories(config.storage, share)[0]
    with naming("training."):
        require_trackers(config.training.report_to)
    device, model_config = device_and_configuration(config, is_new=run is None)
    if run is None:  # else the values come from the checkpoint
        require_weights(config)
    tokenizer = load_tokenizer(config.tokenizer)
    model = make_model(config, model_config)
    ram = ram_budget(config, share)
    stored = stored_in(first) if run else None
    outlined = outline_of(config, model, model_config, ram, stored, share)
    footprint = footprint_of(config, outlined, ram, stored)
    require_room(config, footprint, share)
    find_sources("data.validation_paths", config.data.validation_paths or ())  # before the rest is tokenised
    train = batches_of(config, tokenizer, "train", progress)
    require_vocabulary(config, model_config, train)
    num_steps = _num_steps(config, train, share)
    with naming("training."):
        rate = config.training.rate(num_steps)
    validation = None
    if config.training.eval_steps:
        validation = batches_of(config, tokenizer, "validation", progress)
        require_vocabulary(config, model_config, validation)
    return Prepared(
        config=config,
        share=share,
        model=model,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        num_steps=num_steps,
        rate=rate,
        footprint=footprint,
        device=device,
        ram=ram,
        model_values=values_of(model_config),
        run=run,
        num_done=stored.num_steps if stored else 0,
    )


def device_and_configuration(config: Config, *, is_new: bool) -> tuple[str, Any]:
    """The device, and transformers' configuration of the model; ConfigError when a run cannot have them."""
    device = choose_device(config.engine.device)
    _require_compiler(config, device)
    _require_machine(config)
    model_config = model_configuration(config, is_new=is_new)
    require_positions(config, model_config)
    return device, model_config


def require_room(config: Config, footprint: Footprint, share: Share | None = None) -> None:
    """PlanError or StorageError, beginning with engine.storage, when the drives have no room for a run."""
    with naming("engine.storage: "):
        require_disk(footprint, config.storage, share)


def open_engine(
    config: Config,
    model: Model,
    *,
    device: str,
    ram: int,
    resume: bool,
    plan: Plan | None = None,
    is_trial: bool = False,
) -> Engine:
    """The engine that trains as `plan` says, or that holds what was trained. A trial has a trace and no checkpoints."""
    options, training = config.engine, config.training
    return Engine(
        model,
        adamw(training),
        storage=config.storage,
        ram=ram,
        device=device,
        dtype=config.dtype,
        schedule=options.schedule,
        alpha=options.alpha,
        max_grad_norm=training.clip_norm,
        placement=plan.placement if plan else options.placement,
        slots=plan.slots if plan else options.slots,
        chunk_params=options.chunk_params,
        seed=training.seed,
        resume=resume,
        overwrite=config.overwrite_output_dir and not resume,
        single_slot=options.single_slot,
        optimistic=plan is not None and plan.may_be_tentative and not is_trial,
        checkpoints=not is_trial,
        verify_reads=options.verify_reads,
        compress_moments=options.compress_moments,
        num_threads=options.num_threads,
        compile=why_not_compiled(config, device) is None,
        trace=is_trial,
    )


def adamw(training: TrainingOptions) -> AdamW:
    return AdamW(
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        weight_decay=training.weight_decay,
        moments=training.adam_moments,
    )


def ram_budget(config: Config, share: Share | None = None) -> int:
    """Bytes for all host buffers of a rank: of those asked for, or of half of what is free now, as much as each of the
    ranks on the host."""
    budget = config.engine.ram if config.engine.ram is not None else ram_bytes()[1] // 2
    return budget // (share or Share()).num_here


def _require_machine(config: Config) -> None:
    """A budget that the machine does not have would be filled until the system ends the process."""
    wanted, total = config.engine.ram, ram_bytes()[0]
    if wanted is not None and wanted > total:
        raise ConfigError(
            f"engine.ram is {format_size(wanted)} and the machine has {format_size(total)}: give less, or null for "
            "half of what is free"
        )


def choose_device(wanted: str) -> str:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda and torch finds no CUDA device: use cpu, or install a driver")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def why_not_compiled(config: Config, device: str) -> str | None:
    """None when layers are compiled: because the configuration says so, or because it pays and can be done."""
    if config.engine.compile is not None:
        return None if config.engine.compile else "engine.compile is false"
    if device == "cpu":
        return "it pays on cuda alone"
    if not config.data.packing and config.data.pad_to != "sequence_length":
        return "sequences differ in length, which data.pad_to=sequence_length would change"
    missing = missing_for_compiling(device)
    return missing and f"this machine lacks {missing}"


def _require_compiler(config: Config, device: str) -> None:
    missing = missing_for_compiling(device) if config.engine.compile else None
    if missing:
        raise ConfigError(f"engine.compile is true, and this machine lacks {missing}: install it, or use false")


@dataclass(frozen=True)
class Outline:
    """What the sizes of a run follow from."""

    blocks: Sequence[FlatBlock]
    activation_bytes: int
    """Of the tensor between two blocks, for one micro-batch."""
    share: Share
    """Of the blocks, what is a rank's own."""


def outline_of(
    config: Config,
    model: Model,
    model_config: Any,
    ram: int,
    stored: Stored | None = None,
    share: Share | None = None,
) -> Outline:
    training, options, share = config.training, config.engine, share or Share()
    check_moments(training.adam_moments, stored.moments if stored else None)
    blocks = outline(
        model, precision=config.precision, ram=ram, chunk_params=options.chunk_params, stored=stored, share=share
    )
    num_elements = training.per_device_train_batch_size * training.sequence_length
    num_elements *= int(model_config.get_text_config().hidden_size)
    return Outline(blocks, num_elements * (4 if config.dtype == "float32" else 2), share)


def footprint_of(
    config: Config, outlined: Outline, ram: int, stored: Stored | None = None, *, more_slots: bool = True
) -> Footprint:
    """PlanError, beginning with engine.ram, when the budget is too small. The slots that are `stored` in the checkpoint
    that is continued stay, so there is nothing to gain by not using them. Without `more_slots` there are as many as
    the configuration says, also where RAM is filled."""
    wanted = config.engine.optimistic
    foreseen = partial(_foresee, config, outlined, ram, stored, more_slots=more_slots)
    if not config.may_be_optimistic:
        return foreseen(optimistic=False)
    try:
        footprint = foreseen(optimistic=True)
    except PlanError:
        if wanted:
            raise
        return replace(foreseen(optimistic=False), waits=_NO_RAM)
    waiting = foreseen(optimistic=False)
    if not footprint.plan.may_be_tentative:
        return waiting
    if not wanted and footprint.step_ssd_bytes > MOST_TRAFFIC * waiting.step_ssd_bytes:
        return replace(waiting, waits=_NO_RAM)
    has_slots = footprint.num_slots == footprint.stored_slots
    missing = 0 if wanted or has_slots else missing_room(footprint, config.storage, outlined.share)
    if not missing:
        return footprint
    waits = f"with engine.optimistic, or {format_size(missing)} more of free disk, they would not"
    return replace(waiting, waits=waits)


MOST_TRAFFIC = 1.1
"""RAM that is taken for tentative weights may not cost more SSD traffic than this, against updates that wait."""
_NO_RAM = "engine.ram has no room for doing them before it is known"


def _foresee(
    config: Config, outlined: Outline, ram: int, stored: Stored | None, *, optimistic: bool, more_slots: bool
) -> Footprint:
    training, options = config.training, config.engine
    try:
        return foresee(
            outlined.blocks,
            precision=config.precision,
            ram=ram,
            num_directories=len(config.storage),
            alpha=options.alpha,
            clipping=training.clip_norm is not None,
            placement=options.placement,
            slots=options.slots,
            single_slot=options.single_slot,
            vertical=options.schedule == "vertical",
            num_micro_batches=training.gradient_accumulation_steps,
            activation_bytes=outlined.activation_bytes,
            fill=options.fill_ram,
            more_slots=more_slots,
            vram=options.vram or 0,
            optimistic=optimistic,
            stored=stored,
        )
    except PlanError as error:
        raise PlanError(f"engine.ram: {error}") from error


def batches_of(config: Config, tokenizer: Tokenizer, split: str, progress: Progress | None = None) -> Batches:
    """The data of a run; tokenised when it is not in the cache yet."""
    training = config.training
    return Batches(
        config.data,
        tokenizer,
        sequence_length=training.sequence_length,
        micro_batch_size=training.per_device_train_batch_size,
        seed=training.seed,
        cache=Path(config.output_dir) / CACHE,
        split=split,
        progress=progress,
    )


def _num_steps(config: Config, batches: Batches, share: Share) -> int:
    training = config.training
    if training.max_steps != -1:
        return training.max_steps
    epochs = Fraction(str(training.num_train_epochs))  # 0.1 is a tenth: its float is a little more, and a step more
    in_a_step = training.gradient_accumulation_steps * share.num_ranks
    return math.ceil(epochs * batches.num_micro_batches_per_epoch / in_a_step)


@contextmanager
def leaving_nothing(config: Config) -> Iterator[None]:
    """Data that cannot be used leave no empty cache behind. Several ranks begin this before any of them tokenises, and
    leave it when none of them does any more: a folder is not taken away from under another's feet."""
    cache = Path(config.output_dir) / CACHE
    made = [path for path in (cache, *cache.parents) if not os.path.exists(path)]
    try:
        yield
    except (GreedySnakeError, OSError):
        with suppress(OSError):  # it could not be made; or another rank takes it away as well
            if cache in made and set(os.listdir(cache)) <= {"lock"}:
                (cache / "lock").unlink(missing_ok=True)
                for path in made:
                    path.rmdir()
        raise
