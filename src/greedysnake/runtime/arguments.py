"""What the engine is given: checked, and refused in words, before anything is built or run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from os import PathLike, cpu_count, fspath
from typing import TypeVar

import torch

from greedysnake.errors import ConfigError
from greedysnake.models.sequential import Batch, MicroBatch, Model

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Given = TypeVar("Given")


@dataclass(frozen=True)
class IoOptions:
    """How the drives are used."""

    backend: str = "auto"
    """ "io_uring", "threads", or "auto" to ask the kernel."""
    queue_depth: int = 32
    num_threads: int = 8
    piece_bytes: int = 1 << 20
    read_bytes_per_s: float | None = None
    """Rate limits, for users who share a drive; None is no limit."""
    write_bytes_per_s: float | None = None
    total_bytes_per_s: float | None = None


def check_numbers(alpha: float, max_grad_norm: float | None, chunk_params: int | None, seed: int) -> None:
    if not _is_number(alpha) or not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"alpha is {alpha!r}: give a fraction between 0 and 1")
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm > 0):
        raise ConfigError(f"max_grad_norm is {max_grad_norm!r}: give a positive number, inf to clip nothing, or None")
    if chunk_params is not None and (not isinstance(chunk_params, int) or chunk_params < 1):
        raise ConfigError(f"chunk_params is {chunk_params!r}: give a whole number, 1 or more")
    if not isinstance(seed, int):
        raise ConfigError(f"seed is {seed!r}: give a whole number")


def check_threads(num_threads: int | None, cpus: Sequence[int] | None) -> None:
    if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
        raise ConfigError(f"num_threads is {num_threads!r}: give a whole number, 1 or more")
    if cpus is not None and not (isinstance(cpus, Sequence) and all(isinstance(cpu, int) for cpu in cpus)):
        raise ConfigError(f"cpus is {cpus!r}: give a list of the numbers of CPUs")


def checked_dtype(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name in ("float16", "fp16", "half"):
        raise ConfigError("dtype is float16, which needs loss scaling: use bfloat16, which has the range of float32")
    if name not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: use 'bfloat16' or 'float32'")
    return name


def check_moments(moments: str, stored: str | None) -> None:
    if stored is not None and moments != stored:
        raise ConfigError(
            f"moments is {moments!r}, the checkpoint has them in {stored!r}: give AdamW(moments={stored!r}), in a "
            f"configuration training.adam_moments={stored}; or copy the run by greedysnake reshard --moments {moments}"
        )


def checked_kind(name: str, value: object, kind: type[Given]) -> Given:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}: give a gs.{kind.__name__}")
    return value


def checked_storage(storage: Sequence[str | PathLike[str]], *, resume: bool, checkpoints: bool) -> list[str]:
    if isinstance(storage, (str, bytes, PathLike)) or not isinstance(storage, Iterable):
        raise ConfigError(f"storage is {storage!r}: give a list of directories, one per drive")
    directories = list(storage)
    for directory in directories:
        if not isinstance(directory, (str, PathLike)) or not isinstance(fspath(directory), str):
            raise ConfigError(f"storage names {directory!r}: give each directory as a text or a Path")
    if resume and not directories:
        raise ConfigError("resume=True needs the storage directories of the checkpoint: give storage=[...]")
    if resume and not checkpoints:
        raise ConfigError("resume=True with checkpoints=False: a run without checkpoints cannot continue one")
    return [fspath(directory) for directory in directories]


def check_optimistic(
    optimistic: bool,
    schedule: str,
    max_grad_norm: float | None,
    storage: Sequence[str],
    *,
    single_slot: bool,
) -> None:
    if not optimistic:
        return
    if max_grad_norm is None:
        raise ConfigError("optimistic=True and max_grad_norm is None: without clipping there is nothing to wait for")
    if schedule != "vertical":
        raise ConfigError(f"optimistic=True needs the vertical schedule, schedule is {schedule!r}")
    if not storage:
        raise ConfigError("optimistic=True needs a storage directory: in RAM, updates that wait cost nothing")
    if single_slot:
        raise ConfigError("optimistic=True needs two more slots than single_slot=True leaves: give one of them")


def checked_device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device is {device!r}: use 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(device)!r}: use 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {str(device)!r} and torch finds no CUDA device: use 'cpu', or install a driver")
    if device.type == "cuda" and device.index is None:
        # Which one is meant is decided here: a later torch.cuda.set_device would put half of the engine elsewhere.
        return torch.device("cuda", torch.cuda.current_device())
    return device


def default_threads(device: torch.device, num_engines: int = 1) -> int:
    """On a GPU machine the thread that launches kernels keeps cores to itself. Several engines share a machine's."""
    cores = (cpu_count() or 1) // num_engines
    return max(1, cores - 4) if device.type == "cuda" else max(1, cores // 2)


def checked_rate(lr: float) -> float:
    if not (_is_number(lr) and math.isfinite(lr) and lr >= 0):
        raise ConfigError(f"lr is {lr!r}: give a finite number, 0 or more")
    return lr


def checked_batches(micro_batches: Iterable[Batch]) -> list[Batch]:
    if isinstance(micro_batches, Mapping):
        raise ConfigError("one batch was given: give a list of micro-batches, [batch] for one")
    if not isinstance(micro_batches, Iterable):
        raise ConfigError(f"the micro-batches are a {type(micro_batches).__name__}: give a list of dicts of tensors")
    batches = list(micro_batches)
    if not batches:
        raise ConfigError("a step needs at least one micro-batch")
    for index, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise ConfigError(f"micro-batch {index} is a {type(batch).__name__}: give a dict of tensors")
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(f"{name!r} of micro-batch {index} is a {type(value).__name__}: give a tensor")
    return batches


def count_targets(model: Model, batches: Sequence[Batch]) -> int:
    given = [model.num_targets(batch) for batch in batches]
    counts = [int(count) for count in given]
    for count, number in zip(given, counts, strict=True):
        if count != number:
            raise ConfigError(f"num_targets gave {count}: give a whole number, how many tokens have a loss")
    return sum(counts)


def to_device(batch: Batch, device: torch.device) -> MicroBatch:
    return MicroBatch({name: _usable(value).to(device, non_blocking=True) for name, value in batch.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _usable(value: torch.Tensor) -> torch.Tensor:
    """A tensor made under inference_mode cannot be saved for a backward; a copy made outside of it can."""
    return value.clone() if value.is_inference() else value
