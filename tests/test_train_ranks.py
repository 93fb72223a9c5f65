"""`greedysnake train` in several processes: the same training, ended and continued by all of them or by none."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import greedysnake as gs
import together
from forked import Forked, none_left, run_command
from greedysnake import preparation, trainer
from greedysnake.config import load_config
from greedysnake.data.batches import IGNORED, deal
from greedysnake.errors import GreedySnakeError
from greedysnake.launching import Launched, joined
from greedysnake.preparation import leaving_nothing, prepare, ram_budget
from greedysnake.report.metrics import MetricsFile, of_all_ranks
from greedysnake.report.progress import Prospect, home_table, prospect_text
from greedysnake.runtime.manifest import Manifest
from greedysnake.runtime.result import StepResult
from greedysnake.shapes import Share
from training import Run, curve, everything_in, metrics_of, train, values_in, write_config

TOLERANCE = 1e-5
"""Relative: the same sums of float32 in another order, over 40 steps. They are nearer by a hundred times."""
NUM_STEPS = 40
"""Enough that a signal comes in the middle."""
OPTIONS: dict[str, Any] = {"max_steps": NUM_STEPS, "eval_steps": 15, "max_eval_batches": 5, "save_steps": 0}
"""Of 5 held-out micro-batches the last is a group of its own, of which one rank has nothing."""


@contextmanager
def started(config: Path, *overrides: str, num_ranks: int = 2) -> Iterator[list[Forked]]:
    """The processes of a training, each told what torchrun tells them."""
    with socket.socket() as held, tempfile.TemporaryDirectory() as folder:
        # Bound all the while, so that the system gives the port to nobody else; who listens there may bind it as well.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        told = {"WORLD_SIZE": num_ranks, "MASTER_PORT": held.getsockname()[1], "MASTER_ADDR": "127.0.0.1"}
        processes = []
        for rank in range(num_ranks):
            own = {name: str(value) for name, value in {"RANK": rank, "LOCAL_RANK": rank, **told}.items()}
            command = ["train", str(config), *overrides]
            processes.append(Forked(Path(folder), rank, run_command, command, own))
        with none_left(processes):
            yield processes


def ended(processes: list[Forked]) -> list[tuple[int | None, str, str]]:
    """Exit code and what was printed to both ends, of each."""
    printed = [process.communicate(timeout=200) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, printed, strict=True)]


def wait_for_lines(run: Path, num_lines: int, processes: list[Forked]) -> None:
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < num_lines:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing interrupted, started by torchrun, with what it printed."""
    directory = tmp_path_factory.mktemp("straight")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "greedysnake", "train", str(write_config(directory, **OPTIONS))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    (directory / "printed").write_text(done.stdout)
    return directory


def test_two_ranks_train_as_one_with_all_of_their_micro_batches(straight: Path, tmp_path: Path) -> None:
    train(values_in(tmp_path, **OPTIONS, gradient_accumulation_steps=4))
    lines, wanted = metrics_of(straight / "run"), metrics_of(tmp_path / "run")
    for name in ("step", "lr", "num_tokens"):
        assert [line[name] for line in lines] == [line[name] for line in wanted]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in wanted], rel=TOLERANCE)
    losses, wanted_losses = (
        {line["step"]: line["eval_loss"] for line in found if "eval_loss" in line} for found in (lines, wanted)
    )
    assert list(losses) == [15, 30, 40] and losses == pytest.approx(wanted_losses, rel=TOLERANCE)


def test_the_first_rank_alone_prints_and_counts_the_bytes_of_all(straight: Path) -> None:
    printed = (straight / "printed").read_text()
    assert printed.count("40 of 40 steps done") == printed.count("step 40/40") == 1
    assert "on each of 2 ranks" in printed
    assert "256 tokens per step: 2 ranks with 2 micro-batches of 2 x 32; steps 1 to 40" in printed
    assert "of a budget of 32 MiB; disk" in printed  # half of engine.ram
    manifests = (straight / "run" / "store").glob("rank-*-of-2/greedysnake.manifest")
    written = [Manifest.decode(path.read_bytes(), str(path)).metadata["ssd_written_bytes"] for path in manifests]
    last = metrics_of(straight / "run")[-1]["ssd_written_total_bytes"]
    assert len(written) == 2 and max(written) < last <= sum(written)
    assert f"{sum(written) / 1e9:.3g} GB written to SSD in all" in printed


