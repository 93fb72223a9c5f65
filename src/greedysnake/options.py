"""The sections of a configuration: model, training, engine; each is checked when it is made. No torch.

Fields have transformers' names where transformers has them. docs/configuration.md is made from the strings below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from greedysnake.errors import ConfigError
from greedysnake.learning_rate import DecayShape, LearningRate, ScheduleName
from greedysnake.placement import Placement, Slots
from greedysnake.settings import Size
from greedysnake.shapes import MomentsName

MAX_THREADS = 1024
"""More than any machine has cores; far more than that, and the system refuses to make them."""

BYTES = "bytes"
"""Stands in `model.tokenizer` for the tokenizer whose tokens are bytes."""


_SCHEDULER_KEYS = {
    "cosine_with_min_lr": ("min_lr_rate",),
    "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio"),
    "wsd": ("num_decay_steps", "decay_type", "min_lr_ratio"),
}
"""What each schedule asks of SchedulerOptions."""


@dataclass(frozen=True)
class ModelOptions:
    """A Hugging Face causal language model: a folder, or a configuration to start from at random."""

    path: str | None = None
    """Folder with config.json and safetensors. Give this, or `config`."""
    config: dict[str, object] | None = None
    """What config.json would hold, model_type first of all; the weights are random, by training.seed."""
    tokenizer: str | None = None
    """Folder with the tokenizer, or "bytes" for one that needs no file: every byte is a token. By default it is taken
    from `path`."""

    def __post_init__(self) -> None:
        if self.path is None and self.config is None:
            raise ConfigError(
                "path is missing: give the folder of a model, or model.config to start from random weights"
            )
        if self.path is not None and self.config is not None:
            raise ConfigError("path and model.config are both given: give one of them")
        kind = "" if self.config is None else self.config.get("model_type")
        if kind is None:
            raise ConfigError("config.model_type is missing: name the kind of model, as in model_type: llama")
        if not isinstance(kind, str):
            raise ConfigError(f"config.model_type is {kind!r}: give the kind of model, as in model_type: llama")
        if self.path is None and self.tokenizer is None:
            raise ConfigError('tokenizer is missing: give the folder of one, or "bytes"')


@dataclass(frozen=True)
class SchedulerOptions:
    """What some learning-rate schedules need beyond warm-up and number of steps."""

    min_lr_rate: float | None = None
    """cosine_with_min_lr: the rate at the end, as a share of learning_rate."""
    num_decay_steps: int | None = None
    """warmup_stable_decay: steps of the decay at the end. By default a tenth of the training."""
    decay_type: DecayShape | None = None
    """warmup_stable_decay: how the rate falls. By default cosine."""
    min_lr_ratio: float | None = None
    """warmup_stable_decay: the rate at both ends, as a share of learning_rate. By default 0."""

    def __post_init__(self) -> None:
        for name in ("min_lr_rate", "min_lr_ratio"):
            _require_fraction(name, getattr(self, name) or 0.0)
        _require_at_least("num_decay_steps", self.num_decay_steps, 0)


@dataclass(frozen=True)
class TrainingOptions:
    """Steps, learning rate, optimizer; when to evaluate, save and report."""

    sequence_length: int = 1024
    """Tokens in a sequence, at most."""
    per_device_train_batch_size: int = 1
    """Sequences in a micro-batch: what the device computes at once."""
    gradient_accumulation_steps: int = 8
    """Micro-batches in a step, on each rank. More of them cost no more transfers of weights: this is what makes
    training from SSD fast."""
    max_steps: int = -1
    """Steps of the training; -1 leaves it to num_train_epochs."""
    num_train_epochs: float = 1.0
    """Passes over the data, when max_steps is -1; rounded up to whole steps, so the last may begin another pass."""
    learning_rate: float = 5e-5
    """The highest rate of the schedule."""
    lr_scheduler_type: ScheduleName = "linear"
    """How the rate changes after the warm-up; "wsd" is short for warmup_stable_decay."""
    lr_scheduler_kwargs: SchedulerOptions = field(default_factory=SchedulerOptions)
    """More about the schedule."""
    warmup_steps: int = 0
    """Steps during which the rate rises from 0."""
    warmup_ratio: float = 0.0
    """The same as a share of all steps; give one of the two."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; norms and biases do not decay."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    adam_moments: MomentsName = "float32"
    """How AdamW's moments are stored: in 8, 4 or 2.1 bytes per parameter. The smaller, the fewer bytes a step moves
    and a run needs; float32 alone is exactly AdamW, the others round."""
    max_grad_norm: float | None = 1.0
    """The norm of the whole gradient is clipped to this; null or 0 switches clipping off."""
    eval_steps: int | None = None
    """Evaluate after every so many steps and at the end; null never. Needs data.validation_share or
    data.validation_paths."""
    max_eval_batches: int | None = None
    """Micro-batches of an evaluation, at most; null takes all held-out data."""
    save_steps: int = 500
    """Save a checkpoint after every so many steps; there is always one at the end and when a signal ends the run. 0
    leaves it at that."""
    logging_steps: int = 10
    """Without a terminal, print a line after every so many steps. metrics.jsonl has every step."""
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] | None = None
    """Where metrics go besides metrics.jsonl. null is TensorBoard if it is installed; [] is nowhere."""
    run_name: str | None = None
    """Name of the run in trackers. By default the name of output_dir."""
    seed: int = 42
    """Of random weights, of the order of the data and of dropout."""
    bf16: bool | None = None
    """The name that transformers has for engine.dtype: true is bfloat16, false float32."""
    fp16: bool = False
    """Must be false: float16 needs loss scaling, which is not there; bfloat16 does not."""

    def __post_init__(self) -> None:
        if self.fp16:
            raise ConfigError("fp16 is true, and float16 needs loss scaling, which is not there: set bf16 instead")
        _require_at_least("sequence_length", self.sequence_length, 2)  # the first token is predicted from nothing
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            _require_at_least(name, getattr(self, name), 1)
        for name in ("eval_steps", "max_eval_batches", "logging_steps"):
            _require_at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "save_steps", "seed"):
            _require_at_least(name, getattr(self, name), 0)
        if self.max_steps != -1 and self.max_steps < 1:
            raise ConfigError(f"max_steps is {self.max_steps}: give 1 or more, or -1 for what num_train_epochs makes")
        for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}: give 0 or more")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a number from 0 to below 1")
        _require_fraction("warmup_ratio", self.warmup_ratio)
        if self.num_train_epochs <= 0:
            raise ConfigError(f"num_train_epochs is {self.num_train_epochs}: give a positive number")
        self._check_schedule()

    @property
    def clip_norm(self) -> float | None:
        """None when clipping is off."""
        return self.max_grad_norm or None

    def rate(self, num_steps: int) -> LearningRate:
        """The schedule of a training of so many steps; ConfigError when it does not fit into them."""
        options, stable = self.lr_scheduler_kwargs, self.lr_scheduler_type in ("wsd", "warmup_stable_decay")
        decay = options.num_decay_steps if options.num_decay_steps is not None else math.ceil(num_steps / 10)
        return LearningRate(
            peak=self.learning_rate,
            name=self.lr_scheduler_type,
            num_steps=num_steps,
            num_warmup=self.warmup_steps or math.ceil(self.warmup_ratio * num_steps),
            num_decay=decay if stable else 0,
            decay_shape=options.decay_type or "cosine",
            min_ratio=(options.min_lr_ratio if stable else options.min_lr_rate) or 0.0,
        )

    def _check_schedule(self) -> None:
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError("warmup_steps and training.warmup_ratio are both given: give one of them")
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            raise ConfigError("lr_scheduler_type is constant, which has no warm-up: use constant_with_warmup")
        used = _SCHEDULER_KEYS.get(self.lr_scheduler_type, ())
        for name, value in vars(self.lr_scheduler_kwargs).items():
            if value is not None and name not in used:
                raise ConfigError(
                    f"lr_scheduler_kwargs.{name} means nothing to lr_scheduler_type {self.lr_scheduler_type}: remove"
                )
        if self.max_steps != -1:
            self.rate(self.max_steps)


