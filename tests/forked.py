"""Processes for tests that start many: forked from one that has imported what takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["torch.distributed", "greedysnake.trainer", "transformers.models.llama.modeling_llama", "pytest"]
)
"""Processes are forked from one that has imported what takes seconds, and has done nothing else."""


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


@contextlib.contextmanager
def none_left(processes: Sequence[Forked]) -> Iterator[None]:
    """Whatever happens, none of them runs on afterwards."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()
