"""The benchmarks of moments in fewer bytes run, and what they say of the kernels is what the documentation says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import rounding  # type: ignore[import-not-found]  # noqa: E402

from training import write_config  # noqa: E402


@pytest.mark.parametrize("name", list(rounding.MODELS))
def test_updates_are_right_on_average(name: str) -> None:
    found = rounding.measure(rounding.MODELS[name], 0.999, 3000)
    assert found["float32"] == (0.0, 1.0)
    for kind, most in (("bfloat16", 0.04), ("int8", 0.2)):
        off, size = found[kind]
        assert 0.0 < off < most
        assert abs(size - 1) < 0.05  # to the nearest, what falls would be three times too small


def test_losses_of_two_kinds_are_compared(tmp_path: Path) -> None:
    config = write_config(tmp_path, max_steps=3, eval_steps=3)
    kinds = ["--moments", "float32", "int8"]
    command = [sys.executable, str(BENCHMARKS / "moments.py"), *kinds, "--seeds", "1", "--", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["float32", "int8"]
    sizes = [float(line.split()[4]) for line in lines[1:3]]
    assert sizes[0] > sizes[1]
    assert lines[-1].startswith("int8: held out ") and "against float32" in lines[-1]


def test_a_training_that_fails_is_told() -> None:
    command = [sys.executable, str(BENCHMARKS / "moments.py"), "--seeds", "1", "--", "training.max_steps=nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "training.max_steps is 'nothing'" in done.stderr


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rounding.parse(["--steps", "10"])
    assert "--steps 10: give 200 or more" in capsys.readouterr().err
