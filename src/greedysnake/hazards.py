"""Which earlier ops an op must wait for, from what they touch. Shared by everyone who runs a schedule; no torch."""

from __future__ import annotations

from greedysnake.ops import Lane, Op, Resource

Mark = tuple[Lane, int]
"""The n-th op of a lane, counted from 1 over all lists."""


class Hazards:
    """Follows a schedule in program order. A lane retires its ops in order, so the last op of each lane that
    conflicts stands for all before it."""

    def __init__(self) -> None:
        self._count: dict[Lane, int] = dict.fromkeys(Lane, 0)
        self._writer: dict[Resource, Mark] = {}
        self._readers: dict[Resource, dict[Lane, int]] = {}

    def add(self, op: Op) -> list[Mark]:
        """Takes the next op; returns what it must wait for on other lanes, and on its own where ops of that overlap."""
        lane = op.lane
        number = self._count[lane] + 1
        self._count[lane] = number
        # Of a large model there are a million ops to a forecast: no calls in here that can be left out.
        marks: list[Mark] = []
        writer, readers = self._writer, self._readers
        for resource in op.reads:
            if resource in writer:
                marks.append(writer[resource])
        for resource in op.writes:
            if resource in writer:
                marks.append(writer[resource])
            if resource in readers:
                marks.extend(readers.pop(resource).items())
            writer[resource] = (lane, number)
        for resource in op.reads:
            readers.setdefault(resource, {})[lane] = number
        needed: dict[Lane, int] = {}
        for other, mark in marks:
            if mark > needed.get(other, 0):
                needed[other] = mark
        if not lane.overlaps:
            needed.pop(lane, None)
        return list(needed.items())

    def forget(self, counts: dict[Lane, int]) -> None:
        """Starts anew after everything has ended, with so many ops behind each lane."""
        self._count = dict(counts)
        self._writer.clear()
        self._readers.clear()
