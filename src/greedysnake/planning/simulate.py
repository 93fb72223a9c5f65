"""Runs lists of ops on lanes of known speed without doing anything: gives the trace that the engine would give.

The lanes, and what an op waits for, are the engine's own; how long an op takes is a model. The drives serve one request
after the other, urgent ones first, as the I/O engine does; any other link is shared evenly by the lanes that use it.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count, pairwise

from greedysnake import schedule
from greedysnake.hazards import Hazards
from greedysnake.ops import Cursor, Lane, Op, Plan
from greedysnake.planning.costs import Costs
from greedysnake.trace import Record, union_s

ALIKE, EQUAL = 1e-3, 1e-9
"""Times that differ by a smaller share are so."""
FEWEST_STEPS, MOST_STEPS, AVERAGED = 6, 12, 4
"""The first ones have the start in them; where updates may be tentative, the third is the first that is."""
AS_MANY = 3
"""Steps in a row that take equally long: those after them will too."""
SSD = "ssd"
NOTHING_S = 1e-12
"""What rounding may leave of an op that has ended."""


@dataclass(slots=True, eq=False)
class _Lane:
    lane: Lane
    link: str
    """"ssd" for reads and writes."""
    depth: int
    waiting: deque[_Waiting] = field(default_factory=deque)
    under_way: deque[_Job] = field(default_factory=deque)
    num_over: int = 0
    number: int = 0
    """Among the lanes, which are served in this order."""
    is_blocked: bool = False
    """Its thread found nothing to start, and waits for the oldest op that it has under way."""
    watched: _Lane | None = None
    """The lane that has to end more before the next op can start, as far as is known."""
    watchers: list[_Lane] = field(default_factory=list)
    """Lanes that watch this one."""

    def __lt__(self, other: _Lane) -> bool:
        return self.number < other.number


@dataclass(slots=True)
class _Waiting:
    """An op that has not started, and how many ops of which lanes must be over before it can."""

    op: Op
    step: int
    after: list[tuple[_Lane, int]]


@dataclass(slots=True)
class _Job:
    """An op under way."""

    op: Op
    step: int
    lane: _Lane
    start_s: float
    left_s: float
    nbytes: int
    is_over: bool = False


class _Drives:
    """One request after the other, urgent ones first; faster or slower while all of them go in one direction."""

    def __init__(self, costs: Costs) -> None:
        rates = costs.rates
        both = rates.ssd_bytes_per_s
        self._speed = {  # by whether something is read, and written
            (True, True): 1.0,
            (True, False): (rates.ssd_read_bytes_per_s or both) / both,
            (False, True): (rates.ssd_write_bytes_per_s or both) / both,
        }
        self._urgent: deque[_Job] = deque()
        self._bulk: deque[_Job] = deque()
        self._num_jobs = [0, 0]
        """To read, and to write."""

    def add(self, job: _Job) -> None:
        (self._urgent if job.op.urgent else self._bulk).append(job)
        self._num_jobs[_writes(job)] += 1

    def next_s(self) -> float:
        """How long until the next one ends."""
        queue = self._urgent or self._bulk
        return queue[0].left_s / self._speed_now() if queue else math.inf

    def advance(self, seconds: float) -> _Job | None:
        """Returns the one that has ended."""
        queue = self._urgent or self._bulk
        if not queue:
            return None
        queue[0].left_s -= seconds * self._speed_now()
        if queue[0].left_s > NOTHING_S:
            return None
        self._num_jobs[_writes(queue[0])] -= 1
        return queue.popleft()

    def _speed_now(self) -> float:
        return self._speed[self._num_jobs[0] > 0, self._num_jobs[1] > 0]


def _writes(job: _Job) -> bool:
    return job.lane.lane.link == "ssd_write"


class Simulation:
    """A machine in time. Lists are submitted one after the other, as the engine does."""

    def __init__(self, costs: Costs) -> None:
        self.now_s = 0.0
        self.records: list[Record] = []
        """Of the ops that have ended."""
        self._costs = costs
        self._hazards = Hazards()
        self._lanes = {lane: _Lane(lane, link_of(lane), lane.depth, number=number) for number, lane in enumerate(Lane)}
        self._awake: list[_Lane] = []
        """Those that may have something to start."""
        self._drives = _Drives(costs)
        self._shared: dict[str, list[_Job]] = {state.link: [] for state in self._lanes.values() if state.link != SSD}
        """Jobs of the other links."""

    def submit(self, ops: Iterable[Op], step: int) -> None:
        lanes = self._lanes
        for op in ops:
            after = [(lanes[lane], number) for lane, number in self._hazards.add(op)]
            lanes[op.lane].waiting.append(_Waiting(op, step, after))
        self._awake = [state for state in lanes.values() if not state.is_blocked]

    def run(self, lanes: Sequence[Lane] = tuple(Lane)) -> None:
        """Until these lanes have nothing left to do."""
        states = [self._lanes[lane] for lane in lanes]
        while True:
            self._start_what_can()
            if not any(state.waiting or state.under_way for state in states):
                return
            self._advance()

    def _start_what_can(self) -> None:
        """Lane by lane in their order, again and again: an op that takes no time lets others start at once."""
        tried: list[_Lane] = []
        while self._awake:
            round, self._awake = self._awake, []
            heapify(round)
            while round:
                state = heappop(round)
                tried.append(state)
                self._start_what_lane_can(state)
                if self._awake:
                    for woken in self._awake:
                        if woken.number > state.number:
                            heappush(round, woken)
                    self._awake = [woken for woken in self._awake if woken.number <= state.number]
        for state in tried:
            state.is_blocked = bool(state.under_way)

    def _start_what_lane_can(self, state: _Lane) -> None:
        waiting = state.waiting
        while waiting and len(state.under_way) < state.depth:
            missing = _missing(waiting[0])
            if missing is not None:
                if state.watched is not missing:
                    state.watched = missing
                    missing.watchers.append(state)
                return
            self._start(state, waiting.popleft())

    def _start(self, state: _Lane, starting: _Waiting) -> None:
        op = starting.op
        job = _Job(op, starting.step, state, self.now_s, self._costs.seconds(op), self._costs.nbytes(op))
        state.under_way.append(job)
        if job.left_s <= NOTHING_S:
            self._end(job)
        elif state.link == SSD:
            self._drives.add(job)
        else:
            self._shared[state.link].append(job)

    def _advance(self) -> None:
        """To the moment at which the next op ends."""
        next_s = self._drives.next_s()
        for jobs in self._shared.values():
            if jobs:
                link_s = jobs[0].left_s if len(jobs) == 1 else min(job.left_s for job in jobs) * len(jobs)
                next_s = min(next_s, link_s)
        assert next_s < math.inf, "ops wait for each other"
        self.now_s += next_s
        for link, jobs in self._shared.items():
            if len(jobs) == 1 and jobs[0].left_s - next_s > NOTHING_S:
                jobs[0].left_s -= next_s
            elif jobs:
                for job in jobs:
                    job.left_s -= next_s / len(jobs)
                self._shared[link] = [job for job in jobs if job.left_s > NOTHING_S]
                for job in jobs:
                    if job.left_s <= NOTHING_S:
                        self._end(job)
        stored = self._drives.advance(next_s)
        if stored:
            self._end(stored)

    def _end(self, job: _Job) -> None:
        """Ops of a lane end in order: one that is done before another of its lane counts when that is."""
        job.is_over = True
        state = job.lane
        while state.under_way and state.under_way[0].is_over:
            over = state.under_way.popleft()
            state.num_over += 1
            if state.is_blocked:
                state.is_blocked = False
                self._awake.append(state)
            for watcher in state.watchers:
                watcher.watched = None
                if not watcher.is_blocked:
                    self._awake.append(watcher)
            state.watchers.clear()
            self.records.append(Record(over.step, over.op, state.lane, over.start_s, self.now_s, over.nbytes))


def _missing(waiting: _Waiting) -> _Lane | None:
    """A lane that has to end more before the op can start."""
    after = waiting.after
    while after:
        lane, number = after[-1]
        if lane.num_over < number:
            return lane
        after.pop()  # what is over stays so
    return None


def link_of(lane: Lane) -> str:
    """Its link, the drives being one."""
    return SSD if lane.overlaps else lane.link


@dataclass(frozen=True)
class Forecast:
    """Steps as they are expected to be, on average over some."""

    step_s: float
    least_s: Mapping[str, float]
    """Of each link (compute, h2d, d2h, cpu, and the drives as "ssd"), how long it needs for a step's work: the drives
    as they work here, which may be faster or slower in one direction alone."""
    written_bytes: float
    """To the drives in a step."""
    records: Sequence[Record]
    """What ended in the last step, on a clock that began with the first."""

    @property
    def bound(self) -> str:
        """The link that needs longest: no such step can be shorter than that."""
        return max(self.least_s, key=lambda link: self.least_s[link])


def forecast(
    plan: Plan, costs: Costs, num_micro_batches: int, *, kind: str = "vertical", clipped: bool = False
) -> Forecast:
    """The mean over the last of so many steps that it does not change any more; they may alternate, or all be the same
    soon. Where updates may come before the norm is known, all steps are `clipped`, so that they wait for it, or none
    is."""
    with _no_collections():
        simulation, ends_s, averaged = Simulation(costs), [0.0], 0
        for now_s in steps(simulation, plan, num_micro_batches, kind=kind, clipped=clipped):
            ends_s.append(now_s)
            averaged = _num_settled(ends_s)
            if averaged:
                break
        found = _mean(simulation.records, costs, averaged, ends_s)
        del simulation  # before anything looks for garbage in it
        return found


def _mean(records: Sequence[Record], costs: Costs, num_steps: int, ends_s: Sequence[float]) -> Forecast:
    """Of the last so many steps."""
    start_s, end_s = ends_s[-1 - num_steps], ends_s[-1]
    spans: list[tuple[float, float]] = []
    total_s = {"compute": 0.0}
    written_bytes = 0
    for record in records:
        if record.end_s <= start_s:
            continue
        written_bytes += record.nbytes * (record.lane.link == "ssd_write")
        if record.lane.overlaps:
            spans.append((max(record.start_s, start_s), record.end_s))
        else:
            total_s[record.lane.link] = total_s.get(record.lane.link, 0.0) + costs.seconds(record.op)
    total_s |= {SSD: union_s(spans)} if spans else {}  # with anything under way the drives are at work
    return Forecast(
        (end_s - start_s) / num_steps,
        {link: value / num_steps for link, value in total_s.items()},
        written_bytes / num_steps,
        [record for record in records if record.end_s > ends_s[-2]],
    )


@contextmanager
def _no_collections() -> Iterator[None]:
    """Of garbage: there is none among a million ops, and to look for it takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _num_settled(ends_s: Sequence[float]) -> int:
    """Of how many of the last steps the mean counts; 0 if more are needed."""
    num_steps = len(ends_s) - 1
    last = [end_s - start_s for start_s, end_s in pairwise(ends_s[-1 - AS_MANY :])]
    if num_steps > AS_MANY and max(last) - min(last) <= EQUAL * min(last):
        return AS_MANY
    if num_steps < FEWEST_STEPS:
        return 0
    last_s, before_s = ends_s[-1] - ends_s[-3], ends_s[-3] - ends_s[-5]
    return AVERAGED if num_steps >= MOST_STEPS or abs(last_s - before_s) <= ALIKE * before_s else 0


def steps(
    simulation: Simulation, plan: Plan, num_micro_batches: int, *, kind: str = "vertical", clipped: bool = False
) -> Iterator[float]:
    """Step after step as the engine runs them, without end: one ends when some lanes are done, and the others go on.
    Gives the time at which each ends."""
    write = {"vertical": schedule.vertical, "horizontal": schedule.horizontal}[kind]
    waited_for = (Lane.COMPUTE, Lane.DOWNLOAD, Lane.NORM)
    cursor = Cursor(plan)
    for number in count():
        # The first has no norm to go by, and the second is written while it runs.
        tentative = plan.may_be_tentative and not clipped and number > 1
        simulation.submit(write(replace(plan, tentative=tentative), cursor, num_micro_batches), number)
        simulation.run(waited_for)
        if tentative:
            cursor.confirm()
            simulation.submit(schedule.ahead(plan, cursor), number)
        yield simulation.now_s
