"""The configuration of a training: one YAML file, checked before anything is loaded. No torch."""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from greedysnake import settings
from greedysnake.data.options import STANDARD_LIBRARY, DataOptions
from greedysnake.errors import ConfigError, explained
from greedysnake.options import BYTES, EngineOptions, ModelOptions, TrainingOptions
from greedysnake.settings import Plain
from greedysnake.shapes import Precision, precision_of

DEFAULT = Path(__file__).with_name("default.yaml")
"""What greedysnake train runs without a configuration."""

RUN, METRICS = "run.yaml", "metrics.jsonl"
"""Files in the folder of a run."""

RUN_ID, HAS_CHECKPOINT = "run_id", "has_checkpoint"
"""What run.yaml says besides the configuration. It is of that run and means nothing to another."""


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

    def with_default_blocks(self, layers_per_block: int) -> Config:
        """With so many layers in a block unless it says itself how many."""
        chosen = self.engine.layers_per_block or layers_per_block
        return replace(self, engine=replace(self.engine, layers_per_block=chosen))

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
    had, given = had.with_default_blocks(1), given.with_default_blocks(had.engine.layers_per_block or 1)
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
    "engine.layers_per_block",
    "engine.single_slot",
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
