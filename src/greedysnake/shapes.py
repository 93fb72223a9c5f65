"""The shape of a model as the schedule sees it: blocks, cut into chunks of a few parts. Knows sizes, not values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Literal

GRANULE = 2048
"""Chunks are multiples of this many parameters, so that every part of one is a multiple of 4096 bytes."""


MOMENT_GROUP = 64
"""Parameters whose 8-bit moments share a scale. Every parameter of a module begins with a new group."""

PAGE_BYTES = 4096
"""The parts of a chunk are multiples of it, as O_DIRECT needs them."""


@dataclass(frozen=True)
class Vector:
    """One kind of value of a chunk, which lie in a row: so many bytes for so many parameters."""

    name: str
    num_bytes: int
    num_params: int = 1

    def size(self, num_params: int) -> int:
        """Bytes for a range of parameters, which is a multiple of MOMENT_GROUP."""
        return num_params // self.num_params * self.num_bytes


def _moments(num_bytes: int) -> tuple[Vector, ...]:
    return Vector("exp_avg", num_bytes), Vector("exp_avg_sq", num_bytes)


MomentsName = Literal["float32", "bfloat16", "int8"]
MOMENTS: dict[str, tuple[Vector, ...]] = {
    "float32": _moments(4),
    "bfloat16": _moments(2),
    "int8": (*_moments(1), Vector("exp_avg_scale", 4, MOMENT_GROUP), Vector("exp_avg_sq_scale", 4, MOMENT_GROUP)),
}
"""How the moments of AdamW may be stored, and what is stored of them."""
WORD_BYTES = {"float32": 4, "bfloat16": 2}
"""Those of which one may be compressed: numbers with an exponent of their own, and how long they are."""


@dataclass(frozen=True)
class Precision:
    """What is stored of a parameter, and in how many bytes."""

    name: str
    weight_bytes: int
    """What the device computes with."""
    residual_bytes: int
    """What joins with the weight to give the fp32 master; 0 when the weight is the master."""
    moments: str = "float32"
    """A key of MOMENTS."""

    gradient_bytes: int = 4

    def vectors(self, *, trainable: bool) -> tuple[Vector, ...]:
        """What lies in a chunk, in this order; only the weight does not belong to its state."""
        master = (Vector("weight", self.weight_bytes), Vector("residual", self.residual_bytes))
        return tuple(vector for vector in master if vector.num_bytes) + MOMENTS[self.moments] * trainable

    def offsets(self, num_params: int, *, trainable: bool) -> dict[str, int]:
        """Where each vector begins in a chunk of so many parameters, and where the last one ends ("end")."""
        vectors = self.vectors(trainable=trainable)
        ends = accumulate((vector.size(num_params) for vector in vectors), initial=0)
        return dict(zip([*(vector.name for vector in vectors), "end"], ends, strict=True))

    def state_bytes(self, num_params: int, *, trainable: bool = True) -> int:
        """Bytes of everything in a chunk but its weight, rounded up to pages."""
        return _state_bytes(self, num_params, trainable)

    def chunk_bytes(self, num_params: int) -> int:
        """Bytes of a trainable chunk."""
        return self.weight_bytes * num_params + self.state_bytes(num_params)

    def update_bytes(self, num_params: int) -> int:
        """Bytes of a chunk with its gradient, as it is updated."""
        return self.chunk_bytes(num_params) + self.gradient_bytes * num_params


@cache
def _state_bytes(precision: Precision, num_params: int, trainable: bool) -> int:
    """Of the few kinds of chunks that there are; a forecast of a large model asks half a million times."""
    end = precision.offsets(num_params, trainable=trainable)["end"] - precision.weight_bytes * num_params
    return -(-end // PAGE_BYTES) * PAGE_BYTES


PRECISIONS = {"bfloat16": Precision("bfloat16", 2, 2), "float32": Precision("float32", 4, 0)}
"""With moments in float32."""


def precision_of(dtype: str, moments: str) -> Precision:
    """What is stored when the device computes in `dtype`."""
    return replace(PRECISIONS[dtype], moments=moments)


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
    (stays from a step's first to its last use), or "kept" (never leaves)."""
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
