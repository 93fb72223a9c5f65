"""What a write is taken for that finds no room on the drive: by greedysnake's I/O engine and by DeepSpeed's.

    python benchmarks/full_drive.py DIR

DIR lies on a small file system of its own, which is filled for a moment: one with more than 1 GiB free is refused.
Each system writes more than there is room for and says whether that went well; the file tells what is there. DeepSpeed
compiles its async_io for that, with libaio's header and library. Nothing is left behind, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from step_options import Parser

MOST_FREE = 1 << 30
MORE = 16 << 20
"""Bytes that do not fit."""


def greedysnake_write(path: Path, num_bytes: int) -> str:
    from greedysnake.errors import StorageError
    from greedysnake.runtime.arena import Arena
    from greedysnake.runtime.io import IoEngine

    with Arena(num_bytes) as arena, IoEngine() as io, io.open(path, create=True) as file:
        data = arena.allocate(num_bytes, "data")
        data.fill_(7)
        try:
            io.wait(io.submit("write", file, 0, data.data_ptr(), num_bytes))
        except StorageError as error:
            return f"an error: {error}"
    return "done"


def deepspeed_write(path: Path, num_bytes: int) -> str:
    """With the settings that benchmarks/step.py gives it."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(1 << 20, 16, False, True, 4)
    data = handle.new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
    data.fill_(7)
    started = handle.async_pwrite(data, str(path), 0)
    num_done = handle.wait()
    return f"done: async_pwrite() returned {started} and wait() {num_done}"


SYSTEMS: dict[str, Callable[[Path, int], str]] = {"greedysnake": greedysnake_write, "deepspeed": deepspeed_write}


def bytes_there(path: Path) -> int:
    """Those that have a place on the drive; the length of the file says nothing."""
    return path.stat().st_blocks * 512 if path.exists() else 0


def tell(system: str, directory: Path) -> None:
    if importlib.util.find_spec(system) is None:
        print(f"{system:12} is not installed")
        return
    path = directory / f"full-drive-{os.getpid()}"
    num_bytes = (shutil.disk_usage(directory).free + MORE) // MORE * MORE + MORE
    command = [sys.executable, __file__, str(directory), "--worker", system, "--file", str(path)]
    try:
        done = subprocess.run([*command, "--num-bytes", str(num_bytes)], capture_output=True, text=True)
        answer = done.stdout.splitlines()[-1] if done.returncode == 0 else ended(done)
        print(
            f"{system:12} wrote {num_bytes:,} bytes, {bytes_there(path):,} of them are there, and it says:\n  {answer}"
        )
    finally:
        path.unlink(missing_ok=True)


def ended(done: subprocess.CompletedProcess[str]) -> str:
    last = done.stderr.strip().splitlines() or ["nothing"]
    return f"ended with exit code {done.returncode}: {last[-1]}"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--num-bytes", type=int, help=argparse.SUPPRESS)
    options: argparse.Namespace = parser.parse_args(arguments)
    if not options.directory.is_dir():
        parser.error(f"{options.directory} is no directory: give one on a small file system")
    free = shutil.disk_usage(options.directory).free
    if free > MOST_FREE:
        parser.error(
            f"{options.directory} has {free} bytes free and would be filled: give a file system of 1 GiB or less"
        )
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.worker:
        print(SYSTEMS[options.worker](options.file, options.num_bytes))
        return 0
    for system in SYSTEMS:
        tell(system, options.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
