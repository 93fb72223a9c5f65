"""`train --plan`: one command that plans in a process of its own and trains as planned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

import greedysnake as gs
from greedysnake import errors, preplanning, settings
from greedysnake.config import load_config
from greedysnake.errors import PlanError
from greedysnake.preplanning import plan_apart
from greedysnake.report.progress import prospect_text
from greedysnake.runs import one_at_a_time
from training import Run, curve, everything_in, quiet, values_in


def write(directory: Path, max_steps: int) -> Path:
    values = values_in(directory, max_steps=max_steps, lr_scheduler_type="constant", warmup_steps=0)
    values["engine"].update(fill_ram=True, ram="2MiB")
    path = directory / "train.yaml"
    path.write_text(settings.write_yaml(values))
    return path


def test_one_command_plans_and_trains_and_continues_to_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    gs.Trainer(write(tmp_path / "plain", 6), console=quiet()).train()
    for max_steps in (4, 6):
        path = write(tmp_path, max_steps)
        done = subprocess.run(
            [sys.executable, "-m", "greedysnake", "train", str(path), "--plan"], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        places = [done.stdout.index(words) for words in ("as planned", "lives in", f"{max_steps} of {max_steps} steps")]
        assert places == sorted(places) and done.stdout.count("lives in") == 1
    assert curve(tmp_path / "run") == curve(tmp_path / "plain" / "run")
    engine = load_config(tmp_path / "run" / "run.yaml").engine
    assert not engine.fill_ram and engine.placement.weights_ram == 1.0  # written out, as plan does it


def test_what_cannot_be_trained_is_refused_before_it_is_planned(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path, 4)
    (tmp_path / "rows.jsonl").write_text("")
    code, shown, error = run("train", path, "--plan")
    assert code == 2 and "rows.jsonl" in error
    assert "measuring" not in shown


def test_several_ranks_are_planned_beforehand(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    code, _, error = run("train", write(tmp_path, 4), "--plan")
    assert code == 2 and "greedysnake plan --ranks 2 --out FILE first" in error


def test_a_script_that_plans_is_not_run_twice(tmp_path: Path) -> None:
    """Without a guard for `__main__`, which nobody would think of."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import greedysnake as gs\nprint('running')\ngs.Trainer({str(write(tmp_path, 4))!r}).train(plan_first=True)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("running") == 1 and "as planned" in done.stdout and "4 of 4 steps" in done.stdout


def test_what_planning_refuses_comes_back(tmp_path: Path) -> None:
    values = values_in(tmp_path)
    values["engine"]["ram"] = "64KiB"
    with pytest.raises(PlanError, match="ram"):
        plan_apart(load_config(values))


@pytest.mark.parametrize(
    "error",
    [
        errors.OpError("out of memory", op="F1.0"),
        errors.StorageError("a full drive", path="/x", errno_name="ENOSPC"),
        errors.RankError("rank 1 is gone", is_gone=True),
    ],
)
def test_every_error_reaches_another_process_whole(error: errors.GreedySnakeError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@contextmanager
def planning(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A training whose planning is under way, in a process group of its own, and the process that plans."""
    command = [sys.executable, "-m", "greedysnake", "train", str(write(tmp_path, 4)), "--plan"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("measuring")
            yield process, planner_of(process.pid)
        finally:
            process.kill()


def planner_of(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (found,) = (int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def is_gone(pid: int) -> bool:
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.02)
    return False


def left_in(folder: Path) -> set[tuple[str, ...]]:
    return {Path(path).relative_to(folder).parts[:2] for path in everything_in(folder)}


NOTHING = {("rows.jsonl",), ("train.yaml",), ("run",), ("run", "data")}
"""But for the data, tokenised."""


@pytest.mark.parametrize(
    ("tell", "number", "code"),
    [
        (os.kill, signal.SIGTERM, 143),
        (os.kill, signal.SIGINT, 130),
        (os.killpg, signal.SIGINT, 130),  # as a terminal does it
        (os.killpg, signal.SIGTERM, 143),
        (os.killpg, signal.SIGHUP, 129),
    ],
)
def test_a_signal_ends_both_and_leaves_nothing_behind(
    tell: Callable[[int, int], None], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with planning(tmp_path) as (process, planner):
        time.sleep(1.0)  # into the short training, about
        tell(process.pid, number)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (code, "")
        assert is_gone(planner)
    assert left_in(tmp_path) <= NOTHING


def test_planning_ends_with_a_training_that_is_killed(tmp_path: Path) -> None:
    with planning(tmp_path) as (process, planner):
        process.kill()
        _, errors = process.communicate(timeout=60)  # the planner has the same pipe
        assert errors == ""
        assert is_gone(planner)
    assert left_in(tmp_path) <= NOTHING


def test_a_planning_that_is_killed_is_one_sentence(tmp_path: Path) -> None:
    with planning(tmp_path) as (process, planner):
        os.kill(planner, signal.SIGKILL)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error == (
        "greedysnake: planning was ended by SIGKILL: train without --plan, or see why with greedysnake plan\n"
    )


def test_being_told_to_end_twice_at_once_is_being_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = preplanning._Ending()
    with pytest.raises(SystemExit, match="143"):
        ending(signal.SIGTERM, None)
    ending(signal.SIGTERM, None)
    monkeypatch.setattr(preplanning, "PATIENCE_S", 0.0)
    with pytest.raises(SystemExit, match="143"):
        ending(signal.SIGTERM, None)


def test_a_planning_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preplanning, "PATIENCE_S", 0.01)
    resource_tracker.ensure_running()  # which unblocks SIGTERM when it starts, as it would at the first process
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    preplanning._end(process)
    assert process.exitcode == -signal.SIGKILL


def test_a_run_that_is_done_is_not_planned(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path, 2)
    gs.Trainer(path, console=quiet()).train()
    code, shown, _ = run("train", path, "--plan")
    assert code == 0 and "measuring" not in shown and "2 of 2 steps done" in shown


def test_a_run_that_another_training_has_is_refused_before_it_is_planned(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path, 2)
    (tmp_path / "run").mkdir()
    with one_at_a_time(tmp_path / "run"):
        code, shown, error = run("train", path, "--plan")
    assert code == 2 and "a training is under way" in error and "measuring" not in shown


def test_it_trains_on_when_nobody_reads_what_is_planned(tmp_path: Path) -> None:
    with planning(tmp_path) as (process, _):
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(), errors) == (0, "")
    assert len(curve(tmp_path / "run")) == 4


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"fill_ram": True}, True),
        ({"fill_ram": False}, False),  # as a plan has it
        ({"fill_ram": True, "vram": "1GiB"}, False),
        ({"fill_ram": True, "vram": 0}, False),
        ({"fill_ram": True, "schedule": "horizontal"}, False),
        ({"fill_ram": True, "placement": {"graphs_device": 0.5}}, False),
        ({"fill_ram": True, "placement": {"activations_device": 0.5, "activations_ram": 0.5}}, False),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_that_nothing_stays_on_is_told_of(
    engine: dict[str, object], says: bool, device: str, tmp_path: Path
) -> None:
    values = values_in(tmp_path)
    values["engine"].update(engine)
    trainer = gs.Trainer(values, console=quiet())
    for num_ranks, how in ((1, "train --plan finds"), (4, "greedysnake plan --ranks 4 finds")):
        told = replace(trainer._prospect(0), device=device, num_ranks=num_ranks)
        assert (how in prospect_text(trainer.prepared.footprint, told)) == (says and device == "cuda")
