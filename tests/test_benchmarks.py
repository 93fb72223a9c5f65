"""The benchmarks say what failed, hold themselves against a bound that their options cannot lower, and leave nothing
behind."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import overlap  # type: ignore[import-not-found]  # noqa: E402
import step  # type: ignore[import-not-found]  # noqa: E402
import step_drive  # type: ignore[import-not-found]  # noqa: E402
import step_systems  # type: ignore[import-not-found]  # noqa: E402
import step_table  # type: ignore[import-not-found]  # noqa: E402

VOCAB = 256
MODEL = f"--layers 2 --hidden 64 --mlp 128 --heads 4 --kv-heads 2 --vocab {VOCAB} --sequence 32"
TINY = f"--device cpu {MODEL} --micro-batch 1 --micro-batches 2 --ram 256MiB --chunk-params 16384".split()
IN_RAM = ["--placement", "weights_ram=1", "optimizer_ram=1"]
DRIVE = ["--drive-bytes", "32MiB", "--drive-seconds", "0.2"]


def options_of(*arguments: str) -> argparse.Namespace:
    options: argparse.Namespace = step.parse([*TINY, *arguments])
    return options


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, BENCHMARKS / "step.py", *TINY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


# Whole runs


def test_a_failed_system_is_said_in_one_sentence_and_the_others_are_measured() -> None:
    process = start("--systems", "pytorch", "zero-offload", "greedysnake", "--steps", "2", "--json", *IN_RAM)
    output, errors = process.communicate()
    assert process.returncode == 1, errors
    found = json.loads(output)
    assert found["options"]["layers"] == 2 and found["num_params"] == step_systems.count_params(options_of())
    for name in ("pytorch", "greedysnake"):
        assert [line.split(",")[0] for line in errors.splitlines() if line.startswith(f"{name}: ")] == [
            f"{name}: step 1 of 2",
            f"{name}: step 2 of 2",
        ]
    torch_row, zero_row, our_row = found["rows"]
    if importlib.util.find_spec("deepspeed") is None:
        assert zero_row["failed"] == "deepspeed is not installed: pip install deepspeed"
        assert zero_row["failed"] in errors
        assert "Traceback" not in errors
    for row in (torch_row, our_row):
        # Random tokens and small random weights: every token is as likely as any other.
        assert row["losses"][0] == pytest.approx(math.log(VOCAB), abs=0.2)
        assert row["losses"][1] < row["losses"][0]
    assert f"{step_systems.count_params(options_of()) / 1e3:.3f} K parameters" in errors
    assert "of SSD before/after" in errors
    (line,) = {line for line in errors.splitlines() if line.startswith("greedysnake ")}
    assert line.split()[-3:] == ["-", "-", "-"], "no drive, no PCIe, no GPU"


def test_a_run_on_a_drive_has_both_fractions_and_leaves_nothing_behind(tmp_path: Path) -> None:
    arguments = ["--storage", str(tmp_path), "--systems", "greedysnake", "--steps", "3", "--json"]
    process = start(*arguments, *DRIVE, "--io", "total_bytes_per_s=5e7")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert not list(tmp_path.iterdir())
    found = json.loads(output)
    (row,) = found["rows"]
    assert found["rate_limits"] == {"total_bytes_per_s": 5e7}
    assert "limited by --io total_bytes_per_s=5e+07, their bound too" in errors
    # What is limited may come in a burst of 5 ms, and a measurement lasts 0.2 s.
    assert max(found["bounds"]["ssd_bytes_per_s"], *row["drive_bytes_per_s"]) < 1.1 * 5e7
    if not row["ssd_write_bytes"]:
        pytest.skip("the kernel counts no bytes of this file system")
    assert row["of_ssd_bound_before"] > 0 and row["of_ssd_bound_after"] > 0
    assert f"{row['of_ssd_bound_before']:.3f}/{row['of_ssd_bound_after']:.3f}" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_process_of_the_system_and_removes_its_files(tmp_path: Path, number: signal.Signals) -> None:
    process = start("--storage", str(tmp_path), *DRIVE, "--drive-seconds", "100")
    while not list(tmp_path.glob("bounds-*/drive")):
        assert process.poll() is None
        time.sleep(0.02)
    (worker,) = [pid for pid in running() if parent_of(pid) == process.pid]
    process.send_signal(number)
    process.communicate(timeout=60)  # less than the drive is measured for
    assert process.returncode == 128 + number
    assert not Path(f"/proc/{worker}").exists()
    assert not list(tmp_path.iterdir())


def test_the_process_of_the_system_ends_with_one_that_was_killed(tmp_path: Path) -> None:
    process = start("--storage", str(tmp_path), *DRIVE, "--drive-seconds", "100")
    while not list(tmp_path.glob("bounds-*/drive")):
        assert process.poll() is None
        time.sleep(0.02)
    (worker,) = [pid for pid in running() if parent_of(pid) == process.pid]
    process.kill()
    process.wait()
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{worker}/cmdline").exists() and Path(f"/proc/{worker}/cmdline").read_bytes():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.communicate()


def running() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def test_a_closed_pipe_ends_it_without_a_traceback() -> None:
    process = start("--systems", "pytorch", "--steps", "1", "--json")
    assert process.stdout and process.stderr
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait() == 128 + signal.SIGPIPE
    assert "Traceback" not in errors and "BrokenPipe" not in errors


def test_a_process_over_its_ram_cap_says_so() -> None:
    process = start("--systems", "greedysnake", "--no-bounds", "--ram-cap", "100MB", *IN_RAM)
    output, errors = process.communicate()
    assert process.returncode == 1, errors
    assert "greedysnake          failed: the process passed its RAM cap of 100000000 bytes" in output


def test_the_files_of_a_process_that_just_ended_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(name: str, arguments: list[str], folders: list[str]) -> dict[str, Any]:
        Path(folders[0]).mkdir()
        (Path(folders[0]) / "drive").touch()
        return {"failed": step.ending_of(3)}

    monkeypatch.setattr(step, "run_worker", leave)
    assert "failed" in step.run_system("bounds", [], options_of("--storage", str(tmp_path)))
    assert not list(tmp_path.iterdir())


# Time


def test_what_happens_between_two_steps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drives go on in between, so it would be time that they get for nothing."""
    figures_of = step_systems.figures_of

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return figures_of(*arguments)

    monkeypatch.setattr(step_systems, "figures_of", slowly)
    monkeypatch.setattr(step_systems.gc, "freeze", lambda: None)
    spans = step_systems.run_greedysnake(options_of(*IN_RAM, "--steps", "3"))["steps_s"]
    assert min(spans[1:]) > 0.5