def test_a_signal_to_one_rank_ends_all_and_they_continue_to_the_bit(straight: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, **OPTIONS)
    with started(config) as processes:
        wait_for_lines(tmp_path / "run", 3, processes)
        processes[1].send_signal(signal.SIGTERM)
        (code, output, errors), other = ended(processes)
    reached = len(metrics_of(tmp_path / "run"))
    assert 3 <= reached < NUM_STEPS
    assert (code, errors) == (0, "") and f"stopped by SIGTERM after step {reached}, which is saved" in output
    assert other == (0, "", "")
    before = everything_in(tmp_path)
    with pytest.raises(
        gs.StorageError, match=r"store holds what 2 processes stored, and this run has 1 process: start 2"
    ):
        train(values_in(tmp_path, **OPTIONS))
    assert everything_in(tmp_path) == before
    with started(config) as processes:
        wait_for_lines(tmp_path / "run", reached + 3, processes)
        for process in processes:
            process.send_signal(signal.SIGINT)
        (code, output, errors), other = ended(processes)
    assert f"continued from the checkpoint of step {reached}" in output and "stopped by SIGINT" in output
    assert (code, errors.count("SIGINT: the step under way is finished and saved"), other) == (0, 1, (0, "", ""))
    with started(config) as processes:
        assert [code for code, _, _ in ended(processes)] == [0, 0]
    assert curve(tmp_path / "run") == curve(straight / "run")
    losses, wanted = ([line.get("eval_loss") for line in metrics_of(run / "run")] for run in (tmp_path, straight))
    assert losses == wanted


def test_a_killed_rank_ends_the_others_and_they_return_to_their_checkpoint(straight: Path, tmp_path: Path) -> None:
    config, reached = write_config(tmp_path, **{**OPTIONS, "save_steps": 4}), 4
    for killed in (1, 0):
        with started(config) as processes:
            wait_for_lines(tmp_path / "run", reached + 2, processes)  # more than there were
            processes[killed].kill()
            start_s = time.monotonic()
            code, _, errors = ended(processes)[1 - killed]
        assert time.monotonic() - start_s < 120  # torch's own patience is half an hour
        assert code == 2 and len(errors.splitlines()) == 1
        assert errors.startswith(f"greedysnake: rank {1 - killed}: ")  # then the op that it was waiting in, if any
        assert "another rank ended or cannot be reached: look at what it said last" in errors
        reached = len(metrics_of(tmp_path / "run"))
        assert reached < NUM_STEPS
    with started(config) as processes:
        (code, output, errors), _ = ended(processes)
    assert (code, errors) == (0, "") and "continued from the checkpoint of step" in output
    assert curve(tmp_path / "run") == curve(straight / "run")


# Failures of one rank, in two processes that torch.distributed connects


