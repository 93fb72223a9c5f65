"""Lanes that run ops in order, each on its own thread, and wait for each other by number.

A lane counts the ops it has retired; waiting for an op is waiting for its lane's count. On a CUDA stream an op is
retired when it is launched, and an event stands for its end: another stream waits for that event without the
host, a host lane synchronises with it. Knows nothing of what the ops do.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from greedysnake.errors import GreedySnakeError
from greedysnake.ops import Lane, Op
from greedysnake.trace import Record

Wait = Callable[[], int]
"""Ends an asynchronous op: blocks until it is done and returns the bytes it moved."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the ops of one list have in common. `run` returns bytes, or a Wait if the op goes on."""

    step: int
    run: Callable[[Op], int | Wait]


@dataclass(slots=True)
class Task:
    """An op and what it waits for. Made ahead of time; its job comes when it is submitted."""

    op: Op
    after: list[tuple[LaneRunner, int]]
    job: Job | None = None

    def run(self) -> int | Wait:
        assert self.job is not None
        return self.job.run(self.op)


class Stopped(Exception):
    """Another op failed: nothing more is run."""


class Failure:
    """The first failure of any lane. Once set, every lane stops and every wait ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: list[LaneRunner] = []
        self.is_set = False
        self.error: BaseException | None = None
        self.op: Op | None = None

    def watch(self, lane: LaneRunner) -> None:
        self._lanes.append(lane)

    def set(self, error: BaseException | None, op: Op | None) -> None:
        with self._lock:
            if not self.is_set:
                self.is_set, self.error, self.op = True, error, op
        for lane in self._lanes:  # also when it was set: a Ctrl-C may have ended the call that set it halfway here
            lane.wake()


ZERO_EVERY_S = 60.0
"""CUDA gives the distance of two events in milliseconds as a float32: to 8 us after a minute or two, to 4 ms after ten
hours."""


class Clock:
    """One time axis for host and device: device events are placed by their distance to an earlier one, whose place is
    known. It moves on with time, and stays that far behind that the events of all lanes come after it."""

    def __init__(self, device: torch.device) -> None:
        self._zeros: tuple[tuple[torch.cuda.Event, float], tuple[torch.cuda.Event, float]] | None = None
        """The event that others are placed by and the one that will be next, each with its own place."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            first = torch.cuda.Event(enable_timing=True)
            first.record(torch.cuda.current_stream(device))
            first.synchronize()
            self._zeros = ((first, 0.0), (first, 0.0))
        self._zero_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._zero_s

    def at_s(self, event: torch.cuda.Event) -> float:
        """Of an event that has ended. One thread calls this."""
        assert self._zeros is not None
        (zero, zero_s), following = self._zeros
        event_s = zero_s + float(zero.elapsed_time(event)) / 1e3
        if event_s - following[1] > ZERO_EVERY_S:
            self._zeros = (following, (event, event_s))
        return event_s


