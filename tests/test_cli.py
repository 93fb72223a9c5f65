"""The commands as a user meets them: exit codes, one clear sentence, no traceback."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import IO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from greedysnake import cli, selfcheck
from greedysnake.errors import ConfigError, PlanError
from greedysnake.report.doctor_text import doctor_text
from greedysnake.report.schedule_text import schedule_text
from greedysnake.runtime.doctor import Diagnosis, Problem
from test_doctor import HEALTHY_DRIVE, HEALTHY_HOST


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "greedysnake", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environment})


def test_version_is_that_of_the_package() -> None:
    done = run("version")
    assert (done.returncode, done.stdout) == (0, f"greedysnake {version('greedysnake')}\n")


def test_the_entry_point_is_installed() -> None:
    script = Path(sys.executable).parent / "greedysnake"
    assert subprocess.run([script, "version"], capture_output=True, text=True).stdout.startswith("greedysnake ")


def test_commands_that_need_no_torch_do_not_import_it() -> None:
    code = "import sys, greedysnake.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli.app, ["fly"]).exit_code == 2


@pytest.mark.parametrize("command", ["train", "verify", "plan", "doctor", "selfcheck"])
def test_what_may_be_left_out_has_one_pair_of_brackets(command: str) -> None:
    usage = CliRunner().invoke(cli.app, [command, "--help"], prog_name="greedysnake", env={"COLUMNS": "100"}).output
    (line,) = re.findall(rf"Usage: greedysnake {command} (.*)", usage)
    words = r"\[OPTIONS\] (\[CONFIG\.yaml\] \[a\.b=c\]\.\.\.|\[DIR\](\.\.\.)?)"
    assert re.fullmatch(words, line.strip())


@pytest.mark.parametrize("error", [ConfigError("alpha is 2: give a fraction"), PlanError("needs 3 GiB")])
def test_errors_made_for_people_are_one_sentence_and_exit_code_two(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(prog_name: str) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"greedysnake: {error}\n"
    monkeypatch.setenv("GREEDYSNAKE_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main()


@pytest.mark.parametrize(
    ("given", "spins"), [({}, cli.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_torchs_threads_do_not_wait_at_the_cost_of_others(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "app", lambda **_: None)
    cli.main()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_module_that_was_not_built_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(prog_name: str) -> None:
        raise ModuleNotFoundError("No module named 'greedysnake._native'", name="greedysnake._native")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    assert "make build" in capsys.readouterr().err


def run_into(command: str, stdout: IO[str] | int, unbuffered: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "greedysnake", command],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["version", "schedule", "doctor"])
def test_output_to_a_full_drive_is_one_sentence(command: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = run_into(command, full, unbuffered)
    assert done.returncode == 2
    assert re.fullmatch("greedysnake: what is printed finds no room on its drive: .*\n", done.stderr)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["version", "schedule", "doctor"])
def test_output_that_nobody_reads_ends_quietly(command: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run_into(command, writer, unbuffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_refused_directory_gives_no_traceback(tmp_path: Path) -> None:
    done = run("selfcheck", str(tmp_path / "missing"))
    assert done.returncode == 2
    assert done.stderr.startswith("greedysnake: ") and len(done.stderr.splitlines()) == 1
    assert "Traceback" in run("selfcheck", str(tmp_path / "missing"), GREEDYSNAKE_DEBUG="1").stderr


def test_doctor_without_directories_looks_at_the_machine_alone() -> None:
    done = run("doctor")
    assert done.returncode == 0 and done.stderr == ""
    for word in ("RAM", "io_uring", "kernel", "locked memory", "No directory was examined"):
        assert word in done.stdout


def test_doctor_prints_every_problem_with_its_fix() -> None:
    problems = (Problem("error", "a", "the drive is [red]", "buy one"), Problem("warning", "b", "slow", "wait"))
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(doctor_text(Diagnosis(HEALTHY_HOST, (HEALTHY_DRIVE,), problems)))
    text = console.export_text()
    for part in ("error: the drive is [red]", "fix: buy one", "warning: slow", "fix: wait", "could not work"):
        assert part in text
    assert "takes 8.67 s (26 bytes of each) per billion parameters" in text


def test_selfcheck_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    console = Console(width=300, file=io.StringIO(), record=True)
    assert selfcheck.run_checks(console, tmp_path)
    text = console.export_text()
    assert "all ok" in text and "failed" not in text
    assert len(re.findall(r" ok +\d+\.\d s ", text)) >= 5
    assert list(tmp_path.iterdir()) == []


def test_selfcheck_says_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "train_plainly", lambda modules: [1.0] * selfcheck.NUM_STEPS)
    console = Console(width=300, file=io.StringIO(), record=True)
    assert not selfcheck.run_checks(console, tmp_path)
    assert re.search(r"training from SSD +failed .*differ from plain PyTorch", console.export_text())


def test_schedule_is_printed_for_the_values_given() -> None:
    done = CliRunner().invoke(cli.app, ["schedule", "--blocks", "3", "--micro-batches", "2", "--kind", "horizontal"])
    assert done.exit_code == 0
    assert done.stdout.rstrip() == schedule_text(blocks=3, micro_batches=2, kind="horizontal").rstrip()


def test_a_schedule_that_cannot_be_is_one_sentence() -> None:
    done = run("schedule", "--blocks", "1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
