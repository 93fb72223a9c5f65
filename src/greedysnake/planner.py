"""What a run would take: measures this machine by a short training, then asks the simulator.

The short training has the embedding, one layer of each kind and the head of the user's own model, with micro-batches of
the run's shape. Nothing of the run is written or changed.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

from greedysnake.config import Config
from greedysnake.errors import ConfigError, PlanError, StorageError
from greedysnake.locks import locked
from greedysnake.models.sequential import Batch, BlockSource, Model
from greedysnake.ops import Plan
from greedysnake.placement import num_compute_blocks
from greedysnake.planning.costs import BlockTimes, Costs, Rates
from greedysnake.planning.observe import Observed, observe
from greedysnake.planning.simulate import Forecast, forecast
from greedysnake.planning.solve import Choice, solve
from greedysnake.preparation import (
    Outline,
    device_and_configuration,
    footprint_of,
    make_model,
    open_engine,
    outline_of,
    ram_budget,
    require_room,
)
from greedysnake.runs import find_run
from greedysnake.runtime.directory import TRIAL, own_directories
from greedysnake.runtime.drive import Bandwidth, look_at_drive
from greedysnake.runtime.filling import homes_bytes
from greedysnake.runtime.flat import FlatBlock
from greedysnake.runtime.footprint import Footprint, device_bytes, missing_room, nearest_existing
from greedysnake.runtime.opening import Stored, stored_in
from greedysnake.settings import Size
from greedysnake.shapes import MomentsName, Share
from greedysnake.threads import torch_threads

TRIAL_STEPS, TRIAL_MICRO_BATCHES = 3, 3
"""The first step is not counted: code is compiled and buffers are touched for the first time."""
TRIAL_LAYERS = {"cpu": 4, "cuda": 1}
"""Of each kind. Where the CPU computes, the updates and transfers of other layers take its time: some must be there."""
SATURATED = 0.97
"""Of a step, computing: more micro-batches would gain no more than the rest."""
MOST_DOUBLINGS = 6
USED_VRAM = 0.92
"""Of what is free on a GPU: memory that is freed and taken in pieces of other sizes has gaps."""
ABANDONED_S = 60.0
"""A trial's folder is locked before it is so old, until the trial ends."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Machine:
    """This machine, as far as steps of one model depend on it."""

    device: str
    rates: Rates
    times: tuple[BlockTimes, ...]
    """Of each block of the whole model."""
    room_bytes: int | None = None
    """Memory of the device for buffers and homes, besides what computing needs; None where it is RAM."""

    def of_one_of(self, num_ranks: int) -> Machine:
        """What one of so many ranks has of it: drives and cores are shared, GPUs and their links are not. What passes
        between GPUs is taken to be fast: it was not measured."""
        rates = self.rates
        shared = {"ssd_bytes_per_s", "ssd_read_bytes_per_s", "ssd_write_bytes_per_s"}
        shared |= {"cpu_params_per_s", "cpu_bytes_per_s"}
        if self.device == "cpu":
            shared |= {"h2d_bytes_per_s", "d2h_bytes_per_s"}
        rates = replace(rates, **{name: value / num_ranks for name in shared if (value := getattr(rates, name))})
        slower = num_ranks if self.device == "cpu" else 1
        times = (BlockTimes(each.forward_s * slower, each.backward_s * slower) for each in self.times)
        return replace(self, rates=rates, times=tuple(times))


@dataclass(frozen=True)
class Option:
    """A way to run, and what is expected of it."""

    config: Config
    """Written out: nothing is left to be chosen when it runs."""
    footprint: Footprint
    forecast: Forecast
    clipped: Forecast | None = None
    """Of steps that are clipped, where that makes a difference: their updates wait for the norm."""

    @property
    def num_tokens(self) -> int:
        """Of a step, all ranks' together, padding included."""
        training = self.config.training
        per_micro_batch = training.per_device_train_batch_size * training.sequence_length
        return per_micro_batch * training.gradient_accumulation_steps * self.num_ranks

    @property
    def num_ranks(self) -> int:
        return self.footprint.plan.num_ranks

    @property
    def disk_bytes(self) -> int:
        """All ranks' together."""
        return sum(self.footprint.disk_bytes) * self.num_ranks

    @property
    def written_bytes(self) -> float:
        """To the drives in a step, by all ranks."""
        return self.forecast.written_bytes * self.num_ranks

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.forecast.step_s

    @property
    def typical_s(self) -> float:
        """Of steps half of which are clipped, where that makes a difference."""
        return (self.forecast.step_s + (self.clipped or self.forecast).step_s) / 2


