"""Where each extent lies: which directory, at which offset. Pure arithmetic, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from greedysnake.errors import ConfigError
from greedysnake.shapes import PAGE_BYTES

ALIGNMENT_BYTES = PAGE_BYTES
"""What O_DIRECT needs on every drive in use today; also the page size."""

RunLengths = list[tuple[int, tuple[int, ...]]]
"""Extents as (how many in a row, their parts): a model has many chunks of few shapes."""


@dataclass(frozen=True)
class Words:
    """Numbers in a part that may be stored in fewer bytes; they reach to its end."""

    part: int
    begin: int
    """Bytes of the part before them."""
    nbytes: int
    """Of one of them: 4 or 2."""


@dataclass(frozen=True)
class ExtentSpec:
    """One chunk on SSD: parts that lie together, in this order, each with its own CRC32C."""

    parts: tuple[int, ...]
    """Bytes of each part, multiples of 4096."""
    absent: frozenset[int] = frozenset()
    """Parts that are never written: the drive need not have room for them."""
    words: Words | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("an extent needs at least one part")
        for num_bytes in self.parts:
            if num_bytes <= 0 or num_bytes % ALIGNMENT_BYTES:
                raise ConfigError(f"a part of {num_bytes} bytes: parts are positive multiples of {ALIGNMENT_BYTES}")
        assert not self.words or self.words.begin % ALIGNMENT_BYTES == 0, "what is compressed begins with a page"

    def may_hold(self, part: int, nbytes: int) -> bool:
        """Whether so many bytes can be what is stored of a part."""
        if nbytes == self.parts[part]:
            return True
        if self.words is None or self.words.part != part or nbytes % ALIGNMENT_BYTES:
            return False
        return self.words.begin < nbytes < self.parts[part]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each part starts inside the extent, and where the last one ends."""
        return tuple(accumulate(self.parts, initial=0))


@dataclass(frozen=True)
class Place:
    """A byte range of one directory's file."""

    member: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """All places of a store. Slot 1 of an extent lies `slot_bytes` of its directory after slot 0."""

    num_slots: int
    extents: tuple[Place, ...]
    scratch: tuple[Place, ...]
    slot_bytes: tuple[int, ...]
    """Per directory: bytes of one slot of all its extents."""
    scratch_bytes: tuple[int, ...]
    """Per directory."""
    backed: tuple[tuple[range, ...], ...]
    """Per directory: the ranges of a slot that the drive has room for, which are all unless parts are absent."""

    @staticmethod
    def build(extents: Sequence[ExtentSpec], scratch: Sequence[int], *, num_members: int, num_slots: int) -> Layout:
        for num_bytes in scratch:
            if num_bytes <= 0:
                raise ConfigError(f"a scratch range of {num_bytes} bytes: ask for at least one")
        places, slot_bytes = _stripe([spec.num_bytes for spec in extents], num_members)
        scratch_places, scratch_bytes = _stripe([_align(num_bytes) for num_bytes in scratch], num_members)
        backed = tuple(
            tuple(
                _backed([(spec, place) for spec, place in zip(extents, places, strict=True) if place.member == member])
            )
            for member in range(num_members)
        )
        return Layout(num_slots, places, scratch_places, slot_bytes, scratch_bytes, backed)

    @property
    def disk_bytes(self) -> int:
        """What the data files in all directories take together."""
        ranges = [found for member in range(len(self.backed)) for found in self.backed_ranges(member)]
        return sum(map(len, ranges)) + sum(self.scratch_bytes)

    def extents_bytes(self, member: int) -> int:
        """Bytes of all slots of the extents of one directory, those without room included."""
        return self.num_slots * self.slot_bytes[member]

    def backed_ranges(self, member: int) -> list[range]:
        """What the drive has room for in the extents file of one directory."""
        shifts = [slot * self.slot_bytes[member] for slot in range(self.num_slots)]
        return [range(found.start + by, found.stop + by) for by in shifts for found in self.backed[member]]


def run_lengths(extents: Sequence[ExtentSpec]) -> RunLengths:
    return [(len(list(group)), parts) for parts, group in groupby(spec.parts for spec in extents)]


def _backed(extents: Sequence[tuple[ExtentSpec, Place]]) -> list[range]:
    found: list[range] = []
    for spec, place in extents:
        for part, (start, stop) in enumerate(pairwise(spec.offsets)):
            if part in spec.absent:
                continue
            if found and found[-1].stop == place.offset + start:
                found[-1] = range(found[-1].start, place.offset + stop)
            else:
                found.append(range(place.offset + start, place.offset + stop))
    return found


def _stripe(sizes: Sequence[int], num_members: int) -> tuple[tuple[Place, ...], tuple[int, ...]]:
    """Each range goes to the directory with the fewest bytes so far, so equal ranges alternate."""
    filled = [0] * num_members
    places = []
    for num_bytes in sizes:
        member = filled.index(min(filled))
        places.append(Place(member, filled[member], num_bytes))
        filled[member] += num_bytes
    return tuple(places), tuple(filled)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
