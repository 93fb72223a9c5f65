"""A training run reduced to its storage, and what its store must hold after each step.

Run as a program it writes and publishes in a loop, printing each step once it is published; tests kill it.
"""

from __future__ import annotations

import argparse
import mmap
import sys
from pathlib import Path

import numpy as np

from greedysnake.errors import GreedySnakeError
from greedysnake.runtime.io import IoEngine
from greedysnake.runtime.layout import Words
from greedysnake.runtime.store import ExtentSpec, Store

EXTENTS = [
    ExtentSpec((4096, 8192, 4096)),
    ExtentSpec((65536,), words=Words(0, 8192, 2)),
    ExtentSpec((4096, 131072), words=Words(1, 0, 4)),
    ExtentSpec((8192, 65536, 8192, 8192), words=Words(1, 16384, 4)),
]


class Buffer:
    """Page-aligned memory of one extent."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        self.address = int(self.array.ctypes.data)


def contents(extent: int, part: int, version: int, nbytes: int) -> np.ndarray:
    """Numbers that can be compressed where a part is large enough for that, but for every fifth version."""
    seed = np.random.SeedSequence((extent, part, version))
    generator = np.random.Generator(np.random.PCG64(seed))
    if nbytes < 32768 or version % 5 == 4:
        return np.frombuffer(generator.bytes(nbytes), dtype=np.uint8)
    values = generator.normal(size=nbytes // 4).astype(np.float32)
    upper = values.view(np.uint16)[1::2]
    return np.tile(upper, 2).view(np.uint8) if extent == 1 else values.view(np.uint8)


def open_store(path: Path, io: IoEngine, **options: object) -> Store:
    return Store([path], EXTENTS, io=io, fingerprint="writer", **{"compress": True, **options})  # type: ignore[arg-type]


def is_written(extent: int, part: int, step: int) -> bool:
    """The first step writes everything, later ones a changing third of the parts."""
    return step == 1 or (step + extent + part) % 3 == 0


def version(extent: int, part: int, step: int) -> int:
    return next(earlier for earlier in range(step, 0, -1) if is_written(extent, part, earlier))


def write_step(store: Store, step: int) -> None:
    tickets = []
    for extent, spec in enumerate(EXTENTS):
        for part, nbytes in enumerate(spec.parts):
            if is_written(extent, part, step):
                buffer = Buffer(nbytes)
                buffer.array[:] = contents(extent, part, step, nbytes)
                tickets.append((store.write(extent, buffer.address, slice(part, part + 1)), buffer))
    errors = []
    for ticket, _ in tickets:  # all of them, so that no buffer goes while it is in flight
        try:
            store.wait(ticket)
        except GreedySnakeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def check_step(store: Store, step: int) -> None:
    """Fail unless the store holds exactly the state after `step`."""
    assert store.step == step and store.metadata == {"step": step}
    for extent, spec in enumerate(EXTENTS):
        buffer = Buffer(spec.num_bytes)
        store.wait(store.read(extent, buffer.address))
        expected = [contents(extent, part, version(extent, part, step), n) for part, n in enumerate(spec.parts)]
        assert np.array_equal(buffer.array, np.concatenate(expected)), f"extent {extent} is not that of step {step}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directories", nargs="+")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--num-steps", type=int, default=1_000_000)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--hold", action="store_true", help="after the last step, keep the store until stdin ends")
    arguments = parser.parse_args()
    with (
        IoEngine(arguments.backend) as io,
        Store(
            arguments.directories, EXTENTS, io=io, fingerprint="writer", compress=True, resume=arguments.resume
        ) as store,
    ):
        first = (store.step or 0) + 1
        print("open", flush=True)
        for step in range(first, first + arguments.num_steps):
            write_step(store, step)
            store.publish(step, {"step": step})
            print(step, flush=True)
        if arguments.hold:
            sys.stdin.read()


if __name__ == "__main__":
    try:
        main()
    except GreedySnakeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
