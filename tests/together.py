"""Runs a function of a test module in several processes that torch.distributed connects, as torchrun starts them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

SCRIPT = """
import json, sys, warnings
sys.path.insert(0, {tests!r})
warnings.filterwarnings("ignore", message=".*rank.*")
import torch
import torch.distributed as dist
torch.set_num_threads(1)
rank, count, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=count)
import {module}
result = {module}.{function}(*json.loads(sys.argv[4]))
print("RESULT", json.dumps(result), flush=True)
"""


@contextlib.contextmanager
def started(num_ranks: int, module: str, function: str, *arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that each call `module.function(*arguments)`; arguments and result pass as JSON."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), module=module, function=function)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(rank), str(num_ranks), f"{folder}/meet", json.dumps(arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        with none_left(processes):
            yield processes


@contextlib.contextmanager
def none_left(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
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
