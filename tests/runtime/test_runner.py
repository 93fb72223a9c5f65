"""Lanes from beginning to end: what is closed is at rest."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import greedysnake as gs
from greedysnake.ops import Cursor, Kind, Lane, Op
from greedysnake.runtime.lanes import Clock, Failure, LaneRunner
from greedysnake.runtime.ranks import Ranks
from greedysnake.runtime.runner import SWITCH_INTERVAL_S, Runner
from greedysnake.schedule import vertical
from schedules import make_plan


class Stream:
    """Stands for a CUDA stream: notes how many lanes still have a thread when somebody waits for it."""

    def __init__(self, runner: Runner, error: Exception | None = None) -> None:
        self.runner = runner
        self.error = error
        self.lanes_alive: list[int] = []

    def synchronize(self) -> None:
        threads = [lane._thread for lane in self.runner._lanes.values()]
        self.lanes_alive.append(sum(thread is not None and thread.is_alive() for thread in threads))
        if self.error:
            raise self.error


def with_streams(runner: Runner, **errors: Exception) -> list[Stream]:
    """A runner on the CPU gets streams as it would have on a GPU; no op may be run on these lanes."""
    streams = []
    for lane in (Lane.COMPUTE, Lane.UPLOAD, Lane.DOWNLOAD):
        streams.append(Stream(runner, errors.get(lane.name)))
        runner._lanes[lane].stream = streams[-1]  # type: ignore[assignment]
    return streams


def test_closing_waits_for_all_streams_when_nothing_can_be_launched_any_more() -> None:
    runner = Runner(torch.device("cpu"), Ranks(torch.device("cpu")))
    streams = with_streams(runner)
    runner.close()
    assert [stream.lanes_alive for stream in streams] == [[0]] * 3


def test_error_of_a_stream_hides_neither_the_first_error_nor_the_other_streams() -> None:
    runner = Runner(torch.device("cpu"), Ranks(torch.device("cpu")))
    streams = with_streams(runner, COMPUTE=RuntimeError("illegal memory access"))

    def fail(op: Op) -> int:
        raise ValueError("first")

    linked = runner.link([Op(Kind.VERDICT, 0, 0, (), (("verdict",),))])
    runner.run(linked, 0, fail)
    with pytest.raises(gs.OpError, match=r"N0\.0: ValueError: first"):
        runner.wait()
    assert all(stream.lanes_alive for stream in streams)


def test_a_second_ctrl_c_while_closing_waits_until_no_lane_uses_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(torch.device("cpu"), Ranks(torch.device("cpu")))
    lane = runner._lanes[Lane.DOWNLOAD]
    right, presses = lane.close, [KeyboardInterrupt(), KeyboardInterrupt()]

    def close() -> None:
        if presses:
            raise presses.pop()
        right()

    monkeypatch.setattr(lane, "close", close)
    with pytest.raises(KeyboardInterrupt):
        runner.close()
    threads = [lane._thread for lane in runner._lanes.values() if lane._thread is not None]
    assert threads and not any(thread.is_alive() for thread in threads)


def test_thread_of_a_lane_uses_the_gpu_of_its_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, torch.device]] = []

    def note(device: torch.device) -> None:
        used.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", note)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    for device in (cpu, gpu):
        lane = LaneRunner(Lane.UPLOAD, Failure(), Clock(cpu))
        lane.start(device)
        lane.close()
    assert used == [("greedysnake h2d.weights", gpu)]


def test_op_on_a_stream_counts_as_retired_only_when_its_event_is_there() -> None:
    lane = LaneRunner(Lane.UPLOAD, Failure(), Clock(torch.device("cpu")))
    seen: list[bool] = []

    class Events(dict[int, Running]):
        def __setitem__(self, number: int, event: Running) -> None:
            seen.append(lane.is_done(number))
            super().__setitem__(number, event)

    lane._events = Events()  # type: ignore[assignment]
    lane._retire(Running())  # type: ignore[arg-type]
    assert seen == [False]
    assert not lane.is_done(1)


class Running:
    """Stands for a CUDA event that has not ended."""

    def query(self) -> bool:
        return False


class Event:
    """Stands for a CUDA event at a known time. Distances are float32 in milliseconds, and none is backwards."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_time(self, end: Event) -> float:
        assert end.at_s >= self.at_s
        return float(np.float32((end.at_s - self.at_s) * 1e3))


def test_device_times_are_as_fine_after_a_day_as_in_the_first_minutes() -> None:
    """Lanes are asked one after another, so events come a little out of order; and once nothing is run for an hour."""
    clock, first = Clock(torch.device("cpu")), Event(0.0)
    clock._zeros = ((first, 0.0), (first, 0.0))  # type: ignore[assignment]
    of_one_zero_s, errors_s = 0.0, list[float]()
    for number in range(1, 40_000):
        start_s = number * 2.16003719 + (3600 if number > 20_000 else 0)
        for events in ((Event(start_s), Event(start_s + 0.7)), (Event(start_s - 2), Event(start_s - 1.3))):
            found_s = clock.at_s(events[1]) - clock.at_s(events[0])  # type: ignore[arg-type]
            errors_s.append(abs(found_s - 0.7))
            of_one_zero_s = (first.elapsed_time(events[1]) - first.elapsed_time(events[0])) / 1e3
    assert clock.at_s(events[1]) == pytest.approx(events[1].at_s, abs=5e-3)  # type: ignore[arg-type]
    assert abs(of_one_zero_s - 0.7) > 1e-3
    errors_s.sort()
    assert errors_s[-1] < 3e-4  # in the minute after that hour
    assert errors_s[-200] < 2e-5


@pytest.mark.parametrize("num_micro_batches", [1, 8])
@pytest.mark.parametrize("num_layers", [1, 2, 24])
def test_what_is_done_meanwhile_comes_when_the_head_is_left_behind(num_layers: int, num_micro_batches: int) -> None:
    """In the head models wait for the device, and at the end of a step the engine does."""
    plan, computed, at = make_plan(num_layers + 2), list[Op](), list[int]()

    def note(op: Op) -> int:
        if op.lane is Lane.COMPUTE:
            computed.append(op)
        return 0

    runner = Runner(torch.device("cpu"), Ranks(torch.device("cpu")))
    linked = runner.link(vertical(plan, Cursor(plan), num_micro_batches))
    runner.run(linked, 0, note, meanwhile=lambda: at.append(len(computed)))
    runner.wait()
    runner.close()
    (number,) = at
    assert all(op.kind is Kind.BACKWARD and op.block <= num_layers for op in computed[number:])
    assert len(computed) // 4 <= len(computed) - number <= len(computed) // 2


# Python's switch interval


@pytest.fixture(params=[0.007, 0.0001])
def interval_s(request: pytest.FixtureRequest) -> Iterator[float]:
    """A long one, which runners shorten, and a short one, which they leave."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_switch_interval_comes_back_with_the_last_runner_in_any_order(order: list[int], interval_s: float) -> None:
    runners = [Runner(torch.device("cpu"), Ranks(torch.device("cpu"))) for _ in range(3)]
    for number in order:
        assert sys.getswitchinterval() == pytest.approx(min(SWITCH_INTERVAL_S, interval_s))
        runners[number].close()
        runners[number].close()  # as after a failure: does not count twice
    assert sys.getswitchinterval() == interval_s