@dataclass(frozen=True)
class EngineOptions:
    """Where everything lives and how it is computed."""

    storage: tuple[str, ...] = ()
    """Directories for weights and optimizer state, one per drive. By default `store` in output_dir."""
    ram: Size | None = None
    """Hard budget for all host buffers. null takes half of the RAM that is free at the start. Several ranks on a host
    share it equally."""
    vram: Size | None = None
    """Room on the device for what would otherwise wait in RAM or be fetched in every step: activations first, then
    weights of the last layers, as many as fit. What computing itself needs is not part of it. null is none; with plan
    it is all that is free, and anything else the most that plan puts there, graphs included."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is one."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """What the device computes in; master weights are float32 in both cases. null is bfloat16."""
    schedule: Literal["vertical", "horizontal"] = "vertical"
    """vertical takes all micro-batches through a block before the next; horizontal is plain gradient accumulation."""
    alpha: float = 0.25
    """Share of the updates that is done late, in the next step's forward. With clipping all of them are, unless
    optimistic says otherwise."""
    optimistic: bool | None = None
    """With clipping: after steps that were not clipped, do the next one's updates in the backward without waiting for
    the norm, and once more if it is clipped after all. Nothing changes but the time. Takes half as much disk space
    again; null is true where there is room."""
    compress_moments: bool = True
    """Compress the moments of AdamW on their way to the drives, without loss: of all that crosses these about a tenth
    less, for some work of the CPU. Those in int8 are as small as they get."""
    layers_per_block: int | None = None
    """Layers that pass through the device together. One activation is kept for all of them, so more of them take less
    room for activations and more on the device for weights, gradients and what computing needs. null is 1, what the
    run that is continued has, or what `plan` finds best."""
    chunk_params: int | None = None
    """Parameters in a chunk: the unit of SSD transfer and of optimizer work. null is 4 Mi, or less for a small
    engine.ram."""
    single_slot: bool = False
    """Half the disk space; a run that is killed between checkpoints is then lost."""
    verify_reads: bool = True
    """Check a CRC32C over everything that is read from the drives."""
    num_threads: int | None = None
    """Threads that update chunks on the CPU, on each rank. null leaves some cores to everything else."""
    compute_threads: int | None = None
    """Threads of torch, on each rank; matters when the device is the CPU. null leaves it to torch."""
    compile: bool | None = None
    """Compile layers with torch.compile: slower to start, faster on GPUs. null is true on cuda, for sequences of one
    length (packing, or pad_to sequence_length) and where there is a C compiler."""
    fill_ram: bool = True
    """Keep in RAM what fits into the budget: weights first, then activations, gradients, optimizer state. Shares that
    placement sets to other values than the defaults stay as they are."""
    placement: Placement = field(default_factory=Placement)
    """What stays on the device or in RAM; the rest is on SSD."""
    slots: Slots = field(default_factory=Slots)
    """How many buffers of each kind take turns; with fill_ram, at least so many."""

    def __post_init__(self) -> None:
        _require_fraction("alpha", self.alpha)
        for name in ("chunk_params", "layers_per_block"):
            _require_at_least(name, getattr(self, name), 1)
        for name in ("num_threads", "compute_threads"):
            count = getattr(self, name)
            if count is not None and not 1 <= count <= MAX_THREADS:
                raise ConfigError(f"{name} is {count}: give 1 to {MAX_THREADS}")
        if self.optimistic and (self.single_slot or self.schedule != "vertical"):
            raise ConfigError("optimistic is true, which needs the vertical schedule and no single_slot: remove one")
        if self.schedule == "horizontal" and (self.placement.weights_device or self.placement.graphs_device):
            raise ConfigError(
                "schedule is horizontal, which keeps no layers: set placement.weights_device and graphs_device to 0"
            )
        if self.schedule == "horizontal" and self.vram:
            raise ConfigError("schedule is horizontal, which keeps nothing on the device: set vram to null")
        if len({Path(directory).absolute() for directory in self.storage}) < len(self.storage):
            raise ConfigError("storage names a directory twice: give one directory per drive")

    @property
    def keeps_on_device(self) -> bool:
        """Whether it says what stays on the device between uses; a plan does, even if that is nothing."""
        place = self.placement
        return bool(
            self.vram is not None
            or not self.fill_ram
            or self.schedule == "horizontal"
            or place.activations_device
            or place.weights_device
            or place.graphs_device
        )


def _require_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} is {value:g}: give a fraction between 0 and 1")


def _require_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value}: give {least} or more")