def outcome(values: dict[str, Any]) -> dict[str, Any]:
    """What a training comes to on this rank: its summary, or the sentence that it ends with."""
    try:
        return vars(train(values))
    except GreedySnakeError as error:
        return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def patched(owner: object, name: str, replacement: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def full_at_step_3(write: Any) -> Any:
    """The first rank's write of a line to a full drive."""

    def refused(self: MetricsFile, record: Any) -> None:
        if record["step"] == 3:
            self._file.close()
            self._file = open("/dev/full", "a")  # noqa: SIM115 - closed by its owner
        write(self, record)

    return refused


def stopped_by_a_signal_to_the_second_rank(evaluate: Any) -> Any:
    def interrupted(self: gs.Engine, batches: Any) -> float:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return float(evaluate(self, batches))

    return interrupted


def failing_on(failing: int, error: Exception, original: Any) -> Any:
    def fail(*arguments: Any) -> Any:
        if dist.get_rank() == failing:
            raise error
        return original(*arguments)

    return fail


def meet_failures(folder: str) -> dict[str, Any]:
    directory = Path(folder)
    values = values_in(directory, max_steps=5, eval_steps=5, save_steps=0)
    found = {"straight": outcome({**values, "output_dir": f"{folder}/straight"})}
    with patched(MetricsFile, "write", full_at_step_3(MetricsFile.write)):
        found["full"] = outcome(values)
    with patched(gs.Engine, "evaluate", stopped_by_a_signal_to_the_second_rank(gs.Engine.evaluate)):
        found["signal in an evaluation"] = outcome(values)
    found["continued"] = outcome(values)
    error = gs.ConfigError("data.validation_paths is gone")
    with patched(preparation, "find_sources", failing_on(1, error, preparation.find_sources)):
        found["unprepared"] = outcome({**values, "output_dir": f"{folder}/unprepared"})
    full = gs.StorageError("run.yaml finds no room")
    with patched(trainer, "begin_run", failing_on(0, full, trainer.begin_run)):
        found["no folder"] = outcome({**values, "output_dir": f"{folder}/full"})
    values["data"]["paths"] = [f"{folder}/bad.jsonl"]
    found["bad data"] = outcome({**values, "output_dir": f"{folder}/new/bad"})
    return found


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A folder, and what became of the trainings there on both ranks."""
    directory = tmp_path_factory.mktemp("failures")
    values_in(directory)
    (directory / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    return directory, together.call(2, "test_train_ranks", "meet_failures", str(directory))


def test_a_full_drive_of_the_metrics_ends_all_ranks_and_costs_no_step(met: tuple[Path, list[Any]]) -> None:
    directory, (first, second) = met
    assert first["full"]["error"].startswith("StorageError: could not write ") and "ENOSPC" in first["full"]["error"]
    assert second["full"]["error"] == f"RankError: rank 0 failed: {first['full']['error']}"
    assert (first["continued"]["num_steps"], second["continued"]["num_steps"]) == (5, 5)
    assert curve(directory / "run") == curve(directory / "straight"), "nor a line"


def test_a_signal_to_one_rank_ends_an_evaluation_on_all(met: tuple[Path, list[Any]]) -> None:
    _, ranks = met
    for found in ranks:
        stopped, last = found["signal in an evaluation"], found["continued"]
        assert (stopped["num_steps"], stopped["stopped_by"], stopped["eval_loss"]) == (5, "SIGTERM", None)
        assert last["eval_loss"] == found["straight"]["eval_loss"] == ranks[0]["straight"]["eval_loss"]


@pytest.mark.parametrize(("what", "failing"), [("unprepared", 1), ("no folder", 0)])
def test_what_one_rank_cannot_do_is_told_to_the_other(what: str, failing: int, met: tuple[Path, list[Any]]) -> None:
    _, ranks = met
    told = ranks[failing][what]["error"]
    assert "is gone" in told or "finds no room" in told
    assert ranks[1 - failing][what]["error"] == f"RankError: rank {failing} failed: {told}"


def test_data_that_cannot_be_used_are_one_sentence_on_all_ranks_and_leave_nothing(met: tuple[Path, list[Any]]) -> None:
    directory, (first, second) = met
    assert "bad.jsonl line 2: not valid JSON" in first["bad data"]["error"]
    assert second["bad data"] == first["bad data"]
    assert not (directory / "new").exists()


# The parts


def test_a_folder_that_another_rank_has_filled_stays(tmp_path: Path) -> None:
    config = load_config(values_in(tmp_path))
    with pytest.raises(gs.ConfigError), leaving_nothing(config):
        (tmp_path / "run" / "data" / "tokens").mkdir(parents=True)
        (tmp_path / "run" / "data" / "lock").touch()
        raise gs.ConfigError("the data")
    assert sorted(os.listdir(tmp_path / "run" / "data")) == ["lock", "tokens"]


@pytest.mark.parametrize(
    ("num_batches", "num_ranks", "dealt"),
    [(4, 2, ["01", "23"]), (3, 2, ["01", "2-"]), (1, 2, ["0", "-"]), (5, 4, ["01", "23", "4-", "--"]), (3, 1, ["012"])],
)
def test_every_rank_evaluates_equally_many_micro_batches_and_each_is_evaluated_once(
    num_batches: int, num_ranks: int, dealt: list[str]
) -> None:
    batches = [
        {"input_ids": torch.tensor([[number]]), "labels": torch.tensor([[number]])} for number in range(num_batches)
    ]
    for rank in range(num_ranks):
        labels = [int(batch["labels"]) for batch in deal(batches, rank, num_ranks)]
        assert "".join("-" if label == IGNORED else str(label) for label in labels) == dealt[rank]


def test_a_step_of_all_ranks_has_their_bytes_the_longest_time_and_the_busiest_bound() -> None:
    one = StepResult(2.5, 1.0, 100, 3.0, 1, 2, 3, 4, "compute", 0.5, False)
    other = StepResult(2.5, 1.0, 100, 2.0, 10, 20, 30, 40, "ssd", 0.9, False)
    assert of_all_ranks([one, other]) == StepResult(2.5, 1.0, 100, 3.0, 11, 22, 33, 44, "ssd", 0.9, False)
    assert of_all_ranks([one]) == one


def test_steps_follow_from_the_micro_batches_of_all_ranks_and_ram_is_divided_by_those_of_the_host(
    tmp_path: Path,
) -> None:
    config = load_config(values_in(tmp_path, max_steps=-1))
    alone, one_of_four = prepare(config), prepare(config, share=Share(3, 4, 2))
    count = alone.train.num_micro_batches_per_epoch
    assert (alone.num_steps, one_of_four.num_steps) == (-(-count // 2), -(-count // 8))
    assert (alone.ram, one_of_four.ram) == (64 << 20, 32 << 20)
    assert one_of_four.footprint.ram_budget_bytes == 32 << 20
    assert sum(one_of_four.footprint.disk_bytes) < sum(alone.footprint.disk_bytes)


def test_what_is_free_is_divided_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_in(tmp_path)
    values["engine"]["ram"] = None
    monkeypatch.setattr(preparation, "ram_bytes", lambda: (10 << 30, 8 << 30))
    config = load_config(values)
    assert [ram_budget(config), ram_budget(config, Share(0, 8, 4))] == [4 << 30, 1 << 30]


def prospect(**changes: Any) -> Prospect:
    known = {"output_dir": "runs/x", "device": "cuda", "dtype": "bfloat16", "num_steps": 9, "first_step": 0}
    sizes = {"num_micro_batches": 8, "micro_batch_size": 2, "sequence_length": 1024, "not_compiled": None}
    return Prospect(**{**known, **sizes, **changes})


def test_idle_gpus_are_named_where_a_run_begins(tmp_path: Path) -> None:
    footprint = prepare(load_config(values_in(tmp_path))).footprint
    text = prospect_text(footprint, prospect(num_gpus=4))
    assert text.splitlines()[-1] == (
        "3 more GPUs are not used: in another output_dir, torchrun --nproc-per-node 4 -m greedysnake train ... trains "
        "on all of them"
    )
    assert "1 more GPU is not used" in prospect_text(footprint, prospect(num_gpus=2))
    for told in ({"num_gpus": 1}, {"num_gpus": 4, "first_step": 3}, {"num_gpus": 4, "num_ranks": 4}, {"num_gpus": 0}):
        assert "not used" not in prospect_text(footprint, prospect(**told))


def test_a_table_of_several_ranks_says_that_it_is_of_each(tmp_path: Path) -> None:
    footprint, screen = prepare(load_config(values_in(tmp_path))).footprint, io.StringIO()
    Console(file=screen, width=100).print(home_table(footprint, 4))
    assert screen.getvalue().startswith("on each of 4 ranks ")
    text = prospect_text(footprint, prospect(num_ranks=4))
    assert "65.5k tokens per step: 4 ranks with 8 micro-batches of 2 x 1024" in text


# The command line

ARGUMENTS = {"export": ["run", "out"], "reshard": ["run", "out", "--ranks", "1"]}


@pytest.mark.parametrize("command", ["plan", "export", "reshard", "verify"])
def test_commands_for_one_process_refuse_several(
    command: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code, _, errors = run(command, *ARGUMENTS.get(command, []))
    assert (code, errors) == (
        2,
        f"greedysnake: rank 1: {command} is for one process, and WORLD_SIZE is 2: run it without torchrun\n",
    )
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {},
            "WORLD_SIZE is set in the environment and RANK is not: start several processes with torchrun, or unset it",
        ),
        ({"RANK": "1", "LOCAL_RANK": "x"}, "rank 1: WORLD_SIZE is set in the environment and LOCAL_RANK is 'x': start"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "rank 1: 2 processes were started that do not know where to meet (Error "),
    ],
)
def test_what_a_launcher_did_not_say_is_one_sentence(
    environment: dict[str, str], sentence: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environment, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, _, errors = run("train", write_config(tmp_path))
    assert (code, len(errors.splitlines())) == (2, 1)
    assert errors.startswith(f"greedysnake: {sentence}")
    assert not (tmp_path / "run").exists() and not dist.is_initialized()


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(gs.ConfigError, match=r"LOCAL_RANK 2 needs a GPU of its own and this host has 2: start 2 proc"):
        joined(Launched(2, 2, 4), "auto").__enter__()


def test_one_process_joins_nothing() -> None:
    with joined(Launched(), "auto"):
        assert not dist.is_initialized()