@dataclass(frozen=True)
class Planned:
    """The answer: the run as it is configured, as it would be fastest, and with larger steps."""

    machine: Machine
    given: Option
    chosen: Option
    larger: tuple[Option, ...]
    """With more micro-batches, each twice as many as before; up to one that is saturated, or that does not fit."""
    compact: tuple[Option, ...] = ()
    """As chosen, but with moments in fewer bytes, as long as the device is not busy all the time. They change the
    training, so they are shown and not chosen."""

    @staticmethod
    def is_saturated(option: Option) -> bool:
        """Whether the device computes for practically all of a step."""
        return option.forecast.least_s["compute"] >= SATURATED * option.forecast.step_s


def plan_run(config: Config, say: Say, num_ranks: int = 1) -> Planned:
    """`say` is told what is being done. What `train` would refuse is refused here too, but for weights and data that
    are not there yet. `num_ranks` processes would train together, each on a device like the one that is measured."""
    if num_ranks < 1:
        raise ConfigError(f"--ranks is {num_ranks}: give at least 1")
    share = Share(0, num_ranks, num_ranks)
    run = find_run(config)
    device, model_config = device_and_configuration(config, is_new=run is None)
    model, ram = make_model(config, model_config), ram_budget(config, share)
    stored = stored_in(own_directories(config.storage, share)[0]) if run else None
    outlined = outline_of(config, model, model_config, ram, stored, share)
    footprint = footprint_of(config, outlined, ram, stored)
    require_room(config, footprint, share)  # a run that does not fit is refused before anything is measured
    machine = measure(config, model, model_config, outlined, footprint.plan, device=device, ram=ram, say=say)
    expecting = _Expecting(config, machine.of_one_of(num_ranks), outlined, ram, stored)
    given = expecting.as_configured()
    say("looking for the best alpha and slots")
    chosen, choice, expecting = expecting.best(given)
    say("looking at larger steps")
    compact: Iterator[Option] = iter(())
    if run is None:  # one that is continued keeps its moments
        outline = partial(outline_of, model=model, model_config=model_config, ram=ram, share=share)
        compact = expecting.compact(chosen, choice, outline)
    return Planned(machine, given, chosen, tuple(expecting.larger(chosen, choice)), tuple(compact))


class _Expecting:
    """What a configuration would give on a machine, with other choices and more micro-batches."""

    def __init__(self, config: Config, machine: Machine, outlined: Outline, ram: int, stored: Stored | None) -> None:
        self._config = config
        self._machine = machine
        self._outlined = outlined
        self._ram = ram
        self._stored = stored

    def as_configured(self) -> Option:
        return self._option(self._config, more_slots=True, fill_device=False)

    def best(self, given: Option) -> tuple[Option, Choice, _Expecting]:
        """The best of what is not set, and who expects that. Whether updates wait for the norm is decided by what it
        saves here, if there is room."""
        found = [(*self.fastest(given), self)]
        engine = self._config.engine
        if engine.optimistic is None and self._config.may_be_optimistic and not given.footprint.plan.may_be_tentative:
            other = replace(self._config, engine=replace(engine, optimistic=True))
            trying = _Expecting(other, self._machine, self._outlined, self._ram, self._stored)
            try:
                start = trying.as_configured()
                if not missing_room(start.footprint, other.storage, self._outlined.share):
                    found.append((*trying.fastest(start), trying))
            except PlanError:
                pass  # no RAM for it
        return min(found, key=lambda each: each[0].typical_s)

    def fastest(self, given: Option) -> tuple[Option, Choice]:
        """By alpha and slots alone."""
        plan, alpha = given.footprint.plan, self._config.engine.alpha
        start = Choice(alpha, plan.slots.updates, plan.slots.staging)
        found = {} if self._machine.room_bytes else {start: given}

        def step_s(choice: Choice) -> float:
            if choice not in found:
                try:
                    found[choice] = self.option_with(choice, self._config.training.gradient_accumulation_steps)
                except PlanError:
                    return math.inf
            return found[choice].typical_s

        waits = plan.clipping and not plan.may_be_tentative  # then every update is late, whatever alpha says
        choice = solve(step_s, start, least_s=given.forecast.least_s["compute"], vary_alpha=not waits)
        return found[choice], choice

    def larger(self, option: Option, choice: Choice) -> Iterator[Option]:
        for _ in range(MOST_DOUBLINGS):
            if Planned.is_saturated(option):
                return
            try:
                option = self.option_with(choice, 2 * option.config.training.gradient_accumulation_steps)
            except PlanError:
                return
            yield option

    def compact(self, option: Option, choice: Choice, outline: Callable[[Config], Outline]) -> Iterator[Option]:
        """What is stored decides how large chunks are, so the model is cut anew for each kind."""
        training = self._config.training
        kinds: tuple[MomentsName, ...] = get_args(MomentsName)
        for moments in kinds[kinds.index(training.adam_moments) + 1 :]:
            if Planned.is_saturated(option):
                return
            config = replace(self._config, training=replace(training, adam_moments=moments))
            trying = _Expecting(config, self._machine, outline(config), self._ram, self._stored)
            try:
                option = trying.option_with(choice, training.gradient_accumulation_steps)
            except PlanError:
                return  # larger chunks have larger buffers
            yield option

    def option_with(self, choice: Choice, num_micro_batches: int) -> Option:
        training, engine = self._config.training, self._config.engine
        slots = replace(engine.slots, updates=choice.updates, staging=choice.staging)
        config = replace(
            self._config,
            training=replace(training, gradient_accumulation_steps=num_micro_batches),
            engine=replace(engine, alpha=choice.alpha, slots=slots),
        )
        return self._option(config, more_slots=False, fill_device=True)

    def _option(self, config: Config, *, more_slots: bool, fill_device: bool) -> Option:
        machine = self._machine
        room = machine.room_bytes if config.engine.schedule == "vertical" else None
        if fill_device and room is not None and not config.engine.placement.graphs_device:  # whose size is not known
            config = replace(config, engine=replace(config.engine, vram=self._spare(config, room)))
        footprint = footprint_of(config, self._outlined, self._ram, self._stored, more_slots=more_slots)
        plan = footprint.plan
        costs = Costs(plan, machine.rates, machine.times, activation_bytes=self._outlined.activation_bytes)
        count, kind = config.training.gradient_accumulation_steps, config.engine.schedule
        engine = replace(
            config.engine,
            ram=Size(self._ram * self._outlined.share.num_here),
            vram=None,
            fill_ram=False,
            placement=plan.placement,
            slots=plan.slots,
            optimistic=plan.may_be_tentative if plan.clipping else config.engine.optimistic,
        )
        clipped = forecast(plan, costs, count, clipped=True) if plan.may_be_tentative else None
        return Option(replace(config, engine=engine), footprint, forecast(plan, costs, count, kind=kind), clipped)

    def _spare(self, config: Config, room: int) -> Size:
        """What is left of the device's room beside buffers and what was put there by hand."""
        config = replace(config, engine=replace(config.engine, vram=None))
        footprint = footprint_of(config, self._outlined, self._ram, self._stored, more_slots=False)
        count = config.training.gradient_accumulation_steps
        by_hand = homes_bytes(footprint.plan, count, self._outlined.activation_bytes)
        return Size(max(0, room - footprint.device_bytes + by_hand))


