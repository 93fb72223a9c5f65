"""The benchmark of several ranks runs, and refuses what cannot be dealt out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import ranks  # type: ignore[import-not-found]  # noqa: E402

TINY = ["--steps", "1", "--layers", "2", "--params", "16384", "--chunks", "4", "--micro-batches", "2", "--rate", "2e7"]


def test_it_measures_every_kind_of_step_with_one_rank_and_with_two(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "ranks.py"), *TINY, "--ranks", "1", "2", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [(line[0], line[1]) for line in lines[1:]] == [(name, count) for name in ranks.SHARES for count in "12"]
    assert all(float(value) > 0 for line in lines[1:] for value in line[2:])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--ranks 3", "--ranks 3: give numbers that divide"),
        ("--chunks 7", "--chunks 7 with --params"),
        ("--directory nowhere", "is no directory"),
    ],
)
def test_a_wrong_option_is_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ranks.parse(arguments.split())
    assert words in capsys.readouterr().err
