"""Which slot holds what: the rule of the slots as a table, without any I/O.

The *pinned* slot of a part belongs to the last checkpoint. Writes go to the working slot, which is the
other one (in single_slot there is no other). The *current* slot holds the newest contents, whichever it is.
A tentative write goes to a third one, the *spare*: until it is confirmed, the current one stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from greedysnake.errors import StorageError
from greedysnake.runtime.layout import ExtentSpec
from greedysnake.runtime.manifest import Contents, PartRecord


@dataclass(slots=True)
class _Part:
    current: int | None = None
    """None when never written."""
    pinned: int | None = None
    """None when the last checkpoint does not hold this part."""
    contents: Contents = field(default=Contents(0, 0))
    unsettled: bool = False
    """A write was started and has not been settled: the newest contents are unknown."""


@dataclass(slots=True, eq=False)
class Attempt:
    """Tentative writes that count together or not at all."""

    confirmed: bool | None = None
    """None as long as it is open."""
    settled: list[tuple[int, int, int, Contents]] = field(default_factory=list)
    """(extent, part, slot, contents) of those that have ended while it is open."""


class SlotTable:
    """Slots of all parts, and what is in them. Threads may work on different extents."""

    def __init__(self, extents: Sequence[ExtentSpec], num_slots: int) -> None:
        self._num_slots = num_slots
        self._parts = [[_Part() for _ in spec.parts] for spec in extents]
        self._lock = threading.Lock()

    def to_read(self, extent: int, parts: range) -> tuple[dict[int, int], dict[int, Contents]]:
        """Current slot of each part, and what is there; StorageError when one has no known contents."""
        slots, contents = {}, {}
        for part in parts:
            state = self._parts[extent][part]
            if state.unsettled:
                raise StorageError(
                    f"cannot read part {part} of extent {extent}: its last write has not succeeded: "
                    "wait for it, or write the part again"
                )
            if state.current is None:
                raise StorageError(f"cannot read part {part} of extent {extent}: it was never written")
            slots[part], contents[part] = state.current, state.contents
        return slots, contents

    def start_write(self, extent: int, parts: range) -> dict[int, int]:
        """Working slot of each part; until `settle` their contents count as unknown."""
        slots = {}
        for part in parts:
            state = self._parts[extent][part]
            state.unsettled = True
            in_place = state.current is not None and (state.current != state.pinned or self._num_slots == 1)
            slots[part] = state.current if in_place and state.current is not None else self._free(state.pinned)
        return slots

    def start_tentative_write(self, extent: int, parts: range) -> dict[int, int]:
        """Spare slot of each part; what is current stays so."""
        return {part: self._free(state.pinned, state.current) for part, state in self._states(extent, parts)}

    def _states(self, extent: int, parts: range) -> Iterator[tuple[int, _Part]]:
        return ((part, self._parts[extent][part]) for part in parts)

    def _free(self, *taken: int | None) -> int:
        return next(slot for slot in range(self._num_slots) if slot not in taken)

    def settle(self, extent: int, slots: Mapping[int, int], contents: Mapping[int, Contents]) -> None:
        """The write of these parts has succeeded: their working slots are current."""
        for part, slot in slots.items():
            state = self._parts[extent][part]
            state.current, state.contents, state.unsettled = slot, contents[part], False

    def settle_tentative(
        self, attempt: Attempt, extent: int, slots: Mapping[int, int], contents: Mapping[int, Contents]
    ) -> None:
        """The tentative write of these parts has succeeded."""
        with self._lock:
            if attempt.confirmed is None:
                attempt.settled += [(extent, part, slot, contents[part]) for part, slot in slots.items()]
                return
        if attempt.confirmed:
            self.settle(extent, slots, contents)

    def end_attempt(self, attempt: Attempt, *, confirmed: bool) -> None:
        """Its writes, those still under way or to come included, count from now on; or never did."""
        with self._lock:
            attempt.confirmed = confirmed
        for extent, part, slot, contents in attempt.settled if confirmed else ():
            self.settle(extent, {part: slot}, {part: contents})

    def unsettled(self) -> list[tuple[int, int]]:
        """(extent, part) of every write that has not been settled."""
        return [
            (extent, part)
            for extent, states in enumerate(self._parts)
            for part, state in enumerate(states)
            if state.unsettled
        ]

    def records(self) -> list[list[PartRecord]]:
        """What a manifest says about each part, from the current slots."""
        return [
            [None if state.current is None else (state.current, state.contents) for state in states]
            for states in self._parts
        ]

    def load(self, records: Sequence[Sequence[PartRecord]]) -> None:
        """Start from a checkpoint."""
        for states, of_extent in zip(self._parts, records, strict=True):
            for state, record in zip(states, of_extent, strict=True):
                if record is not None:
                    state.current, state.contents = record
                    state.pinned = state.current

    def pin(self) -> None:
        """A checkpoint of the current slots is durable: what was pinned before may be written."""
        for states in self._parts:
            for state in states:
                state.pinned = state.current


def lying_together(slots: Mapping[int, int], short: Container[int]) -> Iterator[range]:
    """Runs of neighbouring parts that lie in one slot, without a gap behind those that are `short`. The keys of `slots`
    are consecutive."""
    start = previous = next(iter(slots))
    for part in slots:
        if slots[part] != slots[previous] or (previous in short and part != previous):
            yield range(start, part)
            start = part
        previous = part
    yield range(start, previous + 1)