# The machine


def measure(
    config: Config,
    model: Model,
    model_config: Any,
    outlined: Outline,
    plan: Plan,
    *,
    device: str,
    ram: int,
    say: Say,
) -> Machine:
    """Its drives by a file that is gone afterwards, the rest by a few steps of a shortened model."""
    directories = [nearest_existing(directory) for directory in config.storage]
    say("measuring " + ", ".join(map(str, directories)))
    drives = _bandwidth(directories)
    kinds = _kinds(outlined.blocks, getattr(model_config.get_text_config(), "layer_types", None))
    kept = [number for numbers in kinds for number in numbers[: TRIAL_LAYERS[device]]]
    num_compute = sum(map(len, kinds))
    say(f"training {len(kept) - 2} of {num_compute - 2} layers for {TRIAL_STEPS} steps on {device}")
    batches = _batches(config, int(model_config.get_text_config().vocab_size))
    with torch_threads(config.engine.compute_threads):
        seen, room_bytes = _try(
            config,
            _Shortened(model, kept),
            batches,
            plan,
            activation_bytes=outlined.activation_bytes,
            device=device,
            ram=ram,
        )
    of_block = dict(zip(sorted(kept), seen.times, strict=True))
    times = {
        number: _typical([of_block[other] for other in numbers if other in of_block])
        for numbers in kinds
        for number in numbers
    }
    rates = replace(
        seen.rates,
        ssd_bytes_per_s=drives.mixed_bytes_per_s,
        ssd_read_bytes_per_s=drives.read_bytes_per_s,
        ssd_write_bytes_per_s=drives.write_bytes_per_s,
    )
    return Machine(device, rates, tuple(times[number] for number in range(num_compute)), room_bytes)


def _typical(times: Sequence[BlockTimes]) -> BlockTimes:
    return BlockTimes(median(each.forward_s for each in times), median(each.backward_s for each in times))


