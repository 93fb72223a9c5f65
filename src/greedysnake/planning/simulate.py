"""Runs lists of ops on lanes of known speed without doing anything: gives the trace that the engine would give.

The lanes, and what an op waits for, are the engine's own; how long an op takes is a model. The drives serve one request
after the other, urgent ones first, as the I/O engine does; any other link is shared evenly by the lanes that use it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from greedysnake import schedule
from greedysnake.hazards import Hazards, Mark
from greedysnake.ops import Cursor, Lane, Op, Plan
from greedysnake.planning.costs import Costs
from greedysnake.trace import Record, union_s

NOTHING_S = 1e-12
"""What rounding may leave of an op that has ended."""


@dataclass(slots=True)
class _Job:
    """An op under way."""

    op: Op
    step: int
    start_s: float
    left_s: float
    nbytes: int
    is_over: bool = False


@dataclass(slots=True)
class _Lane:
    waiting: deque[tuple[Op, int, list[Mark]]] = field(default_factory=deque)
    under_way: deque[_Job] = field(default_factory=deque)
    num_over: int = 0


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
        self._queues: tuple[deque[_Job], deque[_Job]] = (deque(), deque())

    def add(self, job: _Job) -> None:
        self._queues[0 if job.op.urgent else 1].append(job)

    def next_s(self) -> float:
        """How long until the next one ends."""
        queue = self._queues[0] or self._queues[1]
        return queue[0].left_s / self._speed_now() if queue else math.inf

    def advance(self, seconds: float) -> _Job | None:
        """Returns the one that has ended."""
        queue = self._queues[0] or self._queues[1]
        if not queue:
            return None
        queue[0].left_s -= seconds * self._speed_now()
        return queue.popleft() if queue[0].left_s <= NOTHING_S else None

    def _speed_now(self) -> float:
        reads = any(job.op.lane.link == "ssd_read" for queue in self._queues for job in queue)
        writes = any(job.op.lane.link == "ssd_write" for queue in self._queues for job in queue)
        return self._speed[reads, writes]


class Simulation:
    """A machine in time. Lists are submitted one after the other, as the engine does."""

    def __init__(self, costs: Costs) -> None:
        self.now_s = 0.0
        self.records: list[Record] = []
        """Of the ops that have ended."""
        self._costs = costs
        self._hazards = Hazards()
        self._lanes = {lane: _Lane() for lane in Lane}
        self._drives = _Drives(costs)
        self._shared: dict[str, list[_Job]] = {}
        """Jobs of the other links."""

    def submit(self, ops: Iterable[Op], step: int) -> None:
        for op in ops:
            self._lanes[op.lane].waiting.append((op, step, self._hazards.add(op)))

    def run(self, lanes: Sequence[Lane] = tuple(Lane)) -> None:
        """Until these lanes have nothing left to do."""
        while True:
            self._start_what_can()
            if not any(self._lanes[lane].waiting or self._lanes[lane].under_way for lane in lanes):
                return
            self._advance()

    def _start_what_can(self) -> None:
        """An op that takes no time lets others start at once, so this goes round until nothing changes."""
        changed = True
        while changed:
            changed = False
            for lane, state in self._lanes.items():
                while state.waiting and len(state.under_way) < lane.depth and self._is_ready(state.waiting[0][2]):
                    op, step, _ = state.waiting.popleft()
                    self._start(op, step, state)
                    changed = True

    def _is_ready(self, marks: list[Mark]) -> bool:
        return all(self._lanes[lane].num_over >= number for lane, number in marks)

    def _start(self, op: Op, step: int, state: _Lane) -> None:
        job = _Job(op, step, self.now_s, self._costs.seconds(op), self._costs.nbytes(op))
        state.under_way.append(job)
        if job.left_s <= NOTHING_S:
            self._end(job)
        elif op.lane.overlaps:
            self._drives.add(job)
        else:
            self._shared.setdefault(op.lane.link, []).append(job)

    def _advance(self) -> None:
        """To the moment at which the next op ends."""
        next_s = self._drives.next_s()
        for jobs in self._shared.values():
            if jobs:
                next_s = min(next_s, min(job.left_s for job in jobs) * len(jobs))
        assert next_s < math.inf, "ops wait for each other"
        self.now_s += next_s
        for link, jobs in self._shared.items():
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
        state = self._lanes[job.op.lane]
        while state.under_way and state.under_way[0].is_over:
            over = state.under_way.popleft()
            state.num_over += 1
            self.records.append(Record(over.step, over.op, over.op.lane, over.start_s, self.now_s, over.nbytes))


@dataclass(frozen=True)
class Forecast:
    """A step among others like it, as it is expected to be."""

    step_s: float
    least_s: Mapping[str, float]
    """Of each link (compute, h2d, d2h, cpu, and the drives as "ssd"), how long it needs for a step's work."""
    busy_s: Mapping[str, float]
    """For how much of the step it was busy; at least so long, as its lanes may have to take turns with others."""
    records: Sequence[Record]
    """What ended in the step, on a clock that began with the first step."""
    start_s: float
    """When it began on that clock."""

    @property
    def bound(self) -> str:
        """The link that needs longest: no step can be shorter than that."""
        return max(self.least_s, key=lambda link: self.least_s[link])


def forecast(
    plan: Plan,
    costs: Costs,
    num_micro_batches: int,
    *,
    kind: str = "vertical",
    clipped: bool = False,
    num_steps: int = 5,
) -> Forecast:
    """The last of some steps, which the start of the first does not reach any more. Where updates may come before the
    norm is known, all steps are `clipped`, so that they wait for it, or none is."""
    simulation = Simulation(costs)
    start_s, end_s = run_steps(simulation, plan, num_micro_batches, kind=kind, clipped=clipped, num_steps=num_steps)[
        -2:
    ]
    records = [record for record in simulation.records if record.end_s > start_s]
    spans: dict[str, list[tuple[float, float]]] = {}
    least_s: dict[str, float] = {}
    for record in records:
        link = "ssd" if record.lane.overlaps else record.lane.link
        spans.setdefault(link, []).append((max(record.start_s, start_s), record.end_s))
        least_s[link] = least_s.get(link, 0.0) + costs.seconds(record.op)
    busy_s = {link: union_s(values) for link, values in spans.items()}
    return Forecast(end_s - start_s, least_s, busy_s, records, start_s)


def run_steps(
    simulation: Simulation,
    plan: Plan,
    num_micro_batches: int,
    *,
    kind: str = "vertical",
    clipped: bool = False,
    num_steps: int,
) -> list[float]:
    """Step after step as the engine runs them: one ends when some lanes are done, and the others go on. Returns when
    each began, and when the last ended."""
    write = {"vertical": schedule.vertical, "horizontal": schedule.horizontal}[kind]
    waited_for = (Lane.COMPUTE, Lane.DOWNLOAD, *((Lane.NORM,) if plan.clipping else ()))
    cursor, times_s = Cursor(plan), [simulation.now_s]
    for number in range(num_steps):
        # The first has no norm to go by, and the second is written while it runs.
        tentative = plan.may_be_tentative and not clipped and number > 1
        simulation.submit(write(replace(plan, tentative=tentative), cursor, num_micro_batches), number)
        simulation.run(waited_for)
        if tentative:
            cursor.confirm()
            simulation.submit(schedule.ahead(plan, cursor), number)
        times_s.append(simulation.now_s)
    return times_s
