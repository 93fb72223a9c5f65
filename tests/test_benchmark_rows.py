"""The rows of docs/performance.md are what benchmarks/rows.py measures, and a full drive is told by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import expect  # type: ignore[import-not-found]  # noqa: E402
import full_drive  # type: ignore[import-not-found]  # noqa: E402
import rows  # type: ignore[import-not-found]  # noqa: E402
import step  # type: ignore[import-not-found]  # noqa: E402

MODEL = "--layers 2 --hidden 64 --mlp 128 --heads 4 --kv-heads 2 --vocab 256 --sequence 32 --chunk-params 16384"
TINY = f"--device cpu {MODEL} --micro-batch 1 --micro-batches 2 --steps 2 --ram 256MiB".split()


def run_rows(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / "rows.py", *arguments, "--", *TINY]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


# What is expected of them


@pytest.mark.parametrize(
    "more",
    [
        "--kv-heads 4 --alpha 0.3",
        "--clip 1.0 --placement weights_ram=0.5 optimizer_ram=0.2 weights_device=1",
        "--clip 1.0 --optimistic --slots updates=9",
    ],
)
def test_the_plan_that_is_expected_is_the_one_that_the_engine_makes(more: str, tmp_path: Path) -> None:
    from step_options import placement_values, slot_values  # type: ignore[import-not-found]
    from step_systems import greedysnake_model  # type: ignore[import-not-found]

    import greedysnake as gs

    options = step.parse([*TINY, "--storage", str(tmp_path), *more.split()])
    with gs.Engine(
        greedysnake_model(options),
        gs.AdamW(lr=1e-4),
        storage=options.storage,
        ram=options.ram,
        alpha=options.alpha,
        max_grad_norm=options.clip,
        optimistic=options.optimistic,
        placement=gs.Placement(**placement_values(options)),
        slots=gs.Slots(**slot_values(options)),
        chunk_params=options.chunk_params,
    ) as engine:
        plan, found = engine.plan, expect.plan_of(options)
    assert (found.homes, found.placement, found.slots, found.clipping) == (
        (plan.homes, plan.placement, plan.slots, plan.clipping)
    )
    assert [(block.chunks, block.pool) for block in found.blocks] == [(b.chunks, b.pool) for b in plan.blocks]


def test_every_run_of_ours_is_expected_to_take_some_time(capsys: pytest.CaptureFixture[str]) -> None:
    expect.main(["--drive", "3e9", "--", *MODEL.split(), "--micro-batches", "2"])
    lines = capsys.readouterr().out.splitlines()[1:]
    ours = [name for row in rows.ROWS.values() for name, words in row.runs.items() if "greedysnake" in words]
    assert [line.split()[0] for line in lines] == ours
    assert all(float(line.split()[3]) > 0 for line in lines)


def test_the_operations_of_a_step_are_those_that_its_speed_is_counted_by() -> None:
    """All but the recompute: 6 per parameter and token, the embedding's not done, and the attention."""
    from step_systems import flops_per_token  # type: ignore[import-not-found]

    options = step.parse([])
    times = expect.times_of(options, 1.0, 1.0)
    layer, head, tokens = times[1], times[-1], options.micro_batch * options.sequence
    without_recompute = options.layers * 3 * layer.forward_s + head.backward_s
    embedding = 6 * options.vocab * options.hidden
    assert without_recompute / tokens == pytest.approx(flops_per_token(options) - embedding, rel=1e-3)


# Rows


def test_every_command_of_the_page_is_one_of_the_runs() -> None:
    text = (BENCHMARKS.parent / "docs" / "performance.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^    python benchmarks/step.py (.*)$", text, re.MULTILINE)
    runs = [rows.arguments_of(run, row) for row in rows.ROWS.values() for run in row.runs]
    measured = [vars(step.parse(arguments)) for arguments in runs]
    assert len(commands) > 5
    for command in commands:
        assert vars(step.parse(command.split())) in measured, command


def test_a_run_has_one_name() -> None:
    names = [run for row in rows.ROWS.values() for run in row.runs]
    assert len(set(names)) == len(names)


def test_rows_are_measured_kept_and_held_against_their_targets(tmp_path: Path) -> None:
    drive, out = tmp_path / "drive", tmp_path / "out"
    done = run_rows("alpha", "8b-peers", "--storage", str(drive), "--out", str(out), "--traces")
    figures = done.stdout.rpartition("\n\n")[2].splitlines()
    assert len(figures) == 4, done.stdout
    ratio = float(re.search(r"of alpha = 0 +([\d.]+) +>= 1.1", figures[0])[1])  # type: ignore[index]
    kept = {name: json.loads((out / f"{name}.json").read_text())["rows"][0] for name in ("alpha", "alpha-0")}
    assert ratio == pytest.approx(kept["alpha-0"]["steps_s"][-1] / kept["alpha"]["steps_s"][-1], rel=1e-3)
    assert figures[0].endswith("met" if ratio >= 1.1 else "MISSED")
    assert done.returncode == int(ratio < 1.1), "peers that cannot train are no failure of ours"
    assert "step.py ended with exit code 2" in figures[1], "--vram-cap needs a GPU"
    assert json.loads((out / "alpha.trace.json").read_text())["traceEvents"]
    assert not list(drive.iterdir())


