"""Training as a whole: metrics, evaluation, checkpoints, signals, and continuing as if nothing had happened."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import greedysnake as gs
from greedysnake import trainer
from greedysnake.data import corpus
from greedysnake.placement import Home
from greedysnake.report import progress as progress_module
from greedysnake.report.metrics import KEYS, MetricsFile
from greedysnake.report.progress import Progress, Summary, step_line, stop_notice, summary_text
from greedysnake.runtime.footprint import Footprint
from greedysnake.runtime.manifest import Manifest
from training import curve, metrics_of, quiet, train, train_for, values_in, write_config, write_rows


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted, with what it printed."""
    directory = tmp_path_factory.mktemp("straight")
    console = Console(file=io.StringIO(), width=200)
    train(values_in(directory, eval_steps=4, save_steps=3), console)
    assert isinstance(console.file, io.StringIO)
    (directory / "printed").write_text(console.file.getvalue())
    return directory


def test_every_step_has_one_line_with_every_key(straight: Path) -> None:
    lines = metrics_of(straight / "run")
    assert [line["step"] for line in lines] == list(range(1, 9))
    for line in lines:
        assert [key for key in line if key != "eval_loss"] == list(KEYS)
        assert ("eval_loss" in line) == (line["step"] % 4 == 0)
        assert line["tokens_per_s"] == pytest.approx(line["num_tokens"] / line["elapsed_s"])
        assert line["bound"] in ("ssd", "pcie", "compute", "cpu") and 0 <= line["bound_fraction"] <= 1
    totals = [line["ssd_written_total_bytes"] for line in lines]
    assert totals == sorted(totals) and totals[0] > 0


def test_the_loss_falls_and_the_rate_follows_its_schedule(straight: Path) -> None:
    lines = metrics_of(straight / "run")
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]
    assert lines[-1]["eval_loss"] < lines[3]["eval_loss"]
    assert [line["lr"] for line in lines[:3]] == [0.0, 5e-3, 1e-2]


def test_a_person_sees_where_everything_lives_then_lines_then_a_summary(straight: Path) -> None:
    printed = (straight / "printed").read_text()
    for word in ("weights", "optimizer state", "activations", "gradients", "of a budget of 64 MiB", "tokens per step"):
        assert word in printed
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert len(lines) == 8
    for part in ("loss ", "lr ", " tokens/s", " busy ", "GB written", " left"):
        assert all(part in line for line in lines), part
    assert "8 of 8 steps done" in printed and "next: greedysnake export" in printed


def test_a_person_sees_what_became_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "TOKENISING_LINE_S", 0.0)
    monkeypatch.setattr(corpus, "PROGRESS_ROWS", 100)
    values = values_in(tmp_path, eval_steps=4, max_steps=1, warmup_steps=0)
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"text": ""}\n{"body": "b"}\n{"text": "' + "long " * 20 + '"}\n')
    values["data"]["max_bad_rows"] = 2
    console = quiet()
    train(values, console)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert "tokenising: 100 rows, " in printed and "tokenising: 200 rows, " in printed
    assert re.search(r"^data: 1\d\d documents, .* 1 is longer than a sequence; skipped 2 bad rows$", printed, re.M)
    assert re.search(r"^held out: \d+ documents, ", printed, re.M)
    assert printed.count("rows.jsonl line 201: no text in column 'text'") == 1
    assert printed.count("rows.jsonl line 202: no column") == 1


def test_a_finished_run_is_not_trained_again(straight: Path) -> None:
    before = curve(straight / "run")
    summary = train(values_in(straight, eval_steps=4, save_steps=3))
    assert (summary.num_steps, summary.loss) == (8, None)
    assert curve(straight / "run") == before


def test_a_run_that_is_longer_from_the_start_continues_where_it_was(tmp_path: Path) -> None:
    constant = {"lr_scheduler_type": "constant_with_warmup"}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    train(values_in(tmp_path / "one", max_steps=6, **constant))
    train(values_in(tmp_path / "two", max_steps=4, **constant))
    train(values_in(tmp_path / "two", max_steps=6, **constant))
    assert curve(tmp_path / "one" / "run") == curve(tmp_path / "two" / "run")


