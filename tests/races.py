"""What the ops of an engine really touch, and whether what they wait for keeps all apart that must not meet.

On a GPU lanes are streams, and two ops run at once wherever neither waits for the other; on a CPU they mostly happen to
come one after another. So nothing here relies on when ops ran, or on what the schedule says that they read and write.
Every access is noted where it is made: in torch's operators, native kernels, copies and requests to the drives. Vector
clocks then tell, from what ops wait for alone, what is over when an op begins.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
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
from greedysnake.runtime.ranks import Ranks
from greedysnake.runtime.room import Room
from greedysnake.runtime.store import Store
from greedysnake.runtime.updates import Updates
from greedysnake.shapes import MOMENTS

MEMORY = "memory"
CONTENTS = "contents of extents"
"""Two parts of each extent, wherever in the file they are: who reads too early finds the place of those before."""
VERDICT, SQUARES = "verdict", "squares"
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class Touch(NamedTuple):
    """A range that an op reads or writes, of memory, of a file (by its path), or of something without addresses."""

    space: str
    start: int
    end: int
    writes: bool

    @property
    def has_bytes(self) -> bool:
        return self.space not in (CONTENTS, VERDICT, SQUARES)

    def __str__(self) -> str:
        return f"{self.space} from {self.start:#x} to {self.end:#x}"


@dataclass(eq=False)
class Traced:
    """An op that was given to its lane, and run unless its list was dropped."""

    op: Op
    place: int
    """In its period."""
    after: list[Traced]
    """What it waits for on other lanes, and on its own where ops of that overlap."""
    step: int | None = None
    touches: set[Touch] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.op} of step {self.step} on {self.op.lane.value}"


@dataclass(eq=False)
class Period:
    """Ops in program order, between two moments at which the engine waits for everything and starts anew."""

    ops: list[Traced] = field(default_factory=list)

    @cached_property
    def conflicts(self) -> dict[tuple[int, int], Touch]:
        """(earlier, later) ops that touch the same, one of them writing, by their places, and what they touch. Of each
        lane the last op stands for all before it. To be asked for when all have run."""
        cuts = self._cuts()
        last: dict[tuple[str, int, bool], dict[Lane, int]] = {}
        found: dict[tuple[int, int], Touch] = {}
        for traced in self.ops:
            lane = traced.op.lane
            pieces = [(touch, piece) for touch in traced.touches for piece in _pieces(touch, cuts[touch.space])]
            for touch, piece in pieces:
                for writes in (True, False) if touch.writes else (True,):
                    for other, place in last.get((touch.space, piece, writes), {}).items():
                        if other is not lane or lane.overlaps:
                            found.setdefault((place, traced.place), touch)
            for touch, piece in pieces:
                last.setdefault((touch.space, piece, touch.writes), {})[lane] = traced.place
        return found

    def _cuts(self) -> dict[str, list[int]]:
        """Where touches begin or end: what lies between two of these is touched as a whole or not at all."""
        ends: dict[str, set[int]] = {}
        for touch in {touch for traced in self.ops for touch in traced.touches}:
            ends.setdefault(touch.space, set()).update((touch.start, touch.end))
        return {space: sorted(found) for space, found in ends.items()}


def _pieces(touch: Touch, cuts: Sequence[int]) -> range:
    return range(bisect_left(cuts, touch.start), bisect_left(cuts, touch.end))


# What is kept apart

Waits = Callable[[Period], Iterable[Sequence[Traced]]]
"""What each op of a period waits for."""
Clock = dict[Lane, int]
"""Of each lane, the place of the last op that is over. Lanes begin and end their ops in order: so are all before it."""


def as_linked(period: Period) -> Iterator[list[Traced]]:
    """What the lanes were told."""
    return (traced.after for traced in period.ops)


def without(drops: Callable[[Traced, Traced], bool]) -> Waits:
    """As the lanes were told, but for what `drops(op, awaited)` says."""
    return lambda period: ([other for other in traced.after if not drops(traced, other)] for traced in period.ops)


def relinked(change: Callable[[Op], Op]) -> Waits:
    """What lanes would be told if ops said something else of what they read and write."""

    def waits(period: Period) -> Iterator[list[Traced]]:
        hazards, by_lane = Hazards(), {lane: list[Traced]() for lane in Lane}
        for traced in period.ops:
            by_lane[traced.op.lane].append(traced)
            yield [by_lane[lane][number - 1] for lane, number in hazards.add(change(traced.op))]

    return waits


def races(period: Period, waits: Waits = as_linked) -> list[str]:
    """All pairs of ops that may run at once though they must not, in words; there should be none."""
    clocks, found = _clocks(period, waits), []
    for (first, second), touch in period.conflicts.items():
        earlier, later = period.ops[first], period.ops[second]
        if clocks[second][earlier.op.lane] < first:
            found.append(f"{later} does not wait for {earlier}, and both touch {touch}")
    return found


def _clocks(period: Period, waits: Waits) -> list[Clock]:
    """What is over when each op begins: what was when the op before it on its lane began, that op unless they overlap,
    what it waits for, and what was over when that began."""
    lanes: dict[Lane, Clock] = {lane: dict.fromkeys(Lane, -1) for lane in Lane}
    clocks: list[Clock] = []
    for traced, after in zip(period.ops, waits(period), strict=True):
        lane = traced.op.lane
        clock = dict(lanes[lane])
        for other in after:
            for known, place in (clocks[other.place] | {other.op.lane: other.place}).items():
                clock[known] = max(clock[known], place)
        clocks.append(clock)
        lanes[lane] = clock if lane.overlaps else clock | {lane: traced.place}
    return clocks


# Recording


@contextmanager
def recorded() -> Iterator[list[Period]]:
    """What the engine does that is made within; complete when it is closed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorder = _Recorder(monkeypatch)
        # Torch keeps for the process whether anyone watches it. Lanes begin and end that at any time, and would leave
        # it wrong behind them, were it not so from before the first to after the last of them.
        with recorder.watching():
            yield recorder.periods