class LaneRunner:
    """One in-order lane. `depth` ops may be in flight where `run` returns a Wait; they retire in order."""

    def __init__(
        self,
        lane: Lane,
        failure: Failure,
        clock: Clock,
        *,
        stream: torch.cuda.Stream | None = None,
        depth: int = 1,
        leave: Callable[[], None] | None = None,
    ) -> None:
        """`leave` is called when its thread ends."""
        self.lane = lane
        self._leave = leave
        self.stream = stream
        self.busy_s = 0.0
        """Time with at least one op under way, over all ops recorded so far."""
        self._busy_until_s = 0.0
        self._records: deque[Record] = deque()
        self._failure = failure
        self._clock = clock
        self._depth = depth
        # Locked by its own name: Ctrl-C during the enter and exit of a Condition, which are Python, leaves it locked.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._queue: deque[Task] = deque()
        self._num_submitted = 0
        self._num_retired = 0
        self._closing = False
        self._events: dict[int, torch.cuda.Event] = {}
        self._timed: deque[tuple[Task, int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._thread: threading.Thread | None = None
        failure.watch(self)

    def start(self, device: torch.device) -> None:
        """Starts the thread that runs what is submitted. Not at the first task: a Ctrl-C then would leave a thread
        that is neither running nor not."""
        name = f"greedysnake {self.lane.value}"
        thread = threading.Thread(target=self._work, args=(device,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise GreedySnakeError(
                f"the thread of the {self.lane.value} lane could not start: {error}; raise this user's limits "
                "(ulimit -a)"
            ) from None
        self._thread = thread

    # Called from any thread

    def submit(self, tasks: Sequence[Task], job: Job) -> None:
        """Appends tasks for the lane's thread."""
        for task in tasks:
            task.job = job
        with self._lock:
            self._queue.extend(tasks)
            self._num_submitted += len(tasks)
            self._condition.notify_all()

    def wake(self) -> None:
        with self._lock:
            self._condition.notify_all()

    def is_done(self, number: int) -> bool:
        """Whether op `number` has ended, as far as the host can tell without waiting."""
        if self._num_retired < number:
            return False
        event = self._events.get(number)
        return event is None or bool(event.query())

    def wait(self, number: int, stream: torch.cuda.Stream | None = None) -> None:
        """Blocks the host, or only `stream`, until op `number` has ended. Raises Stopped after a failure."""
        if self._num_retired < number:
            with self._lock:
                while self._num_retired < number:
                    if self._failure.is_set:
                        raise Stopped
                    self._condition.wait()
        event = self._events.get(number)
        if event is None:
            return
        if stream is None:
            event.synchronize()
        else:
            stream.wait_event(event)

    def wait_idle(self) -> None:
        """Blocks until everything submitted has ended."""
        if self._num_submitted:
            self.wait(self._num_submitted)

    def close(self) -> None:
        """Ends the thread after what is queued (at once after a failure)."""
        with self._lock:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def drain(self) -> None:
        """Once the thread has ended: waits for what the device still does, since it uses its buffers."""
        if self.stream is None:
            return
        try:
            self.stream.synchronize()
        except Exception as error:
            self._failure.set(error, None)  # the first failure is kept; mostly this is the same one again

    @property
    def num_submitted(self) -> int:
        return self._num_submitted

    def take_records(self) -> list[Record]:
        """Records of the ops that have ended since the last call; also brings `busy_s` up to date."""
        while self._timed and self._timed[0][3].query():
            task, nbytes, start, end = self._timed.popleft()
            self._record(task, self._clock.at_s(start), self._clock.at_s(end), nbytes)
        return [self._records.popleft() for _ in range(len(self._records))]

    # Called from the thread that runs the lane

    def run_now(self, task: Task, job: Job) -> None:
        """Runs a task on the calling thread (the compute lane has no thread of its own)."""
        task.job = job
        self._num_submitted += 1
        for lane, number in task.after:
            lane.wait(number, self.stream)
        if self._failure.is_set:
            raise Stopped
        self._launch(task)

    def _work(self, device: torch.device) -> None:
        flying: deque[tuple[Task, Wait, float]] = deque()
        task: Task | None = None
        waiting: Wait | None = None
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins with GPU 0, and its first call would take memory there
            while True:
                task = waiting = None  # an idle lane holds on to nothing: an engine that nobody uses may go
                task = self._next(block=not flying)
                if task is None and not flying:
                    break
                if task is not None and (not flying or (len(flying) < self._depth and _is_ready(task))):
                    self._pop()
                    for lane, number in task.after:
                        lane.wait(number, self.stream)
                    if self._failure.is_set:
                        raise Stopped
                    waiting = self._launch(task)
                    if waiting is not None:
                        flying.append((task, waiting, self._clock.now_s()))
                else:
                    task, waiting, start_s = flying.popleft()
                    nbytes = waiting()
                    self._record(task, start_s, self._clock.now_s(), nbytes)
                    self._retire()
        except Stopped:
            pass
        except BaseException as error:  # every failure must reach the caller of step()
            self._failure.set(error, task.op if task else None)
        self._land(flying)
        if self._leave:
            self._leave()

    def _land(self, flying: deque[tuple[Task, Wait, float]]) -> None:
        """After a failure: waits for what is in flight, since it still uses its buffers."""
        for _, waiting, _ in flying:
            try:
                waiting()
            except Exception as error:
                self._failure.set(error, None)  # the first failure is kept; this one follows from it

    def _next(self, *, block: bool) -> Task | None:
        with self._lock:
            while not self._queue:
                if self._failure.is_set:
                    raise Stopped
                if self._closing or not block:
                    return None
                self._condition.wait()
            if self._failure.is_set:
                raise Stopped
            return self._queue[0]

    def _pop(self) -> None:
        with self._lock:
            self._queue.popleft()

    def _launch(self, task: Task) -> Wait | None:
        """Runs a task; returns a Wait if it goes on, else retires it."""
        if self.stream is None:
            start_s = self._clock.now_s()
            result = task.run()
            if callable(result):
                return result
            self._record(task, start_s, self._clock.now_s(), result)
            self._retire()
            return None
        # A host lane that waits for an op sleeps instead of spinning: the cores belong to the optimizer.
        start = torch.cuda.Event(enable_timing=True, blocking=True)
        end = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self.stream):
            start.record(self.stream)
            nbytes = task.run()
            end.record(self.stream)
        assert isinstance(nbytes, int)
        self._timed.append((task, nbytes, start, end))
        self._retire(end)
        return None

    def _retire(self, event: torch.cuda.Event | None = None) -> None:
        with self._lock:
            if event is not None:  # before it counts: who reads the count without the lock looks for the event next
                self._events[self._num_retired + 1] = event
                self._forget_ended()
            self._num_retired += 1
            self._condition.notify_all()

    def _forget_ended(self) -> None:
        """An event that is gone counts as ended: keeps the table short."""
        while len(self._events) > 64:
            oldest = next(iter(self._events))
            if not self._events[oldest].query():
                return
            del self._events[oldest]

    def _record(self, task: Task, start_s: float, end_s: float, nbytes: int) -> None:
        assert task.job is not None
        # Ops start in order, so the union of their spans grows at its end only.
        self.busy_s += max(0.0, end_s - max(start_s, self._busy_until_s))
        self._busy_until_s = max(self._busy_until_s, end_s)
        self._records.append(Record(task.job.step, task.op, self.lane, start_s, end_s, nbytes))


def _is_ready(task: Task) -> bool:
    return all(lane.is_done(number) for lane, number in task.after)
