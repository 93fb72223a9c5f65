"""What the ops of an engine really touch, and whether what they wait for keeps apart all that must not meet.

On a GPU lanes are streams, and ops run at once wherever nothing orders them; on a CPU they mostly happen to come one
after another. So nothing here is taken from what a schedule says of its ops: every access is noted where it is made, in
torch's operators, native kernels, copies and requests to the drives. Then a vector clock for each lane tells, from what
ops wait for and from nothing else, which of them are over when another begins.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from greedysnake import _native
from greedysnake.hazards import Hazards
from greedysnake.ops import Lane, Op
from greedysnake.runtime import runner
from greedysnake.runtime.actions import Actions
from greedysnake.runtime.context import StepContext
from greedysnake.runtime.io import File, IoEngine
from greedysnake.runtime.lanes import LaneRunner, Task, Wait
from greedysnake.runtime.room import Room
from greedysnake.runtime.store import Store
from greedysnake.runtime.updates import Updates
from greedysnake.shapes import MOMENTS

MEMORY, EXTENTS, VERDICT, SQUARES = "memory", "extents", "verdict", "squares"
"""Spaces besides the files, which go by their path. The newest contents of an extent, which may lie in any of its
places, are touched by part: two for each extent."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class Touch(NamedTuple):
    """A range of a space that an op reads or writes."""

    space: str
    start: int
    end: int
    writes: bool


@dataclass(eq=False)
class Traced:
    """An op that was given to its lane."""

    op: Op
    place: int
    """In the order of the list, from the begin of its period."""
    after: list[Traced]
    """What it waits for on other lanes, and on its own where ops of that overlap."""
    touches: set[Touch] = field(default_factory=set)


Period = list[Traced]
"""Ops in program order. Between two periods the engine waits for everything."""
Waits = Callable[[Period], Iterable[Sequence[Traced]]]
"""For each op of a period, what it waits for."""


