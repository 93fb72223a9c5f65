"""The shape of a model as the schedule sees it: blocks, cut into chunks of a few parts. Knows sizes, not values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

GRANULE = 2048
"""Chunks are multiples of this many parameters, so that every part of one is a multiple of 4096 bytes."""


@dataclass(frozen=True)
class Precision:
    """How many bytes a parameter takes in each part of its chunk."""

    name: str
    weight_bytes: int
    """What the device computes with."""
    residual_bytes: int
    """What joins with the weight to give the fp32 master; 0 when the weight is the master."""

    moment_bytes: int = 8
    gradient_bytes: int = 4

    @property
    def state_bytes(self) -> int:
        """Everything of a trainable parameter but its weight."""
        return self.residual_bytes + self.moment_bytes

    @property
    def all_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes


PRECISIONS = {"bfloat16": Precision("bfloat16", 2, 2), "float32": Precision("float32", 4, 0)}


@dataclass(frozen=True)
class Share:
    """Which part of every block one rank holds: ranks hold equal parts, and together all of it."""

    rank: int = 0
    num_ranks: int = 1
    num_here: int = 1
    """Ranks on the same host, which share its memory, cores and drives."""


@dataclass(frozen=True)
class Chunk:
    """A range of a block's flat vector: the unit of SSD transfer and of optimizer work."""

    start: int
    num_params: int
    trainable: bool


@dataclass(frozen=True)
class BlockShape:
    """A unit of streaming: embedding, decoder layer(s) or head, or the parameters that several of them share."""

    name: str
    chunks: tuple[Chunk, ...]
    """Those of the rank at hand; the device holds the whole block."""
    pool: str
    """Blocks of one pool take turns in the same device slots: "layers", "ends", "shared"
    (never leaves), or "kept" (stays from forward to backward)."""
    num_ranks: int = 1
    """How many ranks hold as much of it."""

    @cached_property
    def num_params(self) -> int:
        """Length of the flat vector, all ranks' parts of it together."""
        return self.num_own * self.num_ranks

    @cached_property
    def num_trainable(self) -> int:
        """Length of the trainable part, which comes first in the flat vector."""
        return sum(chunk.num_params for chunk in self.chunks if chunk.trainable) * self.num_ranks

    @cached_property
    def num_own(self) -> int:
        """What the rank at hand holds."""
        return sum(chunk.num_params for chunk in self.chunks)


def cut(num_params: int, chunk_params: int, *, start: int = 0, trainable: bool = True) -> list[Chunk]:
    """Cuts a padded range of parameters into chunks of nearly equal size, none above `chunk_params`."""
    if num_params % GRANULE or chunk_params % GRANULE or chunk_params <= 0:
        raise ValueError(f"{num_params} parameters in chunks of {chunk_params}: not multiples of {GRANULE}")
    num_granules = num_params // GRANULE
    num_chunks = -(-num_params // chunk_params)
    chunks = []
    for index in range(num_chunks):
        first = num_granules * index // num_chunks
        last = num_granules * (index + 1) // num_chunks
        chunks.append(Chunk(start + first * GRANULE, (last - first) * GRANULE, trainable))
    return chunks


def pad(num_params: int, num_ranks: int = 1) -> int:
    """Rounds up to whole granules, as many for each rank."""
    return -(-num_params // (GRANULE * num_ranks)) * GRANULE * num_ranks


def block_shape(
    name: str, num_trainable: int, num_frozen: int, chunk_params: int, pool: str, share: Share | None = None
) -> BlockShape:
    """A block whose flat vector holds `num_trainable` parameters, then `num_frozen`, each padded. A rank's share is a
    range of either part."""
    share = share or Share()
    trainable, frozen = (pad(count, share.num_ranks) for count in (num_trainable, num_frozen))
    each, each_frozen = trainable // share.num_ranks, frozen // share.num_ranks
    chunks = cut(each, chunk_params, start=share.rank * each)
    chunks += cut(each_frozen, chunk_params, start=trainable + share.rank * each_frozen, trainable=False)
    return BlockShape(name, tuple(chunks), pool, share.num_ranks)


def spread(count: int, share: float) -> list[bool]:
    """Marks round(count * share) of `count` places, evenly spread."""
    chosen = round(count * share)
    return [(index + 1) * chosen // count > index * chosen // count for index in range(count)]


def total_params(blocks: Sequence[BlockShape]) -> int:
    """All ranks' together."""
    return sum(block.num_params for block in blocks)
