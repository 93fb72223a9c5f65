"""The configuration of a training: one YAML file, checked before anything is loaded. No torch.

Fields have transformers' names where transformers has them. docs/configuration.md is made from the strings below.
"""

from __future__ import annotations

import copy
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from greedysnake import settings
from greedysnake.data.options import STANDARD_LIBRARY, DataOptions
from greedysnake.errors import ConfigError, explained
from greedysnake.learning_rate import DecayShape, LearningRate, ScheduleName
from greedysnake.placement import Placement, Slots
from greedysnake.settings import Plain, Size
from greedysnake.shapes import MomentsName, Precision, precision_of

DEFAULT = Path(__file__).with_name("default.yaml")
"""What greedysnake train runs without a configuration."""

MAX_THREADS = 1024
"""More than any machine has cores; far more than that, and the system refuses to make them."""

RUN, METRICS = "run.yaml", "metrics.jsonl"
"""Files in the folder of a run."""

RUN_ID, HAS_CHECKPOINT = "run_id", "has_checkpoint"
"""What run.yaml says besides the configuration. It is of that run and means nothing to another."""

BYTES = "bytes"
"""Stands in `model.tokenizer` for the tokenizer whose tokens are bytes."""


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
    weights of the last layers, as many as fit. What computing itself needs is not part of it. null is none."""
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
        _require_at_least("chunk_params", self.chunk_params, 1)
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


@dataclass(frozen=True)
class Config:
    """All of it."""

    output_dir: str
    """Folder of the run: metrics.jsonl, run.yaml, tokenised data, and the state unless engine.storage says
    elsewhere. The same command with the same folder continues the run."""
    model: ModelOptions
    """What is trained."""
    data: DataOptions
    """What it is trained on."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    """How it is trained."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    """With what."""
    overwrite_output_dir: bool = False
    """Discard the run that is in output_dir and start anew."""

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise ConfigError("output_dir is empty: name a folder for the run")
        if self.training.bf16 is not None and self.engine.dtype not in (None, _DTYPES[self.training.bf16]):
            raise ConfigError(
                f"training.bf16 is {str(self.training.bf16).lower()} and engine.dtype is {self.engine.dtype}: "
                "give one of them"
            )
        if self.engine.optimistic and self.training.clip_norm is None:
            raise ConfigError("engine.optimistic is true and training.max_grad_norm switches clipping off: remove one")
        if self.training.eval_steps and not self.data.has_validation:
            raise ConfigError(
                f"training.eval_steps is {self.training.eval_steps} and nothing is held out: "
                "give data.validation_share or data.validation_paths"
            )

    @property
    def may_be_optimistic(self) -> bool:
        """Whether updates need not wait for the norm, if there is room for that."""
        options = self.engine
        clips, vertical = self.training.clip_norm is not None, options.schedule == "vertical"
        return options.optimistic is not False and clips and vertical and not options.single_slot

    @property
    def dtype(self) -> str:
        return self.engine.dtype or _DTYPES[self.training.bf16 is not False]

    @property
    def precision(self) -> Precision:
        """What is stored of every parameter."""
        return precision_of(self.dtype, self.training.adam_moments)

    @property
    def storage(self) -> tuple[Path, ...]:
        """Directories of the store."""
        return tuple(map(Path, self.engine.storage)) or (Path(self.output_dir) / "store",)

    @property
    def tokenizer(self) -> str:
        """Folder of the tokenizer, or "bytes"."""
        tokenizer = self.model.tokenizer or self.model.path
        assert tokenizer is not None
        return tokenizer

    def as_yaml(self) -> str:
        """All values, defaults included, with paths that do not depend on the working directory."""
        values = settings.plain(self)
        for section, name in _PATHS:
            inner = values[section]
            assert isinstance(inner, dict)
            inner[name] = _absolute(inner[name])
        return settings.write_yaml({**values, "output_dir": str(Path(self.output_dir).absolute())})


@explained("use")
def load_config(
    source: str | Path | Mapping[str, Plain] | None = None, overrides: Sequence[str] = (), *, to_train: bool = True
) -> Config:
    """The configuration in a YAML file or in a mapping, the default one without either, changed by `a.b=c`.

    Without `to_train` output_dir may be anywhere, for it is not used.
    """
    if isinstance(source, Mapping):
        values = copy.deepcopy(dict(source))  # the overrides are not the caller's
    else:
        if source == "":  # a variable of the shell that is not set; Path would make it the working directory
            raise ConfigError("'' cannot be read as text (the name is empty): give a YAML file")
        path = DEFAULT if source is None else Path(source)
        values = settings.read_yaml(_text_of(path), str(path))
    written, run_id = values.get("output_dir"), values.pop(RUN_ID, None)
    values.pop(HAS_CHECKPOINT, None)
    settings.override(values, overrides)
    config = _with_home(settings.build(Config, values))
    if to_train and run_id and isinstance(source, str | Path) and written == config.output_dir:
        _require_at_home(Path(source), run_id, Path(config.output_dir))
    _require_files(config)
    return config


def _require_at_home(source: Path, run_id: Plain, output_dir: Path) -> None:
    """ConfigError when `source` is the run.yaml of a folder that is not output_dir: carried elsewhere, or copied."""
    directory = (source.resolve() if source.is_symlink() else source).parent
    if not (directory / METRICS).exists() or (output_dir.exists() and output_dir.samefile(directory)):
        return
    here, holds_it = shlex.quote(f"output_dir={directory}"), holds_run(output_dir, run_id)
    if holds_it is None:
        return
    if holds_it:
        raise ConfigError(
            f"output_dir is {str(output_dir)!r}, of which {directory} is a copy: give {here} to go on with the copy, "
            f"or {output_dir / RUN} to go on with the other one"
        )
    what = "another run now" if (output_dir / RUN).exists() else "no run any more"
    raise ConfigError(
        f"output_dir is {str(output_dir)!r}, where there is {what}: give {here} to go on with the one there, or "
        "another folder to begin anew"
    )


def holds_run(directory: Path, run_id: Plain) -> bool | None:
    """Whether a folder is that of the run with this id; None where its run.yaml is damaged, of which others speak."""
    try:
        return settings.read_yaml((directory / RUN).read_text(encoding="utf-8"), RUN).get(RUN_ID) == run_id
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (ConfigError, UnicodeDecodeError):
        return None


def difference(had: Config, given: Config) -> str | None:
    """A sentence on what makes `given` another run than `had`; None when it may continue it.

    What changes the course of a training but not what is trained, such as the learning rate, may differ.
    """
    old, new = (settings.read_yaml(config.as_yaml(), "config") for config in (had, given))
    if had.dtype != given.dtype:  # which has two keys
        return f"engine.dtype was {had.dtype!r} and is {given.dtype!r}"
    for key, sentence in settings.differences(old, new):
        if key.split(".")[0] in ("model", "data") or key in _IDENTITY:
            return sentence
    return None


_DTYPES = {True: "bfloat16", False: "float32"}
_PATHS = (
    ("model", "path"),
    ("model", "tokenizer"),
    ("data", "paths"),
    ("data", "validation_paths"),
    ("data", "chat_template"),
    ("engine", "storage"),
)
_IDENTITY = {
    "training.adam_moments",
    "training.seed",
    "training.sequence_length",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "engine.chunk_params",
    "engine.single_slot",
}
_SCHEDULER_KEYS = {
    "cosine_with_min_lr": ("min_lr_rate",),
    "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio"),
    "wsd": ("num_decay_steps", "decay_type", "min_lr_ratio"),
}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: greedysnake init {shlex.quote(str(path))} writes one to start from"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text ({error}): give a YAML file") from error


def _require_files(config: Config) -> None:
    """Everything that is named and must be there before anything starts."""
    if config.model.path is not None:
        settings.require_folder("model.path", config.model.path)
        if not (Path(config.model.path) / "config.json").is_file():
            raise ConfigError(f"model.path is {config.model.path!r}, which has no config.json: give a model's folder")
    if config.model.tokenizer not in (None, BYTES):
        settings.require_folder("model.tokenizer", str(config.model.tokenizer))


def _with_home(config: Config) -> Config:
    """Paths with ~ as a shell would give them; nothing else does in a YAML file."""
    changes: dict[str, Any] = {"output_dir": os.path.expanduser(config.output_dir)}
    for section, name in _PATHS:
        options = changes.get(section, getattr(config, section))
        changes[section] = replace(options, **{name: _expanded(getattr(options, name))})
    return replace(config, **changes)


def _expanded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_expanded, value))
    return os.path.expanduser(value) if value is not None else None


def _absolute(value: Plain) -> Plain:
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    if not isinstance(value, str) or value in ("", BYTES, STANDARD_LIBRARY):
        return value
    return str(Path(value).absolute())


def _require_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} is {value:g}: give a fraction between 0 and 1")


def _require_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value}: give {least} or more")