class Recorder:
    """Notes what is touched while an op is under way; installed before an engine is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.periods: list[Period] = [[]]
        self._numbers = dict.fromkeys(Lane, 0)
        self._by_mark: dict[tuple[Lane, int], Traced] = {}
        self._by_op: dict[int, Traced] = {}
        self._thread = threading.local()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(runner, "Task", self._link)
        self._before(Hazards, "forget", self._restart)
        self._before(Room, "use", lambda *_: self._begin_period())
        run = Actions.run
        monkeypatch.setattr(
            Actions, "run", lambda actions, op, context: self._run(op, lambda: run(actions, op, context))
        )
        self._watch_host()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches torch's operators. Around everything, since torch keeps in its process whether anyone does, and lanes
        that begin and end to do so at any time would leave it wrong."""
        with _Operators(self._touch):
            yield

    def _watch_host(self) -> None:
        self._before(ctypes, "memmove", self._copied)
        self._before(_native, "adamw", self._updated)
        self._before(_native, "add_fp32", self._added)
        self._before(_native, "sum_of_squares", self._squared)
        self._before(_native, "crc32c", lambda address, nbytes, seed=0: self._touch(MEMORY, address, nbytes))
        self._before(IoEngine, "submit", self._transferred)
        self._before(Store, "read", self._store_read)
        self._before(Store, "write", self._store_written)
        self._before(Updates, "squares", lambda *_: self._touch(SQUARES, 0, 1, writes=True))
        self._before(Updates, "decide", self._decided)
        self._before(Updates, "update", self._judged)

    def _before(self, owner: object, name: str, note: Callable[..., None]) -> None:
        call = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return call(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, noted)

    # Ops

    def _begin_period(self) -> None:
        self.periods.append([])
        self._by_mark.clear()

    def _restart(self, hazards: Hazards, counts: Mapping[Lane, int]) -> None:
        self._begin_period()
        self._numbers = dict.fromkeys(Lane, 0) | dict(counts)

    def _link(self, op: Op, after: list[tuple[LaneRunner, int]]) -> Task:
        marks = [(other.lane, number) for other, number in after]
        known = [self._by_mark[mark] for mark in marks if mark in self._by_mark]
        traced = Traced(op, len(self.periods[-1]), known)
        self.periods[-1].append(traced)
        self._numbers[op.lane] += 1
        self._by_mark[op.lane, self._numbers[op.lane]] = traced
        self._by_op[id(op)] = traced
        return Task(op, after)

    def _run(self, op: Op, run: Callable[[], int | Wait]) -> int | Wait:
        traced = self._by_op[id(op)]
        result = self._within(traced, run)
        if not callable(result):
            return result
        return lambda: self._within(traced, result)

    def _within(self, traced: Traced, call: Callable[[], Any]) -> Any:
        self._thread.traced = traced
        try:
            with _Operators(self._touch):
                return call()
        finally:
            self._thread.traced = None

    # What they touch

    def _touch(self, space: str, start: int, size: int, *, writes: bool = False) -> None:
        traced: Traced | None = getattr(self._thread, "traced", None)
        if traced is not None and size:
            traced.touches.add(Touch(space, start, start + size, writes))

    def _copied(self, target: int, source: int, nbytes: int) -> None:
        self._touch(MEMORY, target, nbytes, writes=True)
        self._touch(MEMORY, source, nbytes)

    def _updated(self, pool: object, isa: str, moments: str, grad: int, grad_dtype: str, *rest: Any) -> None:
        weight, residual, *addresses = rest[:6]
        count = rest[6]
        self._touch(MEMORY, grad, count * ITEM_BYTES[grad_dtype])
        self._touch(MEMORY, weight, count * (2 if residual else 4), writes=True)
        self._touch(MEMORY, residual, count * 2 if residual else 0, writes=True)
        for vector, address in zip(MOMENTS[moments], addresses, strict=False):
            self._touch(MEMORY, address, vector.size(count), writes=True)

    def _added(self, pool: object, total: int, part: int, count: int) -> None:
        self._touch(MEMORY, total, 4 * count, writes=True)
        self._touch(MEMORY, part, 4 * count)

    def _squared(self, pool: object, values: int, dtype: str, count: int, *_: int) -> None:
        self._touch(MEMORY, values, count * ITEM_BYTES[dtype])

    def _transferred(
        self, io: IoEngine, kind: str, file: File, offset: int, address: int, nbytes: int, urgent: bool = False
    ) -> None:
        self._touch(file.path, offset, nbytes, writes=kind == "write")
        self._touch(MEMORY, address, nbytes, writes=kind == "read")

    def _store_read(self, store: Store, extent: int, address: int, parts: slice = slice(None), **_: object) -> None:
        for part in range(2)[parts]:
            self._touch(EXTENTS, 2 * extent + part, 1)

    def _store_written(self, store: Store, extent: int, address: int, parts: slice = slice(None), **_: object) -> None:
        for part in range(2)[parts]:
            self._touch(EXTENTS, 2 * extent + part, 1, writes=True)

    def _decided(self, updates: Updates, op: Op, context: StepContext) -> None:
        self._touch(VERDICT, 0, 1, writes=True)
        self._touch(SQUARES, 0, 1)

    def _judged(self, updates: Updates, op: Op, context: StepContext) -> None:
        if not op.tentative:
            self._touch(VERDICT, 0, 1)


class _Operators(TorchDispatchMode):
    """Notes the memory that torch's operators are given, on the thread that enters it."""

    def __init__(self, touch: Callable[..., None]) -> None:
        super().__init__()
        self._touch = touch

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _makes_view(func):
            for tensor, writes in _given(func, args, kwargs):
                reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                nbytes = (reach + 1) * tensor.element_size() if tensor.numel() else 0
                self._touch(MEMORY, tensor.data_ptr(), nbytes, writes=writes)
        return func(*args, **kwargs)


def _makes_view(func: Any) -> bool:
    returned = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    arguments = func._schema.arguments
    values = [*zip(arguments, args, strict=False)]
    values += [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]
    for argument, value in values:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                yield tensor, writes


# What must not meet


