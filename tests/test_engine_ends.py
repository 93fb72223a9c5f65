"""The end of an engine: interrupted, forked, forgotten, or refused what it needs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import greedysnake as gs
from greedysnake.runtime import directory
from greedysnake.runtime.arena import Arena
from greedysnake.runtime.calls import Call
from greedysnake.runtime.lanes import LaneRunner
from greedysnake.runtime.lifetime import Lifetime
from greedysnake.runtime.ranks import Ranks
from greedysnake.runtime.runner import Runner
from greedysnake.runtime.steps import Steps
from reference import make_batches, make_engine, make_parts

pytestmark = pytest.mark.usefixtures("one_thread")


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs in a process of its own, which must end: a hang fails after a minute."""
    command = [sys.executable, "-c", SCRIPT_START + script, *map(str, arguments)]
    tests = str(Path(__file__).parent)
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": tests}, capture_output=True, text=True, timeout=60, check=False
    )


SCRIPT_START = """
import sys
from pathlib import Path
from typing import Any
import torch
import greedysnake as gs
from reference import make_batches, make_engine, make_parts
torch.set_num_threads(1)
engine = make_engine(make_parts(), Path(sys.argv[1]), alpha=1.0)
engine.step(make_batches(2, 0))
"""


def test_interrupt_between_two_ops_closes_the_engine(tmp_path: Path) -> None:
    """Other lanes wait for compute ops that never come: they must not be waited for."""
    ended = run_script(
        """
engine.save()
from greedysnake.runtime.ranks import Ranks
from greedysnake.runtime.runner import Runner
from greedysnake.runtime.steps import Steps
from greedysnake.runtime.updates import Updates
collect, calls = Runner._collect, []
def interrupted(self):
    calls.append(self)
    if len(calls) == 2:  # the first is before the step
        raise KeyboardInterrupt
    collect(self)
Runner._collect = interrupted
try:
    engine.step(make_batches(2, 1))
except KeyboardInterrupt:
    pass
with make_engine(make_parts(), Path(sys.argv[1]), resume=True) as resumed:
    print(resumed.num_steps)
""",
        tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr


@pytest.mark.parametrize(("owner", "where"), [(Steps, "_take_next"), (gs.Engine, "_judge"), (gs.Engine, "_result")])
def test_interrupt_within_a_step_leaves_no_half_step_to_be_saved(
    owner: type, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(make_parts(), tmp_path) as engine:
        engine.step(make_batches(2, 0))
        monkeypatch.setattr(owner, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step(make_batches(2, 1))
        with pytest.raises(gs.GreedySnakeError, match="the engine is closed"):
            engine.save()


def test_interrupt_within_a_flush_loses_no_late_update_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(make_parts(), tmp_path, alpha=1.0) as engine:
        engine.step(make_batches(2, 0))
        monkeypatch.setattr(Runner, "link", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.flush()
        with pytest.raises(gs.GreedySnakeError, match="the engine is closed"):
            engine.save()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_process_ends_though_the_engine_was_not_closed(tmp_path: Path) -> None:
    ended = run_script("print('end')", tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


def test_engine_that_nobody_holds_gives_its_directory_back(tmp_path: Path) -> None:
    num_threads = threading.active_count()
    engine = make_engine(make_parts(), tmp_path)
    engine.step(make_batches(2, 0))
    engine.flush()
    del engine
    gc.collect()
    make_engine(make_parts(), tmp_path).close()
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_forked_child_leaves_its_parents_engine_alone(backend: str, tmp_path: Path) -> None:
    """It ends as other processes do, though it has copies of locks and of threads that it does not have."""
    ended = run_script(
        """
import os
engine.close()
with make_engine(make_parts(), Path(sys.argv[2]), io=gs.IoOptions(backend=sys.argv[3]), num_threads=2) as engine:
    engine.step(make_batches(2, 0))
    child = os.fork()
    if child == 0:
        try:
            engine.step(make_batches(2, 1))
        except gs.GreedySnakeError as error:
            print(error, flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child crashed"
    engine.step(make_batches(2, 1))
    engine.save()
    print(engine.num_steps)
""",
        tmp_path / "other",
        tmp_path / "store",
        backend,
    )
    message, steps = ended.stdout.splitlines()
    assert "forked" in message
    assert (ended.returncode, steps) == (0, "2"), ended.stderr


def test_directory_is_free_after_close_though_a_worker_was_forked_meanwhile(tmp_path: Path) -> None:
    with make_engine(make_parts(), tmp_path) as engine:
        engine.step(make_batches(2, 0))
        engine.save()
        loader = iter(DataLoader([0, 1, 2, 3], num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
        next(loader)
    with make_engine(make_parts(), tmp_path, resume=True) as engine:
        assert engine.num_steps == 1
    assert len(list(loader)) == 3


class TimeLimit(Exception):
    pass


def test_exception_of_a_signal_handler_in_save_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the new manifest is in place and the slots do not know it yet: from then on nothing is written."""

    def rename_and_raise(source: str, target: str, rename: Callable[[str, str], None] = os.rename) -> None:
        rename(source, target)
        raise TimeLimit

    with make_engine(make_parts(), tmp_path) as engine:
        engine.step(make_batches(2, 0))
        engine.save()
        engine.step(make_batches(2, 1))
        with monkeypatch.context() as patch, pytest.raises(TimeLimit):
            patch.setattr(directory.os, "rename", rename_and_raise)
            engine.save()
        with pytest.raises(gs.StorageError, match=r"checkpoint of step 2 was interrupted.*close the store and resume"):
            for step in (2, 3):
                engine.step(make_batches(2, step))
                engine.flush()
    with make_engine(make_parts(), tmp_path, resume=True) as engine:
        assert engine.num_steps == 2
        dict(engine.named_parameters())  # checks every CRC


def test_second_ctrl_c_while_the_first_wakes_the_lanes_hangs_nothing(tmp_path: Path) -> None:
    ended = run_script(
        """
import signal
from greedysnake.runtime.compute import Compute
from greedysnake.runtime.lanes import LaneRunner
engine.save()
wake, woken = LaneRunner.wake, []
def first(*values):
    signal.raise_signal(signal.SIGINT)  # other lanes wait for this op
def second(self):
    woken.append(self)
    if len(woken) == 1:
        signal.raise_signal(signal.SIGINT)
    wake(self)
Compute._accumulate, LaneRunner.wake = first, second
try:
    engine.step(make_batches(2, 1))
except KeyboardInterrupt:
    print("interrupted")
engine.close()
""",
        tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr


def test_no_lock_of_a_lane_is_entered_in_python() -> None:
    """Ctrl-C is served where a Python function begins: in the enter or exit of a Condition it would stay locked."""
    source = Path(sys.modules[LaneRunner.__module__].__file__ or "").read_text()
    assert "with self._lock:" in source
    assert "with self._condition" not in source


def test_interrupt_while_room_is_made_closes_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(make_parts(), tmp_path, max_grad_norm=1.0) as engine:
        engine.step(make_batches(2, 0))
        engine.save()
        monkeypatch.setattr(Arena, "allocate", allocate_unless("gradients kept for late updates", KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step(make_batches(16, 1, length=48))
        with pytest.raises(gs.GreedySnakeError, match="the engine is closed"):
            engine.step(make_batches(2, 1))


def test_refused_room_leaves_no_memory_behind_and_the_engine_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(make_parts(), tmp_path, max_grad_norm=1.0) as engine:
        engine.step(make_batches(2, 0))
        used = engine.arena.used_bytes
        refused = gs.PlanError("the kernel refused")
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "allocate", allocate_unless("gradients kept for late updates", refused))
            for _ in range(3):
                with pytest.raises(gs.PlanError):
                    engine.step(make_batches(16, 1, length=48))
        engine.step(make_batches(2, 1))
        assert engine.arena.used_bytes == used


def allocate_unless(name: str, error: BaseException) -> Callable[[Arena, int, str], torch.Tensor]:
    right = Arena.allocate

    def allocate(self: Arena, nbytes: int, holder: str) -> torch.Tensor:
        if holder == name:
            raise error
        return right(self, nbytes, holder)

    return allocate


def test_drive_without_room_for_a_larger_step_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(make_parts(), tmp_path, placement=gs.Placement(activations_ram=0.0)) as engine:
        engine.step(make_batches(2, 0))

        class Full:
            f_bavail, f_frsize = 1, 4096

        with monkeypatch.context() as patch:
            patch.setattr(directory.os, "statvfs", lambda path: Full)
            with pytest.raises(gs.PlanError, match="keep more of the activations"):
                engine.evaluate(make_batches(16, 1, length=48))
        engine.step(make_batches(2, 1))
        engine.save()
    with make_engine(make_parts(), tmp_path, resume=True) as engine:
        assert engine.num_steps == 2


def test_warning_that_is_an_error_leaves_no_lock(tmp_path: Path) -> None:
    with pytest.raises(RuntimeWarning, match="single_slot"), warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine(make_parts(), tmp_path, single_slot=True)
    make_engine(make_parts(), tmp_path).close()


def test_interrupt_while_lanes_are_started_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads, start, started = threading.active_count(), LaneRunner.start, []

    def start_three(self: LaneRunner, device: torch.device) -> None:
        if len(started) == 3:
            raise KeyboardInterrupt
        started.append(self)
        start(self, device)

    monkeypatch.setattr(LaneRunner, "start", start_three)
    with pytest.raises(KeyboardInterrupt):
        Runner(torch.device("cpu"), Ranks(torch.device("cpu")))
    assert threading.active_count() == num_threads


@pytest.mark.parametrize(
    "call", ["save()", "flush()", "evaluate(make_batches(2, 0))", "step(make_batches(2, 0))", "close()"]
)
def test_call_of_a_signal_handler_within_a_step_is_refused(call: str, tmp_path: Path) -> None:
    """It hung: what it waits for comes from the step that it has interrupted."""
    script = f"""
import os, signal
signal.signal(signal.SIGALRM, lambda *_: engine.{call})
layer = engine._compute._blocks[2].module
layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGALRM))
engine.step(make_batches(2, 1))
"""
    ended = run_script(script, tmp_path)
    name = call.split("(")[0]
    assert f"{name}() was called while step() is under way, by another thread or a signal handler" in ended.stderr


def test_call_of_another_thread_within_a_step_is_refused_and_the_step_goes_on(tmp_path: Path) -> None:
    """A checkpoint that it saved there mixed two steps."""
    parts = make_parts()
    refused: list[str] = []

    def call(number: int) -> None:
        try:
            [engine.save, engine.close, lambda: dict(engine.named_parameters())][number]()
        except gs.GreedySnakeError as error:
            refused.append(str(error))

    def call_elsewhere(*_: object) -> None:
        for number in range(3):
            thread = threading.Thread(target=call, args=(number,))
            thread.start()
            thread.join()

    hook = parts.layers[1].register_forward_hook(call_elsewhere)
    with make_engine(parts, tmp_path) as engine:
        engine.step(make_batches(2, 0))
        hook.remove()
        names = [message.split(" was called")[0] for message in refused[:3]]
        assert names == ["save()", "close()", "named_parameters()"]
        engine.step(make_batches(2, 1))
        engine.save()
        assert engine.num_steps == 2


def test_engine_is_not_closed_between_a_call_s_look_at_it_and_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a signal handler that comes right there."""
    require_open = Lifetime._require_open
    with make_engine(make_parts(), tmp_path) as engine:

        def look_and_close(self: Lifetime) -> None:
            monkeypatch.undo()
            require_open(self)
            with pytest.raises(gs.GreedySnakeError, match=r"close\(\) was called while step\(\) is under way"):
                engine.close()

        monkeypatch.setattr(Lifetime, "_require_open", look_and_close)
        engine.step(make_batches(2, 0))
        assert engine.num_steps == 1


def test_call_that_an_interrupt_kept_from_saying_that_it_ended_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Call, *error: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with make_engine(make_parts(), tmp_path) as engine:
        monkeypatch.setattr(Call, "__exit__", interrupt)
        try:
            engine.step(make_batches(2, 0))
        except KeyboardInterrupt:  # whose traceback has the frames of the step
            engine.step(make_batches(2, 1))
            engine.save()
            engine.close()
    with make_engine(make_parts(), tmp_path, resume=True) as engine:
        assert engine.num_steps == 2


def test_calls_leave_no_cycle_that_keeps_the_engine_in_memory(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # as the engine has it in a step
    try:
        engine = make_engine(make_parts(), tmp_path)
        engine.step(make_batches(2, 0))
        engine.save()
        dict(engine.named_parameters())
        engine.close()
        known = weakref.ref(engine)
        del engine
        assert known() is None
    finally:
        gc.enable()