def _bandwidth(directories: Sequence[Path]) -> Bandwidth:
    """Of all drives together. Every directory gets as many bytes as any other, so the slowest drive sets the pace, and
    one that has two of them has twice as much to do."""
    found: dict[int | None, tuple[Bandwidth, int]] = {}
    for directory in directories:
        drive = look_at_drive(directory)
        if drive.bandwidth is None:
            why = drive.write_error or drive.why_no_bandwidth
            raise StorageError(f"engine.storage: how fast {directory} is cannot be measured: {why}")
        found[drive.device_number] = (drive.bandwidth, found.get(drive.device_number, (None, 0))[1] + 1)

    def together(name: str) -> float:
        return len(directories) * min(float(getattr(each, name)) / count for each, count in found.values())

    return Bandwidth(together("read_bytes_per_s"), together("write_bytes_per_s"), together("mixed_bytes_per_s"))


class _Shortened:
    """Some blocks of a model."""

    def __init__(self, model: Model, kept: Sequence[int]) -> None:
        self._model = model
        self._kept = frozenset(kept)

    def sources(self) -> Iterator[BlockSource]:
        return (source for number, source in enumerate(self._model.sources()) if number in self._kept)

    def num_targets(self, batch: Batch) -> int:
        return self._model.num_targets(batch)


def _kinds(blocks: Sequence[FlatBlock], layer_types: Sequence[str] | None) -> list[list[int]]:
    """The blocks that run, those together that are alike: they take equally long."""
    num_compute = num_compute_blocks([block.shape for block in blocks])
    kinds: dict[object, list[int]] = {}
    for number, block in enumerate(blocks[:num_compute]):
        kind: object = number
        if 0 < number < num_compute - 1:
            places = tuple((place.name.removeprefix(f"{block.name}."), place.shape) for place in block.places)
            kind = (places, layer_types[number - 1] if layer_types else None)
        kinds.setdefault(kind, []).append(number)
    return list(kinds.values())


def _num_tried(config: Config) -> int:
    """Micro-batches of the short training: no more than the run has, whose activations fit."""
    return min(TRIAL_MICRO_BATCHES, config.training.gradient_accumulation_steps)


def _batches(config: Config, vocabulary: int) -> list[Batch]:
    """Micro-batches of the run's shape, of random tokens; packed rows have two documents."""
    training, length = config.training, config.training.sequence_length
    shape = (training.per_device_train_batch_size, length)
    half = torch.arange(length) % (length // 2)
    generator = torch.Generator().manual_seed(training.seed)
    batches: list[Batch] = []
    for _ in range(_num_tried(config)):
        ids = torch.randint(vocabulary, shape, generator=generator)
        with_documents = (
            {"position_ids": half.expand(shape)} if config.data.packing else {"attention_mask": torch.ones_like(ids)}
        )
        batches.append({"input_ids": ids, "labels": ids, **with_documents})
    return batches


def _beside(directory: Path) -> Path:
    """A folder on the drive of a directory: not the directory itself, if that is there and another can be had, since a
    store shares it with nothing, not even with what a process left that was killed."""
    existing, parent = nearest_existing(directory), nearest_existing(directory).parent
    is_free = existing != directory.absolute() or existing.stat().st_dev != parent.stat().st_dev
    return existing if is_free or not os.access(parent, os.W_OK) else parent


def _take_away_what_was_left(folder: Path) -> None:
    """By processes that were killed while they planned: what nobody has locked and nobody has just made."""
    for left in folder.glob(f"{TRIAL}*"):
        with suppress(OSError), locked(left) as is_ours:
            if is_ours and time.time() - left.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(left)


def _try(
    config: Config,
    model: Model,
    batches: Sequence[Batch],
    plan: Plan,
    *,
    activation_bytes: int,
    device: str,
    ram: int,
) -> tuple[Observed, int | None]:
    """Steps with the run's own shares in RAM and on the drive: where the CPU computes, all of them take its time.

    Returns what was seen, and the room that a GPU has beside what computing needs."""
    free_bytes = 0
    if device == "cuda":
        free_bytes = torch.cuda.mem_get_info()[0]
        torch.cuda.reset_peak_memory_stats()
    beside = _beside(config.storage[0])
    _take_away_what_was_left(beside)
    with ExitStack() as resources:
        folder = tempfile.TemporaryDirectory(prefix=TRIAL, dir=beside)
        storage = resources.enter_context(folder)
        resources.enter_context(locked(Path(storage)))
        options = replace(config.engine, storage=(storage,), single_slot=False)
        trial = replace(config, engine=options)
        engine = resources.enter_context(
            open_engine(trial, model, device=device, ram=ram, resume=False, plan=plan, is_trial=True)
        )
        for step in range(TRIAL_STEPS):
            engine.step(batches)
            if step == 0:
                engine.flush()
                engine.records.clear()
        engine.flush()
        seen = observe(engine.records, engine.plan)
        if device != "cuda":
            return seen, None
        held_bytes = device_bytes(engine.plan, _num_tried(config), activation_bytes)
        computing_bytes = torch.cuda.max_memory_allocated() - held_bytes
        return seen, int(USED_VRAM * free_bytes) - computing_bytes
