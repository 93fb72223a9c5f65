"""Runs a function of a test module in several processes that torch.distributed connects, as torchrun starts them."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["torch.distributed", "greedysnake.trainer", "transformers.models.llama.modeling_llama", "pytest"]
)
"""Processes are forked from one that has imported what takes seconds, and has done nothing else."""


class Process(Protocol):
    """What is asked of one; a subprocess.Popen does as well."""

    def kill(self) -> None: ...

    def communicate(self) -> tuple[str, str]: ...


class Forked:
    """Like a subprocess.Popen that runs `work(*values)`; its output goes to files in `folder`."""

    def __init__(self, folder: Path, name: object, work: Callable[..., None], *values: object) -> None:
        self._printed = [folder / f"{name}-{end}" for end in ("output", "errors")]
        self._process = _FORKS.Process(target=_run, args=(self._printed, work, *values))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a forked process", timeout)
        output, errors = (path.read_text() if path.exists() else "" for path in self._printed)
        return output, errors


def _run(printed: Sequence[Path], work: Callable[..., None], *values: object) -> None:
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    try:
        work(*values)
    finally:
        atexit._run_exitfuncs()  # as at the end of any other process: a forked one leaves them out


def run_command(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """greedysnake with these arguments. Work for a `Forked`."""
    from greedysnake.cli import main

    os.environ |= environment
    sys.argv = ["greedysnake", *arguments]
    main()


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


@contextlib.contextmanager
def none_left(processes: Sequence[Process]) -> Iterator[None]:
    """Whatever happens, none of them runs on afterwards."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def call(num_ranks: int, module: str, function: str, *arguments: object, timeout_s: float = 200) -> list[object]:
    """Runs them to their end and returns what each returned."""
    with started(num_ranks, module, function, *arguments) as processes:
        ended = [process.communicate(timeout=timeout_s) for process in processes]
        for process, (_, errors) in zip(processes, ended, strict=True):
            assert process.returncode == 0, errors
        return [json.loads(output.rsplit("RESULT ", 1)[1]) for output, _ in ended]