def test_evaluation_and_checkpoints_change_nothing(straight: Path, tmp_path: Path) -> None:
    train(values_in(tmp_path, save_steps=0))
    assert curve(tmp_path / "run") == curve(straight / "run")


def start_and_wait_for(config: Path, num_lines: int) -> subprocess.Popen[str]:
    """Starts a training and returns when its metrics have so many lines."""
    command = [sys.executable, "-m", "greedysnake", "train", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = config.parent / "run" / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or len(metrics.read_text().splitlines()) < num_lines):
        time.sleep(0.01)
    return process


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough that a signal comes in the middle on any machine; not interrupted."""
    directory = tmp_path_factory.mktemp("long")
    train(values_in(directory, max_steps=50, save_steps=0))
    return directory / "run"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_run_that_then_continues_to_the_bit(number: signal.Signals, tmp_path: Path, long: Path) -> None:
    process = start_and_wait_for(write_config(tmp_path, max_steps=50, save_steps=40), 3)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == f"\n{number.name}: the step under way is finished and saved; a second signal ends at once\n"
    reached = len(metrics_of(tmp_path / "run"))
    assert 3 <= reached < 50
    assert f"stopped by {number.name} after step {reached}, which is saved" in output
    console = quiet()
    train(values_in(tmp_path, max_steps=50, save_steps=40), console)
    assert isinstance(console.file, io.StringIO)
    assert f"continued from the checkpoint of step {reached}\n" in console.file.getvalue()
    assert curve(tmp_path / "run") == curve(long)


def test_a_killed_run_returns_to_its_checkpoint_and_no_step_appears_twice(tmp_path: Path, long: Path) -> None:
    process = start_and_wait_for(write_config(tmp_path, max_steps=50, save_steps=4), 6)
    process.kill()
    process.communicate()
    assert len(metrics_of(tmp_path / "run")) < 50
    train(values_in(tmp_path, max_steps=50, save_steps=4))
    assert curve(tmp_path / "run") == curve(long)


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal, time\n"
        "from greedysnake.trainer import stop_requests\n"
        "with stop_requests() as requests:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(requests, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "['SIGTERM']\n")


def test_a_pipe_without_a_reader_costs_no_step(tmp_path: Path) -> None:
    config = write_config(tmp_path, max_steps=40)
    command = f"{sys.executable} -m greedysnake train {config} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(metrics_of(tmp_path / "run")) == 40


class ClosedTerminal(io.StringIO):
    """Takes no more lines, as a terminal whose window is gone."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_that_closes_costs_no_step(is_terminal: bool, tmp_path: Path) -> None:
    console = Console(file=ClosedTerminal(), width=200, force_terminal=is_terminal)
    assert train(values_in(tmp_path, max_steps=3), console).num_steps == 3
    manifest = tmp_path / "run" / "store" / "greedysnake.manifest"
    assert Manifest.decode(manifest.read_bytes(), str(manifest)).step == 3


