"""Words in fewer bytes on the drives: neighbours have nearly the same exponent, which is stored once. Exact.

Knows addresses and sizes. Where the words lie is the layout's business, and how they are compressed that of the
native kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

from greedysnake import _native
from greedysnake._native import ThreadPool
from greedysnake.errors import StorageError
from greedysnake.runtime.layout import ExtentSpec
from greedysnake.runtime.manifest import Contents
from greedysnake.runtime.transfers import StoreTicket


class Compressor:
    """Makes parts of extents smaller before they are written, and whole again once they were read. Threads may share
    it."""

    def __init__(self, pool: ThreadPool | None, *, compresses: bool) -> None:
        """What was compressed is decompressed whether it `compresses` or not."""
        self._pool = pool or ThreadPool(1)
        self._compresses = compresses

    def compress(self, spec: ExtentSpec, parts: range, address: int) -> dict[int, Contents]:
        """What is to be written of each of these parts, which lie whole and in a row from `address` on. One that is
        compressed begins where it did, and its memory holds nothing else until it is restored."""
        contents = {}
        for part in parts:
            start = address + spec.offsets[part] - spec.offsets[parts.start]
            nbytes = self._compress_words(spec, part, start) if self._compresses else spec.parts[part]
            contents[part] = Contents(_native.crc32c(start, nbytes), nbytes)
        return contents

    def restore(self, spec: ExtentSpec, contents: Mapping[int, Contents], address: int) -> None:
        """The inverse of `compress`, of parts that were not written after all."""
        for part, (_, nbytes) in contents.items():
            start = address + spec.offsets[part] - spec.offsets[next(iter(contents))]
            self._decompress_words(spec, part, start, nbytes)

    def decompress(self, spec: ExtentSpec, ticket: StoreTicket) -> None:
        """Makes the parts whole that were read; StorageError where one cannot be."""
        for piece in ticket.pieces:
            for part, (begin, (_, nbytes)) in piece.sums.items():
                try:
                    self._decompress_words(spec, part, piece.address + begin, nbytes)
                except ValueError as error:
                    raise StorageError(
                        f"{piece.file.path}: part {part} of extent {ticket.extent} (offset {piece.offset + begin}) "
                        f"cannot be decompressed: {error}; check the drive, then resume from a checkpoint",
                        path=str(piece.file.path),
                        offset=piece.offset + begin,
                    ) from None

    def _compress_words(self, spec: ExtentSpec, part: int, address: int) -> int:
        whole, words = spec.parts[part], spec.words
        if words is None or words.part != part:
            return whole
        num_words = (whole - words.begin) // words.nbytes
        return words.begin + _native.compress(self._pool, address + words.begin, num_words, words.nbytes)

    def _decompress_words(self, spec: ExtentSpec, part: int, address: int, nbytes: int) -> None:
        whole, words = spec.parts[part], spec.words
        if nbytes == whole:
            return
        if words is None or words.part != part or not words.begin < nbytes < whole:
            raise ValueError(f"{nbytes} of its {whole} bytes are stored, and it is none that is compressed")
        num_words = (whole - words.begin) // words.nbytes
        _native.decompress(self._pool, address + words.begin, nbytes - words.begin, num_words, words.nbytes)