class _Recorder:
    """Knows which op each thread is at, and notes what is touched meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.periods = [Period()]
        self._monkeypatch = monkeypatch
        self._thread = threading.local()
        self._numbers = dict.fromkeys(Lane, 0)
        self._by_mark: dict[tuple[Lane, int], Traced] = {}
        self._by_op: dict[int, Traced] = {}
        """By identity: ops of different steps are equal."""
        run = Actions.run
        monkeypatch.setattr(Actions, "run", lambda *call: self._run(call[1], call[2], lambda: run(*call)))
        monkeypatch.setattr(runner, "Task", self._link)
        self._before(Hazards, "forget", self._start_anew)
        self._before(Room, "use", lambda *_: self._begin_period())  # memory changes hands, and nothing is under way
        for name in ("memmove", "adamw", "add_fp32", "sum_of_squares", "crc32c", "compress", "decompress"):
            self._before(ctypes if name == "memmove" else _native, name, getattr(self, f"_{name}"))
        self._before(IoEngine, "submit", self._submit)
        self._before(Store, "read", partial(self._contents, False))
        self._before(Store, "write", partial(self._contents, True))
        self._before(Updates, "squares", lambda *_: self.touch(SQUARES, 0, 1, writes=True))
        self._before(Updates, "decide", self._decide)
        self._before(Updates, "update", self._go_by_verdict)
        self._before(Ranks, "gather", self._gather)
        self._before(Ranks, "reduce", self._reduce)
        sum_numbers = Ranks.sum_numbers  # in memory of its own, which it gives back
        monkeypatch.setattr(Ranks, "sum_numbers", lambda *call: self._at(None, lambda: sum_numbers(*call)))

    def _before(self, owner: object, name: str, note: Callable[..., None]) -> None:
        call = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return call(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, noted)

    # Ops

    def _begin_period(self) -> None:
        self.periods.append(Period())
        self._by_mark.clear()

    def _start_anew(self, hazards: Hazards, counts: Mapping[Lane, int]) -> None:
        self._begin_period()
        self._numbers |= counts

    def _link(self, op: Op, after: list[tuple[LaneRunner, int]]) -> Task:
        ops = self.periods[-1].ops
        marks = [(other.lane, number) for other, number in after]  # what is of an earlier period is over
        traced = Traced(op, len(ops), [self._by_mark[mark] for mark in marks if mark in self._by_mark])
        ops.append(traced)
        self._numbers[op.lane] += 1
        self._by_mark[op.lane, self._numbers[op.lane]] = traced
        self._by_op[id(op)] = traced
        return Task(op, after)

    def _run(self, op: Op, context: StepContext, run: Callable[[], int | Wait]) -> int | Wait:
        traced = self._by_op[id(op)]
        traced.step = context.step
        result = self._at(traced, run)
        return (lambda: self._at(traced, result)) if callable(result) else result

    def _at(self, traced: Traced | None, call: Callable[[], Any]) -> Any:
        before, self._thread.traced = self._current, traced
        try:
            with self.watching():
                return call()
        finally:
            self._thread.traced = before

    @property
    def _current(self) -> Traced | None:
        return getattr(self._thread, "traced", None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees what torch's operators are given, on the calling thread."""
        if getattr(self._thread, "is_watched", False):
            yield
            return
        self._thread.is_watched = True
        try:
            with _Operators(self.touch):
                yield
        finally:
            self._thread.is_watched = False

    # What they touch

    def touch(self, space: str, start: int, size: int, *, writes: bool = False) -> None:
        if self._current and size:
            self._current.touches.add(Touch(space, start, start + size, writes))

    def _memmove(self, target: int, source: int, nbytes: int) -> None:
        self.touch(MEMORY, target, nbytes, writes=True)
        self.touch(MEMORY, source, nbytes)

    def _adamw(
        self,
        pool: object,
        isa: str,
        moments: str,
        gradient: int,
        dtype: str,
        weight: int,
        residual: int,
        *rest: Any,
    ) -> None:
        *addresses, count = rest[:5]
        self.touch(MEMORY, gradient, count * ITEM_BYTES[dtype])
        self.touch(MEMORY, weight, count * (2 if residual else 4), writes=True)
        self.touch(MEMORY, residual, count * 2 if residual else 0, writes=True)
        for vector, address in zip(MOMENTS[moments], addresses, strict=False):
            self.touch(MEMORY, address, vector.size(count), writes=True)

    def _add_fp32(self, pool: object, total: int, part: int, count: int) -> None:
        self.touch(MEMORY, total, count * 4, writes=True)
        self.touch(MEMORY, part, count * 4)

    def _sum_of_squares(self, pool: object, values: int, dtype: str, count: int, *_: int) -> None:
        self.touch(MEMORY, values, count * ITEM_BYTES[dtype])

    def _compress(self, pool: object, address: int, num_words: int, word_bytes: int) -> None:
        self.touch(MEMORY, address, num_words * word_bytes, writes=True)

    def _decompress(self, pool: object, address: int, nbytes: int, num_words: int, word_bytes: int) -> None:
        self.touch(MEMORY, address, num_words * word_bytes, writes=True)

    def _crc32c(self, address: int, nbytes: int, seed: int = 0) -> None:
        self.touch(MEMORY, address, nbytes)

    def _submit(
        self, io: IoEngine, kind: str, file: File, offset: int, address: int, nbytes: int, urgent: bool = False
    ) -> None:
        self.touch(file.path, offset, nbytes, writes=kind == "write")
        self.touch(MEMORY, address, nbytes, writes=kind == "read")

    def _contents(
        self, writes: bool, store: Store, extent: int, address: int, parts: slice = slice(None), **_: object
    ) -> None:
        for part in range(2)[parts]:
            self.touch(CONTENTS, 2 * extent + part, 1, writes=writes)

    def _decide(self, *_: object) -> None:
        self.touch(VERDICT, 0, 1, writes=True)
        self.touch(SQUARES, 0, 1)

    def _go_by_verdict(self, updates: Updates, op: Op, context: StepContext) -> None:
        if not op.tentative:
            self.touch(VERDICT, 0, 1)

    def _gather(self, ranks: Ranks, weights: torch.Tensor) -> None:
        for rank, (start, size) in enumerate(_shares(ranks, weights)):
            self.touch(MEMORY, start, size, writes=rank != ranks.rank)

    def _reduce(self, ranks: Ranks, gradients: torch.Tensor, largest: torch.Tensor | None) -> None:
        for rank, (start, size) in enumerate(_shares(ranks, gradients)):
            self.touch(MEMORY, start, size, writes=rank == ranks.rank)
        if largest is not None:
            self.touch(MEMORY, largest.data_ptr(), largest.nbytes, writes=True)


def _shares(ranks: Ranks, whole: torch.Tensor) -> list[tuple[int, int]]:
    size = whole.nbytes // ranks.count
    return [(whole.data_ptr() + rank * size, size) for rank in range(ranks.count)]


class _Operators(TorchDispatchMode):
    """Notes the memory that torch's operators are given, on the thread that enters it. What they make themselves is
    compute's own."""

    def __init__(self, touch: Callable[..., None]) -> None:
        super().__init__()
        self._touch = touch

    def __torch_dispatch__(
        self, operator: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        writes = _arguments(operator)
        named = ((name, kwargs[name]) for name in writes if name in kwargs)
        for name, value in (*zip(writes, args, strict=False), *named):
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    self._touch(MEMORY, tensor.data_ptr(), _reach(tensor), writes=writes[name])
        return operator(*args, **kwargs)


@cache
def _arguments(operator: Any) -> dict[str, bool]:
    """What an operator is given, in this order, and whether it writes to it. Nothing where it returns a view of that,
    for which it looks at no value."""
    schema = operator._schema
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return {}
    aliases = {argument.name: argument.alias_info for argument in schema.arguments}
    return {name: alias is not None and alias.is_write for name, alias in aliases.items()}


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
