"""Runs lists of ops: links them, hands them to their lanes, and brings a failure back to the caller."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from greedysnake.errors import ConfigError, GreedySnakeError, OpError
from greedysnake.hazards import Hazards
from greedysnake.ops import Lane, Op
from greedysnake.runtime.lanes import Clock, Failure, Job, LaneRunner, Stopped, Task, Wait
from greedysnake.runtime.ranks import Ranks
from greedysnake.trace import Record

Linked = dict[Lane, list[Task]]
"""A list of ops, sorted by lane and ready to run."""

COLLECT_EVERY = 32
"""Compute ops between two collections of records, so that few are left at the end of a step."""
SWITCH_INTERVAL_S = 5e-4


class SwitchInterval:
    """Python's switch interval: short while any runner is open, then what it was before the first.

    It belongs to the process, and so do these counts. Runners may be closed in any order.
    """

    _lock = threading.RLock()  # one that may be taken again: garbage collection closes runners too
    _num_open = 0
    _before_s: float | None = None

    @classmethod
    def shorten(cls) -> None:
        """A lane's thread that comes back from native code must not wait 5 ms for the thread that launches kernels."""
        with cls._lock:
            cls._num_open += 1
            if cls._before_s is None:
                cls._before_s = sys.getswitchinterval()
                if cls._before_s > SWITCH_INTERVAL_S:
                    sys.setswitchinterval(SWITCH_INTERVAL_S)

    @classmethod
    def give_back(cls) -> None:
        with cls._lock:
            cls._num_open -= 1
            if cls._num_open == 0 and cls._before_s is not None:
                sys.setswitchinterval(cls._before_s + 5e-7)  # Python cuts it to whole microseconds
                cls._before_s = None


class Runner:
    """Lanes that live as long as the engine. The compute lane is the thread that calls run()."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self._failure = Failure()
        self._device = device
        clock = Clock(device)
        self._records: list[Record] = []
        self._hazards = Hazards()
        self._lanes: dict[Lane, LaneRunner] = {}
        self._switches_fast = False
        try:
            for lane in Lane:
                if lane.link == "net" and ranks.count == 1:
                    continue
                on_device = device.type == "cuda" and lane.link in ("compute", "h2d", "d2h", "net")
                stream = torch.cuda.Stream(device) if on_device else None
                self._lanes[lane] = LaneRunner(
                    lane,
                    self._failure,
                    clock,
                    stream=stream,
                    depth=lane.depth,
                    leave=partial(ranks.leave, lane),
                )
                if lane is not Lane.COMPUTE:
                    self._lanes[lane].start(device)
            SwitchInterval.shorten()
            self._switches_fast = True
        except BaseException:
            self.close()
            raise

    @property
    def compute_stream(self) -> torch.cuda.Stream | None:
        return self._lanes[Lane.COMPUTE].stream

    def on_compute_stream(self) -> torch.cuda.StreamContext:
        """What is launched there comes after all that the caller's stream was given, which may still make a batch."""
        stream = self.compute_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(stream)

    def link(self, ops: Sequence[Op]) -> Linked:
        """Finds what every op waits for. Lists must be linked in the order in which they are run."""
        linked: Linked = {}
        for op in ops:
            lane = op.lane
            marks = self._hazards.add(op)
            linked.setdefault(lane, []).append(Task(op, [(self._lanes[other], number) for other, number in marks]))
        return linked

    def unlink(self) -> None:
        """Takes back what was linked and not run: waits until nothing is under way, then starts anew."""
        self.wait()
        self._hazards.forget({lane: runner.num_submitted for lane, runner in self._lanes.items()})

    def run(
        self, linked: Linked, step: int, action: Callable[[Op], int | Wait], meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Submits a list and runs its compute ops; what other lanes still do goes on after it returns.

        `meanwhile` is called once, when the device has enough to compute: not at the end, where the host's time is
        short and the device's next, and not in the middle of a step, which is its head: models make the host wait for
        the device there, after which nothing is queued.
        """
        job = Job(step, action)
        for lane, tasks in linked.items():
            if lane is not Lane.COMPUTE:
                self._lanes[lane].submit(tasks, job)
        compute = self._lanes[Lane.COMPUTE]
        computing = linked.get(Lane.COMPUTE, [])
        for number, task in enumerate(computing):
            self._guard(partial(compute.run_now, task, job), task.op)
            if number % COLLECT_EVERY == 0:
                self._collect()
            if meanwhile and number == len(computing) * 5 // 8:  # a quarter into the backward
                self._guard(meanwhile, None)

    def busy_s(self) -> dict[str, float]:
        """Busy seconds so far, by link but the SSD's; of a link with several lanes, the busiest."""
        busy: dict[str, float] = {}
        for lane, runner in self._lanes.items():
            if not lane.link.startswith("ssd"):
                busy[lane.link] = max(busy.get(lane.link, 0.0), runner.busy_s)
        return busy

    def wait(self, *lanes: Lane) -> None:
        """Blocks until these lanes, or all, have ended what they were given."""
        for lane in lanes or tuple(self._lanes):
            self._guard(self._lanes[lane].wait_idle, None)

    def take_records(self) -> list[Record]:
        """Records of the ops that have ended since the last call."""
        self._collect()
        records, self._records = self._records, []
        return records

    def _collect(self) -> None:
        for lane in self._lanes.values():
            self._records += lane.take_records()

    def stop(self, error: BaseException) -> None:
        """Lets no lane wait any more: what it waits for may never come."""
        self._failure.set(error, None)

    def close(self) -> None:
        """Ends all threads once what is in flight has ended, on the device too: after this, buffers may be freed. What
        is queued is dropped."""
        again: KeyboardInterrupt | None = None
        for lane in self._lanes.values():
            ended = False
            while not ended:
                try:
                    # After an interrupt between two ops, the lanes wait for compute ops that never come.
                    self._failure.set(None, None)
                    lane.close()
                    ended = True
                except KeyboardInterrupt as error:  # someone is impatient, but a lane may still use its buffers
                    again = error
        for lane in self._lanes.values():
            lane.drain()
        if self._switches_fast:  # closing may be called again
            self._switches_fast = False
            SwitchInterval.give_back()
        if again:
            raise again

    def _guard(self, call: Callable[[], None], op: Op | None) -> None:
        """Turns the failure of any op, here or on another lane, into one error that names it."""
        try:
            call()
        except Stopped:
            pass
        except BaseException as error:
            self._failure.set(error, op)
        if self._failure.is_set:
            self.close()
            named = self._error()
            if named is self._failure.error:
                raise named
            raise named from self._failure.error

    def _error(self) -> BaseException:
        error, op = self._failure.error, self._failure.op
        if error is None or op is None or isinstance(error, KeyboardInterrupt | SystemExit):
            return error or ConfigError("the engine was stopped")
        return with_op(error, str(op))


def with_op(error: BaseException, op: str) -> GreedySnakeError:
    """The error, with the printed name of the op it happened in."""
    if isinstance(error, GreedySnakeError):
        error.args = (f"{op}: {error}", *error.args[1:])
        return error
    return OpError(f"{op}: {type(error).__name__}: {error}", op=op)