def test_with_alternate_a_timeline_is_that_of_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its start to the end of its flush, without the drive's measurement before it."""
    monkeypatch.setattr(step_systems.gc, "freeze", lambda: None)
    trace = tmp_path / "trace.json"
    given = ["--alternate", "--drive-seconds", "1", "--trace", str(trace), "--steps", "2", "--storage", str(tmp_path)]
    given += ["--no-compress-moments"]
    result = step_systems.run_greedysnake(options_of(*given))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    start_us, end_us = (f(e["ts"] + d * e["dur"] for e in events) for f, d in ((min, 0), (max, 1)))
    assert end_us - start_us < 1e6 * result["steps_s"][1]
    written = sum(event["args"]["bytes"] for event in events if event["cat"] == "ssd_write")
    assert written >= 12 * step_systems.count_params(options_of()), "all of the state: the flush is part of it"


def test_with_a_timeline_the_simulator_says_what_such_a_step_should_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least what its bytes need at the rate that the drive is held at."""
    monkeypatch.setattr(step_systems.gc, "freeze", lambda: None)
    held = 4e6
    given = ["--steps", "2", "--storage", str(tmp_path), "--no-bounds", "--no-compress-moments"]
    given += ["--io", f"total_bytes_per_s={held}"]
    result = step_systems.run_greedysnake(options_of(*given, "--trace", str(tmp_path / "trace.json")))
    assert result["simulated_s"] >= 24 * step_systems.count_params(options_of()) / held
    assert step_systems.run_greedysnake(options_of(*IN_RAM, "--steps", "2"))["simulated_s"] is None


# Failures


def test_failed_bounds_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = {"steps_s": [2.0, 1.0], "losses": [5.5, 5.4], "peak_rss_bytes": 1}
    results = {"bounds": {"failed": "OSError: no space"}, "pytorch": done}
    monkeypatch.setattr(step, "run_system", lambda name, *_: results[name])
    assert step.main([*TINY, "--systems", "pytorch"]) == 1
    assert "bounds before: failed: OSError: no space" in capsys.readouterr().out
    results["bounds"] = {}
    assert step.main([*TINY, "--systems", "pytorch"]) == 0


def test_an_error_becomes_one_sentence(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(options: argparse.Namespace) -> None:
        raise RuntimeError("it broke\nand more")

    monkeypatch.setattr(step, "measure", fail)
    step.work(options_of())
    output, errors = capfd.readouterr()
    assert json.loads(output.strip().removeprefix("RESULT ")) == {"failed": "RuntimeError: it broke"}
    assert "Traceback" in errors, "nobody expected this one"


def test_a_full_drive_is_no_surprise(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(options: argparse.Namespace) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/drive")

    monkeypatch.setattr(step, "measure", fail)
    step.work(options_of())
    output, errors = capfd.readouterr()
    assert "No space left on device: '/drive'" in output
    assert "Traceback" not in errors


def test_no_cuda_device_is_said(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    step.work(options_of("--device", "cuda:0", "--worker", "pytorch"))
    output, errors = capfd.readouterr()
    assert "--device is cuda:0 and torch finds no CUDA device: use --device cpu" in output
    assert "Traceback" not in errors


def test_the_signal_that_ended_a_process_is_named() -> None:
    assert "SIGKILL, as the kernel does when memory runs out" in step.ending_of(-9)
    assert "exit code 7" in step.ending_of(7)


# Figures


RESULT: dict[str, Any] = {
    "steps_s": [9.0, 1.0, 4.0, 2.0, 3.0],
    "losses": [1.0] * 5,
    "peak_rss_bytes": 1,
    "per_step": [
        {"ssd_read_bytes": 100 * i, "ssd_write_bytes": 0, "h2d_bytes": 10 * i, "d2h_bytes": 0} for i in range(5)
    ],
}


def test_all_figures_of_a_row_are_those_of_the_step_in_the_middle() -> None:
    row = step_table.summarise(
        "greedysnake", {**RESULT, "drive_bytes_per_s": [200.0]}, options_of(), {"ssd_bytes_per_s": 400.0}
    )
    assert (row["step"], row["step_s"]) == (4, 3.0)  # four are counted; of the two in the middle the slower
    assert row["tokens_per_s"] == 64 / 3.0
    assert row["ssd_read_bytes"] == 400
    assert row["of_ssd_bound_before"] == pytest.approx(400 / 400.0 / 3.0)
    assert row["of_ssd_bound_after"] == row["of_ssd_bound"] == pytest.approx(400 / 200.0 / 3.0)


def test_26_bytes_per_parameter_are_a_bound_only_where_all_state_is_on_ssd() -> None:
    result = {**RESULT, "drive_bytes_per_s": [200.0]}
    row = step_table.summarise("greedysnake", result, options_of(), {})
    assert row["of_26_bytes_per_param"] == pytest.approx(26 * step_systems.count_params(options_of()) / 200.0 / 3.0)
    row = step_table.summarise("greedysnake", result, options_of("--placement", "weights_ram=0.1"), {})
    assert "of_ssd_bound" in row and "of_26_bytes_per_param" not in row


def test_with_alternate_the_drives_around_the_step_speak(tmp_path: Path) -> None:
    options = options_of("--alternate", "--storage", str(tmp_path))
    rates = [1e9, 1e9, 1e9, 100.0, 300.0]
    row = step_table.summarise("greedysnake", {**RESULT, "drive_bytes_per_s": rates}, options, {"ssd_bytes_per_s": 1e9})
    assert row["of_ssd_bound_before"] == pytest.approx(400 / 100.0 / 3.0)
    assert row["of_ssd_bound_after"] == pytest.approx(400 / 300.0 / 3.0)
    assert row["of_ssd_bound"] == pytest.approx(400 / 200.0 / 3.0)


def test_fractions_of_pcie_and_compute() -> None:
    layer = {"layer_forward_s": 0.1, "layer_backward_s": 0.3, "layer_lean_backward_s": 0.25}
    bounds = {"pcie_bytes_per_s": 100.0, **layer}
    row = step_table.summarise("greedysnake", RESULT, options_of(), bounds)
    assert row["of_pcie_bound"] == pytest.approx(40 / 100.0 / 3.0)
    assert row["of_compute_bound"] == pytest.approx(2 * 2 * 0.35 / 3.0)  # two layers, two micro-batches
    kept = step_table.summarise("greedysnake", RESULT, options_of("--placement", "graphs_device=0.5"), bounds)
    assert kept["of_compute_bound"] == pytest.approx(2 * (0.35 + 0.3) / 3.0)
    recomputing = step_table.summarise("pytorch", RESULT, options_of(), bounds)
    assert recomputing["of_compute_bound"] == pytest.approx(2 * 2 * 0.4 / 3.0)
    peer = step_table.summarise("pytorch-no-recompute", RESULT, options_of(), bounds)
    assert peer["of_compute_bound"] == pytest.approx(2 * 2 * 0.3 / 3.0)


def test_more_than_the_bound_gives_a_warning() -> None:
    row = {"system": "greedysnake", "of_ssd_bound_before": 1.01, "of_ssd_bound_after": 1.03}
    (warning,) = step_table.warnings_of(row)
    assert "1.030 of the SSD bound measured after" in warning


def test_the_bound_is_measured_with_its_own_settings_and_the_rate_limit() -> None:
    options = options_of("--io", "queue_depth=1", "num_threads=1", "piece_bytes=4096", "read_bytes_per_s=1e9")
    assert step_drive.bound_io(options) == {**step_drive.BOUND_IO, "read_bytes_per_s": 1e9}


@pytest.mark.parametrize("number", [1, 7, 40, 77, 1001, 7 * 11 * 13 * 17])
def test_the_drive_is_measured_in_every_place(number: int) -> None:
    stride = step_drive.stride_over(number)
    assert stride > 1 and len({turn * stride % number for turn in range(number)}) == number


def test_nothing_written_is_no_bandwidth(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert step_drive.mixed_bandwidth(options_of(), [tmp_path / "empty"], 0.1) == 0.0


@pytest.mark.parametrize(("number", "text"), [(2.5e9, "2.500 B"), (3e6, "3.000 M"), (4200, "4.200 K"), (7, "7")])
def test_a_count_is_readable_however_small(number: float, text: str) -> None:
    assert step_table.format_count(number) == text


def test_json_has_no_nan() -> None:
    assert json.dumps(step_table.without_nan({"losses": [math.nan, 1.0]})) == '{"losses": [null, 1.0]}'


def test_every_system_takes_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (step_systems.token_batches(options_of()) for _ in range(2))
    assert len(first) == 2 and not first[0].equal(first[1])
    assert all(one.equal(other) for one, other in zip(first, again, strict=True))

    def taken(options: argparse.Namespace) -> None:
        raise InterruptedError

    monkeypatch.setattr(step_systems, "token_batches", taken)
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    for run in (
        step_systems.run_greedysnake,
        step_systems.run_pytorch,
        lambda options: step_systems.run_deepspeed(options, nvme=False),
    ):
        with pytest.raises(InterruptedError):
            run(options_of())


# Options


WRONG = [
    ("--heads 0", "--heads: '0' given"),
    ("--layers 0", "--layers: '0' given"),
    ("--steps 0", "--steps: '0' given"),
    ("--steps 1.5", "--steps: '1.5' given: give a whole number"),
    ("--threads 0", "--threads: '0' given"),
    ("--threads -1", "--threads: '-1' given"),
    ("--sequence 1", "no next token"),
    ("--hidden 65", "--hidden 65 with --heads 4: give a multiple of 8"),
    ("--hidden 12", "--hidden 12 with --heads 4"),
    ("--kv-heads 3", "--kv-heads 3 with --heads 4"),
    ("--placement foo", "'foo' given: give NAME=VALUE, where NAME is one of weights_ram, "),
    ("--placement foo=1", "'foo=1' given"),
    ("--placement weights_ram=x", "weights_ram is a number"),
    ("--placement weights_ram=2", "give a fraction between 0 and 1"),
    ("--slots bar=3", "'bar=3' given: give NAME=VALUE, where NAME is one of weights, "),
    ("--slots updates=1.5", "updates is a whole number"),
    ("--slots updates=0", "at least one buffer"),
    ("--io foo=1", "'foo=1' given: give NAME=VALUE, where NAME is one of backend, "),
    ("--io queue_depth=x", "queue_depth is a whole number"),
    ("--io queue_depth=0", "use 1 to 4096"),
    ("--io total_bytes_per_s=-1", "use a positive number"),
    ("--io backend=tape", "tape"),
    ("--device gpu", "--device: 'gpu' given: give cpu, cuda or cuda:N"),
    ("--alternate --steps 1 --storage .", "--alternate with --steps 1"),
    ("--alternate", "--alternate without --storage"),
    ("--systems zero-infinity", "zero-infinity without --storage"),
    ("--trace /no/such/folder/trace.json", "--trace /no/such/folder/trace.json: give a file in a folder that exists"),
    ("--vram-cap 8GiB", "--vram-cap 8GiB with --device cpu"),
    ("--vram-cap much --device cuda", "--vram-cap: 'much' given"),
    ("--ram-cap much", "--ram-cap: 'much' given"),
    ("--ram 0", "--ram: '0' given"),
    ("--drive-seconds 0", "--drive-seconds: '0' given"),
    ("--drive-seconds -1", "--drive-seconds: '-1' given"),
    ("--alpha 2", "--alpha: '2' given"),
    ("--clip nan", "--clip: 'nan' given"),
    ("--optimistic", "--optimistic without --clip"),
    ("--optimistic --clip 1 --schedule horizontal", "--optimistic with --schedule horizontal"),
    ("--storage drive ./drive", "--storage drive ./drive has a directory twice"),
    ("--schedule diagonal", "diagonal"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_a_wrong_option_is_refused_in_one_sentence(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options_of(*arguments.split())
    assert stopped.value.code == 2
    output, errors = capsys.readouterr()
    assert words in errors and errors.count("\n") == 1 and not output


def test_right_options_are_taken(tmp_path: Path) -> None:
    options = options_of(
        *("--io", "total_bytes_per_s=1e9", "backend=threads", "queue_depth=4"),
        *("--slots", "updates=3", "--placement", "weights_ram=0.5", "--clip", "inf", "--device", "cuda:0"),
        *("--vram-cap", "8GiB", "--trace", str(tmp_path / "trace.json")),
    )
    assert step.on_cuda(options)
    assert step.rate_limits(options) == {"total_bytes_per_s": 1e9}


def test_the_commands_in_the_docs_are_taken() -> None:
    text = "".join(path.read_text() for path in (BENCHMARKS.parent / "docs").glob("*.md")).replace("\\\n", " ")
    commands = re.findall(r"^    .*python benchmarks/step.py (.*)$", text, re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        assert step.parse(command.replace(" ...", "").split()).systems


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--steps 0", "--steps: '0' given"),
        ("--layers 0", "--layers: '0' given"),
        ("--rate 0", "--rate: '0' given"),
        ("--chunks 0", "--chunks: '0' given"),
        ("--chunks 7", "--chunks 7 with --params 65536"),
        ("--directory /no/such/folder", "--directory /no/such/folder is no directory"),
    ],
)
def test_a_wrong_option_of_overlap_is_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        overlap.parse(arguments.split())
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