def measured(tokens_per_s: float, last_s: float = 1.0, **more: Any) -> dict[str, Any]:
    ours = {"system": "greedysnake", "tokens_per_s": tokens_per_s, "steps_s": [9.0, 9.0, last_s], **more}
    peers = [{"system": name, "tokens_per_s": 10.0} for name in ("pytorch", "zero-infinity")]
    return {"rows": [ours, *peers, {"system": "zero-offload", "failed": "no deepspeed"}]}


def test_figures_are_ratios_of_the_right_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows.print_figures("ssd", {"ssd": measured(45.0, of_26_bytes_per_param=0.93)})
    assert re.findall(r"([\d.]+) +>= [\d.]+ met", capsys.readouterr().out) == ["0.93", "4.5"]
    assert not rows.print_figures("clipping", {"clipping": measured(1.0, 4.0), "clipping-0": measured(1.0, 3.0)})
    assert "0.75  >= 0.95 MISSED" in capsys.readouterr().out
    sizes = {"of_ssd_bound_before": 0.8, "of_ssd_bound_after": 0.9, "peak_vram_bytes": 23e9, "peak_rss_bytes": 97e9}
    assert not rows.print_figures("8b", {"8b": measured(4000.0, **sizes)})
    assert re.findall(r"<= [\w.+]+ (\w+)", capsys.readouterr().out) == ["met", "MISSED"]


def test_a_figure_without_its_system_is_said_to_have_failed(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"ram": measured(10.0), "ram-clipped": measured(10.0), "ram-graphs": {"failed": "had not ended"}}
    assert not rows.print_figures("ram", runs)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["met", "3", "met", "1.06", "failed"]
    assert ["failed" in line for line in lines] == [False, True, False, True, True]


def test_a_row_for_which_no_time_is_left_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "measure", lambda *_: measured(45.0, of_26_bytes_per_param=0.93))
    monkeypatch.setitem(rows.ROWS, "8b-peers", replace(rows.ROWS["8b-peers"], needs_s=600.0))
    assert rows.main(["ssd", "--storage", "drive", "--minutes", "9.9"]) == 0
    capsys.readouterr()
    assert rows.main(["ssd", "8b-peers", "--storage", "drive", "--minutes", "9.9"]) == 1
    printed = capsys.readouterr().out
    assert "8b-peers: left out: it takes about 600 s, and 594 s of --minutes are left" in printed
    assert printed.count("0.93") == 2, "as soon as it is there, and at the end"
    assert [line.split()[-2:] for line in printed.splitlines()[-3:]] == [["left", "out"]] * 3


def test_a_run_that_takes_too_long_is_ended_and_said() -> None:
    assert rows.finish([sys.executable, "-c", "import time; time.sleep(600)"], 0.2) == {
        "failed": "had not ended after 0 s"
    }
    assert rows.finish([sys.executable, "-c", "raise SystemExit(2)"], 60.0) == {
        "failed": "step.py ended with exit code 2"
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("fast --storage drive", "'fast' is no row: give some of ssd, "),
        ("ssd", "ssd without --storage: give a directory on the drive"),
        ("ram --traces", "--traces without --out"),
        ("ram --limit-s 0", "--limit-s: '0' given"),
        ("ram --minutes soon", "--minutes: 'soon' given"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        rows.parse(arguments.split())
    assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert words in errors and errors.count("\n") == 1


def test_the_list_has_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("python benchmarks/step.py") == sum(len(row.runs) for row in rows.ROWS.values())


# A full drive


@pytest.mark.root
def test_a_write_that_finds_no_room_is_an_error_of_ours(
    mount: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    point = mount(32)
    full_drive.tell("greedysnake", point)
    printed = capsys.readouterr().out
    wanted, there = (int(number.replace(",", "")) for number in re.findall(r"([\d,]{6,}) ", printed)[:2])
    assert there < 32 << 20 < wanted and "ENOSPC" in printed and "free space on that drive" in printed
    assert os.listdir(point) == ["lost+found"]


def test_a_drive_with_much_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_drive, "MOST_FREE", shutil.disk_usage(tmp_path).free // 2)
    with pytest.raises(SystemExit):
        full_drive.parse([str(tmp_path)])
    with pytest.raises(SystemExit):
        full_drive.parse([str(tmp_path / "missing")])
