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
        needed: dict[Lane, int] = {}
        for resource in op.reads:
            self._need(needed, self._writer.get(resource))
        for resource in op.writes:
            self._need(needed, self._writer.get(resource))
            for mark in self._readers.pop(resource, {}).items():
                self._need(needed, mark)
            self._writer[resource] = (lane, number)
        for resource in op.reads:
            self._readers.setdefault(resource, {})[lane] = number
        if not lane.overlaps:
            needed.pop(lane, None)
        return list(needed.items())

    def forget(self, counts: dict[Lane, int]) -> None:
        """Starts anew after everything has ended, with so many ops behind each lane."""
        self._count = dict(counts)
        self._writer.clear()
        self._readers.clear()

    @staticmethod
    def _need(needed: dict[Lane, int], mark: Mark | None) -> None:
        if mark is not None and needed.get(mark[0], 0) < mark[1]:
            needed[mark[0]] = mark[1]