def linked(period: Period) -> list[list[Traced]]:
    """What the engine's lanes were told to wait for."""
    return [traced.after for traced in period]


def races(periods: Iterable[Period], waits: Waits = linked) -> list[str]:
    """Every two ops that may run at once though one writes what the other touches; none is what one wants."""
    return [str(race) for period in periods for race in _races_in(period, waits(period))]


@dataclass(frozen=True)
class Race:
    earlier: Op
    later: Op
    over: Touch

    def __str__(self) -> str:
        first, second = (f"{op} on {op.lane.value}" for op in (self.earlier, self.later))
        return f"{second} may run while {first} does: both touch {self.over}"


def _races_in(period: Period, waits: Iterable[Sequence[Traced]]) -> Iterator[Race]:
    over_before = _clocks(period, waits)
    for (earlier, later), touch in conflicts(period).items():
        first, second = period[earlier], period[later]
        if over_before[later][first.op.lane] < earlier:
            yield Race(first.op, second.op, touch)


Clock = dict[Lane, int]
"""Of each lane the place of the last op that is over. A lane begins its ops in order and ends them in order, so all
before that are over too."""


def _clocks(period: Period, waits: Iterable[Sequence[Traced]]) -> list[Clock]:
    """What is over when each op begins."""
    lanes: dict[Lane, Clock] = {lane: dict.fromkeys(Lane, -1) for lane in Lane}
    at_begin: list[Clock] = []
    for traced, after in zip(period, waits, strict=True):
        lane = traced.op.lane
        clock = dict(lanes[lane])
        for other in after:
            for known, place in at_begin[other.place].items():
                clock[known] = max(clock[known], place)
            clock[other.op.lane] = max(clock[other.op.lane], other.place)
        at_begin.append(clock)
        lanes[lane] = clock if lane.overlaps else clock | {lane: traced.place}
    return at_begin


def conflicts(period: Period) -> dict[tuple[int, int], Touch]:
    """(earlier, later) ops that touch the same, one of them writing, and what that is. Of each lane the last op that
    conflicts stands for all before it."""
    cuts = _cuts(period)
    last: dict[tuple[str, int, bool], dict[Lane, int]] = {}
    found: dict[tuple[int, int], Touch] = {}
    for traced in period:
        lane = traced.op.lane
        pieces = [(touch, piece) for touch in traced.touches for piece in _pieces(touch, cuts)]
        for touch, piece in pieces:
            for writes in (True, False) if touch.writes else (True,):
                for other, place in last.get((touch.space, piece, writes), {}).items():
                    if other is not lane or lane.overlaps:
                        found.setdefault((place, traced.place), touch)
        for touch, piece in pieces:
            last.setdefault((touch.space, piece, touch.writes), {})[lane] = traced.place
    return found


def _pieces(touch: Touch, cuts: Mapping[str, Sequence[int]]) -> range:
    of_space = cuts[touch.space]
    return range(bisect_left(of_space, touch.start), bisect_left(of_space, touch.end))


def _cuts(period: Period) -> dict[str, list[int]]:
    """Where touches begin and end, by space. What compute alone touches, tensors that come and go within it, is in
    order, and left out: there all of it lies in one piece or in none."""
    ends: dict[str, set[int]] = {}
    for touch in {touch for traced in period for touch in traced.touches}:
        ends.setdefault(touch.space, set()).update((touch.start, touch.end))
    return {space: sorted(found) for space, found in ends.items()}


def relinked(change: Callable[[Op], Op]) -> Waits:
    """What ops would wait for if they said something else of what they read and write."""

    def waits(period: Period) -> Iterator[list[Traced]]:
        hazards, by_mark = Hazards(), dict[tuple[Lane, int], Traced]()
        numbers = dict.fromkeys(Lane, 0)
        for traced in period:
            marks = hazards.add(change(traced.op))
            numbers[traced.op.lane] += 1
            by_mark[traced.op.lane, numbers[traced.op.lane]] = traced
            yield [by_mark[mark] for mark in marks]

    return waits
