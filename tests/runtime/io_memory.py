"""Page-aligned memory for the I/O tests."""

from __future__ import annotations

import ctypes
import mmap
import random
from pathlib import Path

from greedysnake.runtime.io import File, IoEngine

KIB = 1 << 10
MIB = 1 << 20


class Memory:
    """An aligned buffer whose address can be given to the engine."""

    def __init__(self, nbytes: int, content: bytes | None = None) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes = nbytes
        if content is not None:
            self._map[: len(content)] = content

    def bytes(self, start: int = 0, nbytes: int | None = None) -> bytes:
        return self._map[start : start + (self.nbytes - start if nbytes is None else nbytes)]

    def fill(self, content: bytes, start: int = 0) -> None:
        self._map[start : start + len(content)] = content


def random_bytes(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def file_of(engine: IoEngine, path: Path, content: bytes) -> File:
    path.write_bytes(content)
    return engine.open(path)