def test_what_nohup_ignores_stays_ignored() -> None:
    code = (
        "import os, signal\n"
        "from greedysnake.trainer import stop_requests\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with stop_requests() as requests:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(requests)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "[]\n")


def test_tokens_and_bytes_written_count_over_all_parts_of_a_run(tmp_path: Path) -> None:
    first = train(values_in(tmp_path, max_steps=4))
    second = train(values_in(tmp_path, max_steps=8))
    assert second.num_tokens == sum(line["num_tokens"] for line in metrics_of(tmp_path / "run")) > first.num_tokens
    totals = [line["ssd_written_total_bytes"] for line in metrics_of(tmp_path / "run")]
    assert totals[3] < first.ssd_written_bytes <= totals[4] < totals[-1] < second.ssd_written_bytes


def test_a_checkpoint_of_what_lives_in_ram_counts_among_the_bytes_written(tmp_path: Path) -> None:
    written = []
    for steps in (2, 3, 4):
        values = values_in(tmp_path, max_steps=steps)
        values["engine"] |= {"placement": {"weights_ram": 1.0, "optimizer_ram": 1.0, "activations_ram": 1.0}}
        written.append(train(values).ssd_written_bytes)
    assert written[0] > 0 and written == [written[0], 2 * written[0], 3 * written[0]]


def test_epochs_make_steps_when_max_steps_does_not(tmp_path: Path) -> None:
    trainer = gs.Trainer(values_in(tmp_path, max_steps=-1, num_train_epochs=2), console=quiet())
    per_epoch = trainer.prepared.train.num_micro_batches_per_epoch
    assert trainer.prepared.num_steps == -(-per_epoch * 2 // 2)


@pytest.mark.parametrize(("epochs", "steps"), [(0.1, 7), (0.7, 49), (3, 210), (1e-9, 1)])
def test_epochs_make_no_step_too_many(tmp_path: Path, epochs: float, steps: int) -> None:
    values = values_in(tmp_path, max_steps=-1, num_train_epochs=epochs, warmup_steps=0)
    values["training"] |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    write_rows(tmp_path / "rows.jsonl", num_rows=70)
    values["data"] = {"paths": [str(tmp_path / "rows.jsonl")], "packing": False}
    assert gs.Trainer(values, console=quiet()).prepared.num_steps == steps


@pytest.mark.parametrize("optimistic", [True, False])
def test_what_a_run_takes_is_foreseen_to_the_byte(tmp_path: Path, optimistic: bool) -> None:
    values = values_in(tmp_path, max_steps=2)
    shares = {"activations_ram": 0.5, "gradients_ram": 0.5, "optimizer_ram": 0.3, "weights_ram": 0.6}
    values["engine"] |= {"placement": shares, "optimistic": optimistic}
    trainer = gs.Trainer(values, console=quiet())
    footprint: Footprint = trainer.prepared.footprint
    trainer.train()
    files = [tmp_path / "run" / "store" / f"greedysnake.{name}" for name in ("extents", "scratch")]
    assert sum(file.stat().st_size for file in files) == sum(footprint.disk_bytes)
    with gs.Engine(
        trainer.prepared.model,
        gs.AdamW(lr=0.1),
        storage=[tmp_path / "again"],
        ram="64MiB",
        dtype="float32",
        max_grad_norm=1.0,
        placement=trainer.config.engine.placement,
        chunk_params=4096,
        optimistic=optimistic,
    ) as engine:
        engine.step(trainer.prepared.train.micro_batches(0, 2))
        assert engine.arena.peak_bytes == footprint.ram_bytes


def slots_of(trainer: gs.Trainer) -> float:
    footprint = trainer.prepared.footprint
    scratch = sum(row.get(Home.SSD, 0) for name, row in footprint.homes.items() if name in ("activations", "gradients"))
    return (sum(footprint.disk_bytes) - scratch) / sum(footprint.slot_bytes)


def test_updates_do_not_wait_for_the_norm_where_the_drive_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the store, and for a slot more."""
    values = values_in(tmp_path, max_steps=4)
    trainer = gs.Trainer(values, console=quiet())
    assert trainer.prepared.footprint.plan.may_be_tentative
    assert slots_of(trainer) == 3
    slot = sum(trainer.prepared.footprint.slot_bytes)
    real = os.statvfs

    def nearly_full(path: object) -> object:
        return SimpleNamespace(f_bavail=(4 * slot - 4096) // 4096, f_frsize=4096, f_blocks=real("/").f_blocks)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    text = io.StringIO()
    trainer = gs.Trainer(values, console=Console(file=text, width=200))
    assert not trainer.prepared.footprint.plan.may_be_tentative
    assert slots_of(trainer) == 2
    trainer.train()
    assert "updates wait for the norm of the whole gradient" in text.getvalue()


@pytest.mark.parametrize("first", [True, False])
def test_the_drive_may_have_room_for_tentative_updates_in_one_part_of_a_run_only(
    first: bool, tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_in(tmp_path, eval_steps=4, save_steps=3)
    values["engine"]["optimistic"] = first
    train_for(5, values, monkeypatch)
    values["engine"]["optimistic"] = not first
    trainer = gs.Trainer(values, console=quiet())
    assert trainer.prepared.resume and trainer.prepared.footprint.plan.may_be_tentative is not first
    trainer.train()
    assert curve(tmp_path / "run") == curve(straight / "run")


def test_with_everything_in_ram_no_third_slot_is_taken(tmp_path: Path) -> None:
    values = values_in(tmp_path)
    values["engine"] |= {"fill_ram": True, "ram": "256MiB"}
    trainer = gs.Trainer(values, console=quiet())
    assert not trainer.prepared.footprint.plan.may_be_tentative
    assert slots_of(trainer) == 2


def test_metrics_survive_a_torn_line_and_drop_what_is_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    with MetricsFile(path, last_step=2) as metrics:
        metrics.write({"step": 3, "loss": float("nan")})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "loss": None},
    ]


@pytest.mark.parametrize("line", ["5", "garbage", '{"loss": 1}', '{"step": "x"}', "\x00\x00", "[]"])
def test_a_damaged_line_of_the_metrics_is_named_and_of_no_account_to_a_new_run(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(gs.StorageError, match=r"metrics.jsonl is damaged: line 2 is not the record of a step: remove"):
        MetricsFile(path, last_step=2)
    MetricsFile(path, last_step=0).close()
    assert path.read_text() == ""


def test_a_full_drive_of_the_metrics_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = MetricsFile.write

    def write(self: MetricsFile, record: Any) -> None:
        if record["step"] == 3:
            self._file.close()
            self._file = open("/dev/full", "a")  # noqa: SIM115 - closed by its owner
        written(self, record)

    values = values_in(tmp_path, max_steps=5)
    straight = {**values, "output_dir": str(tmp_path / "straight")}
    train(straight)
    with monkeypatch.context() as patched, pytest.raises(gs.StorageError, match=r"metrics.jsonl: No space.*ENOSPC"):
        patched.setattr(MetricsFile, "write", write)
        train(values)
    console = quiet()
    assert train(values, console).num_steps == 5
    assert isinstance(console.file, io.StringIO)
    assert "continued from the checkpoint of step 3" in console.file.getvalue()
    assert curve(tmp_path / "run") == curve(tmp_path / "straight"), "nor a line"


def test_the_lines_are_on_the_drive_before_the_checkpoint_that_comes_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(MetricsFile, "sync", lambda self: synced.append(len(metrics_of(tmp_path / "run"))))
    save, saved = gs.Engine.save, []

    def noted(self: gs.Engine, *values: Any) -> None:
        saved.append((self.num_steps, synced[-1]))
        save(self, *values)

    monkeypatch.setattr(gs.Engine, "save", noted)
    train(values_in(tmp_path, max_steps=5, save_steps=2))
    assert saved == [(2, 2), (4, 4), (5, 5)]


def test_metrics_that_cannot_be_kept_cost_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, write = values_in(tmp_path, max_steps=4, save_steps=2), MetricsFile.write

    def moving(self: MetricsFile, record: Any) -> None:
        write(self, record)
        if record["step"] == 1:  # as those who rotate logs do
            self.path.rename(self.path.with_suffix(".1"))

    with monkeypatch.context() as patched:
        patched.setattr(MetricsFile, "write", moving)
        assert train(values).num_steps == 4

    real = os.fdatasync

    def fail(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith("metrics.jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    values["training"] |= {"max_steps": 6}
    with monkeypatch.context() as patched, pytest.raises(gs.StorageError, match=r"metrics\.jsonl: .*EIO"):
        patched.setattr("os.fdatasync", fail)
        train(values)
    console = quiet()
    assert train(values, console).num_steps == 6
    assert isinstance(console.file, io.StringIO)
    assert "continued from the checkpoint of step 6" in console.file.getvalue()


def test_a_line_says_what_bounds_the_step_and_how_close() -> None:
    record = {
        "step": 12,
        "loss": 2.5,
        "lr": 3e-4,
        "tokens_per_s": 12345.6,
        "bound": "ssd",
        "bound_fraction": 0.93,
        "ssd_written_total_bytes": 12_340_000_000,
        "elapsed_s": 1.0,
    }
    assert step_line(record, 100, 3725) == (
        "step 12/100  loss 2.5000  lr 3.00e-04  12.3k tokens/s  ssd busy 93%  SSD 12.3 GB written  1h02m left"
    )


def test_a_narrow_terminal_shows_the_time_left_too() -> None:
    screen = io.StringIO()
    record = {"step": 1, "loss": 1.5, "lr": 1e-3, "tokens_per_s": 10.0, "elapsed_s": 30.0, "bound": "ssd"}
    with Progress(Console(file=screen, force_terminal=True, width=60), num_steps=3, every=1) as progress:
        progress.step({**record, "bound_fraction": 0.5, "ssd_written_total_bytes": 1})
    assert "1m00s left" in screen.getvalue() and "…" not in screen.getvalue()


def test_on_a_terminal_evaluations_stay_above_the_moving_line() -> None:
    screen = io.StringIO()
    record = {"loss": 1.5, "lr": 1e-3, "tokens_per_s": 10.0, "elapsed_s": 1.0, "bound": "ssd", "bound_fraction": 0.5}
    record["ssd_written_total_bytes"] = 1
    with Progress(Console(file=screen, force_terminal=True, width=200), num_steps=3, every=1) as progress:
        progress.step({**record, "step": 1, "eval_loss": 1.25})
        progress.step({**record, "step": 2})
    assert re.search(r"step 1/3 .*eval 1\.2500[^\r]*\n", screen.getvalue())  # the line is ended, not written over


def on_screen(text: str, width: int) -> list[str]:
    """What a terminal shows after it was sent this."""
    lines, row, column = [""], 0, 0
    for number, kind, letter in re.findall(r"\x1b\[\??(\d*)([A-Za-z])|([\s\S])", text):
        if kind == "A":
            row = max(0, row - int(number or 1))
        elif kind == "K":
            lines[row] = ""
        elif letter == "\r":
            column = 0
        elif letter and (letter == "\n" or column == width):
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        if letter and letter not in "\r\n":
            lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
            column += 1
    return lines


@pytest.mark.parametrize("width", [45, 80, 200])
def test_what_is_said_of_a_signal_stays_on_a_terminal(width: int) -> None:
    screen = io.StringIO()
    record = {"loss": 1.5, "lr": 1e-3, "tokens_per_s": 10.0, "elapsed_s": 1.0, "bound": "ssd", "bound_fraction": 0.5}
    record["ssd_written_total_bytes"] = 1
    with Progress(Console(file=screen, force_terminal=True, width=width), num_steps=3, every=1) as progress:
        for step in (1, 2):
            progress.step({**record, "step": step})
        screen.write("^C" + stop_notice("SIGINT", is_terminal=True))
        progress.step({**record, "step": 3})
    shown = "".join(on_screen(screen.getvalue(), width))
    assert "a second signal ends at once" in shown and "step 3/3" in shown and "step 1/3" not in shown


def test_a_long_evaluation_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"loss": 1.5, "lr": 1e-3, "tokens_per_s": 10.0, "elapsed_s": 1.0, "bound": "ssd", "bound_fraction": 0.5}
    record.update(ssd_written_total_bytes=1, step=1)
    for is_terminal in (True, False):
        screen = io.StringIO()
        with Progress(Console(file=screen, force_terminal=is_terminal, width=200), num_steps=3, every=1) as progress:
            progress.step(record)
            progress.evaluating(0, 30)
            progress.evaluating(10, 30)
            assert ("evaluating: 10 of 30 micro-batches" in screen.getvalue()) == is_terminal
            with monkeypatch.context() as patch:
                patch.setattr(progress_module, "EVALUATING_LINE_S", 0.0)
                progress.evaluating(20, 30)
            assert "evaluating: 20 of 30 micro-batches" in screen.getvalue()
            progress.evaluated()
        if is_terminal:
            assert [line for line in on_screen(screen.getvalue(), 200) if line] == [step_line(record, 3, 2.0)]


def test_a_summary_counts_skipped_steps() -> None:
    summary = Summary("runs/x", 5, 9, 1.5, None, 10_000, 2, 61.0, 10**9, "SIGTERM")
    text = summary_text(summary)
    assert "5 of 9 steps done, 10k target tokens seen, loss 1.5000, 2 skipped (gradient not finite)" in text
    assert "stopped by SIGTERM after step 5, which is saved: the same command continues from there" in text
    text = summary_text(replace(summary, overwrites=True))
    assert "saved: the same command, without overwrite_output_dir, continues from there" in text


def test_a_summary_of_a_run_that_was_made_shorter() -> None:
    text = summary_text(Summary("runs/x", 31, 10, None, None, 10_000, 0, 1.0, 10**9, None))
    assert "31 steps done, more than the 10 asked for, 10k target tokens seen" in text


def test_reports_go_where_they_are_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text(
        "import json, os\n"
        "def init(**options): calls('init', options)\n"
        "def log(metrics, step): calls('log', [step, sorted(metrics)])\n"
        "def finish(): calls('finish', None)\n"
        f"def calls(*what): open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps(what) + os.linesep)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    train(values_in(tmp_path, max_steps=2, report_to=["wandb"], run_name="mine"))
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [name for name, _ in calls] == ["init", "log", "log", "finish"]
    assert calls[0][1]["name"] == "mine" and calls[0][1]["config"]["training"]["seed"] == 1
    assert calls[2][1] == [2, sorted(key for key in KEYS if key not in ("step", "bound"))]


def test_a_resumed_run_continues_that_of_wandb_and_one_that_begins_anew_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb drops what is logged for steps that its run has had."""
    ids: list[str] = []
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    vars(wandb).update(init=lambda **given: ids.append(given["id"]), log=lambda *_, **__: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    values = values_in(tmp_path, max_steps=2, report_to=["wandb"], lr_scheduler_type="constant", warmup_steps=0)
    train(values)
    values["training"]["max_steps"] = 3
    train(values)
    train({**values, "overwrite_output_dir": True})
    assert ids[0] == ids[1] != ids[2]


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio.py").write_text(
        "def init(**options): pass\ndef log(metrics, step): raise OSError('no route to host')\ndef finish(): 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(
        RuntimeWarning, match=r"trackio failed at step 1 \(OSError: no route to host\): training goes on"
    ):
        train(values_in(tmp_path, max_steps=2, report_to=["trackio"]))
    assert len(metrics_of(tmp_path / "run")) == 2


def test_a_tracker_that_does_not_start_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio.py").write_text("def init(**options): raise ValueError('no key.\\nSee the docs')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(gs.ConfigError, match=r"report_to: trackio did not start \(ValueError: no key\): set it up, or"):
        train(values_in(tmp_path, report_to=["trackio"]))


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(gs.ConfigError, match=r"training\.report_to names mlflow, which is not installed: pip install"):
        train(values_in(tmp_path, report_to=["mlflow"]))
    assert not (tmp_path / "run").exists() and os.listdir(tmp_path) == ["rows.jsonl"]


def test_what_is_loaded_is_frozen_once_and_not_counted_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting goes through all that is frozen, and holds Python's lock meanwhile."""
    calls: list[str] = []
    for name in ("get_freeze_count", "freeze", "unfreeze"):
        right = getattr(gc, name)
        monkeypatch.setattr(gc, name, lambda name=name, right=right: (calls.append(name), right())[1])
    gs.Trainer(values_in(tmp_path, max_steps=4), console=quiet()).train()
    assert calls == ["get_freeze_count", "freeze", "unfreeze"]
    monkeypatch.undo()
    assert gc.get_freeze_count() == 0
