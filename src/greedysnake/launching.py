"""Joins the processes that a launcher such as torchrun started. Is told their numbers: it reads no environment itself,
though torch reads there where the processes meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from greedysnake.errors import ConfigError, RankError


@dataclass(frozen=True)
class Launched:
    """One process of those that a launcher started."""

    rank: int = 0
    local_rank: int = 0
    """Among those on this host: the number of its GPU."""
    num_ranks: int = 1


@contextmanager
def joined(launched: Launched, device: str) -> Iterator[None]:
    """This process and the others can talk to each other, until the context ends. `device` is that of the
    configuration; with GPUs each process has its own. One process alone needs nothing."""
    if launched.num_ranks == 1:
        yield
        return
    if not dist.is_available():
        raise ConfigError(
            f"{launched.num_ranks} processes were started, and this torch has no torch.distributed: install one that "
            "has it, or start one process"
        )
    gpu = _own_gpu(launched) if device != "cpu" and torch.cuda.is_available() else None
    try:
        dist.init_process_group(
            "gloo" if gpu is None else "cpu:gloo,cuda:nccl",
            rank=launched.rank,
            world_size=launched.num_ranks,
            device_id=gpu,
        )
    except ValueError as error:  # a variable that torch looks for
        raise ConfigError(
            f"{launched.num_ranks} processes were started that do not know where to meet ({_first_line(error)}): start "
            "them with torchrun"
        ) from error
    except RuntimeError as error:
        raise RankError(
            f"the {launched.num_ranks} processes did not meet ({_first_line(error)}): see that all of them were started"
        ) from error
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _own_gpu(launched: Launched) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if launched.local_rank >= num_gpus:
        raise ConfigError(
            f"the process with LOCAL_RANK {launched.local_rank} needs a GPU of its own and this host has {num_gpus}: "
            f"start {num_gpus} processes (torchrun --nproc-per-node {num_gpus}), or use engine.device=cpu"
        )
    torch.cuda.set_device(launched.local_rank)
    return torch.device("cuda", launched.local_rank)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".:")
