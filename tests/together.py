"""Runs a function of a test module in several processes that torch.distributed connects, as torchrun starts them."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from forked import Forked, none_left


def _rank(rank: int, count: int, meet: str, module: str, function: str, values: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    warnings.filterwarnings("ignore", message=".*rank.*")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=count)
    result = getattr(importlib.import_module(module), function)(*json.loads(values))
    print("RESULT", json.dumps(result), flush=True)


@contextlib.contextmanager
def started(num_ranks: int, module: str, function: str, *arguments: object) -> Iterator[list[Forked]]:
    """Processes that each call `module.function(*arguments)`; arguments and result pass as JSON."""
    with tempfile.TemporaryDirectory() as name:
        task = (num_ranks, f"{name}/meet", module, function, json.dumps(arguments))
        processes = [Forked(Path(name), rank, _rank, rank, *task) for rank in range(num_ranks)]
        with none_left(processes):
            yield processes


def call(num_ranks: int, module: str, function: str, *arguments: object, timeout_s: float = 200) -> list[object]:
    """Runs them to their end and returns what each returned."""
    with started(num_ranks, module, function, *arguments) as processes:
        ended = [process.communicate(timeout=timeout_s) for process in processes]
        for process, (_, errors) in zip(processes, ended, strict=True):
            assert process.returncode == 0, errors
        return [json.loads(output.rsplit("RESULT ", 1)[1]) for output, _ in ended]
