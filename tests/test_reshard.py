"""A run goes on with another number of processes, and is exported as it is."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from greedysnake import resharding, settings
from test_train_ranks import OPTIONS, TOLERANCE, ended, started, wait_for_lines
from training import Run, everything_in, metrics_of, train, values_in, write_config


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks that was stopped in the middle, and goes on elsewhere."""
    directory = tmp_path_factory.mktemp("stopped")
    with started(write_config(directory, **OPTIONS)) as processes:
        wait_for_lines(directory / "run", 3, processes)
        processes[0].send_signal(signal.SIGTERM)
        assert [code for code, _, _ in ended(processes)] == [0, 0]
    return directory / "run"


def all_but_locks(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in everything_in(folder).items() if not name.endswith(".lock")}


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_of_two_goes_on_as_one_and_as_two_again(stopped: Path, tmp_path: Path, run: Run) -> None:
    reached, before = len(metrics_of(stopped)), all_but_locks(stopped)
    one, two = tmp_path / "one", tmp_path / "two"
    code, output, errors = run("reshard", stopped, one, "--ranks", 1)
    assert (code, errors) == (0, "") and output == f"wrote {one}: it goes on with greedysnake train {one}/run.yaml\n"
    code, output, errors = run("reshard", one, two, "--ranks", 2, "--storage", tmp_path / "drive")
    assert (code, errors) == (0, "") and f"torchrun --nproc-per-node 2 -m greedysnake train {two}/run.yaml" in output
    assert all_but_locks(stopped) == before
    assert sorted(path.name for path in (tmp_path / "drive").iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    exported = [tmp_path / f"model-{number}" for number in range(3)]
    for source, target in zip((stopped, one, two), exported, strict=True):
        code, output, errors = run("export", source, target, "--dtype", "float32")
        assert (code, errors) == (0, "") and f"the model of step {reached}" in output
    assert contents_of(exported[0]) == contents_of(exported[1]) == contents_of(exported[2])
    values = settings.read_yaml((one / "run.yaml").read_text(), "run.yaml")
    assert values["training"]["gradient_accumulation_steps"] == 4
    assert run("train", one / "run.yaml")[0] == 0
    with started(two / "run.yaml") as processes:
        assert [code for code, _, _ in ended(processes)] == [0, 0]
    # All three ways are the training of one process with all micro-batches.
    (tmp_path / "plain").mkdir()
    train(values_in(tmp_path / "plain", **OPTIONS, gradient_accumulation_steps=4))
    wanted = [line["loss"] for line in metrics_of(tmp_path / "plain" / "run")]
    for folder in (one, two):
        assert [line["loss"] for line in metrics_of(folder)] == pytest.approx(wanted, rel=TOLERANCE)


def test_a_run_goes_on_with_moments_in_fewer_bytes_and_in_all_again(stopped: Path, tmp_path: Path, run: Run) -> None:
    before = all_but_locks(stopped)
    few, all_again = tmp_path / "few", tmp_path / "all"
    code, output, errors = run("reshard", stopped, few, "--moments", "int8", "--ranks", 1)
    assert (code, errors) == (0, "") and output == f"wrote {few}: it goes on with greedysnake train {few}/run.yaml\n"
    assert all_but_locks(stopped) == before
    code, output, errors = run("reshard", few, all_again, "--moments", "float32")
    assert (code, errors) == (0, "") and f"greedysnake train {all_again}/run.yaml" in output
    values = settings.read_yaml((few / "run.yaml").read_text(), "run.yaml")
    assert values["training"]["adam_moments"] == "int8"
    exported = [tmp_path / f"model-{number}" for number in range(3)]
    for source, target in zip((stopped, few, all_again), exported, strict=True):
        assert run("export", source, target, "--dtype", "float32")[0] == 0
    assert contents_of(exported[0]) == contents_of(exported[1]) == contents_of(exported[2])
    for folder in (few, all_again):
        assert run("train", folder / "run.yaml")[0] == 0
    # The first loss afterwards is that of weights which are as they were; moments have their part in those that follow.
    (tmp_path / "plain").mkdir()
    train(values_in(tmp_path / "plain", **OPTIONS, gradient_accumulation_steps=4))
    wanted = [line["loss"] for line in metrics_of(tmp_path / "plain" / "run")]
    reached = len(metrics_of(stopped))
    assert reached < len(wanted)
    for folder in (few, all_again):
        losses = [line["loss"] for line in metrics_of(folder)]
        assert losses[: reached + 1] == pytest.approx(wanted[: reached + 1], rel=TOLERANCE)
        assert losses == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "there is nothing to change: give --ranks, --moments or --layers-per-block"),
        (("--moments", "fp8"), "--moments is 'fp8': give one of float32, bfloat16, int8"),
        (("--ranks", "3"), "--ranks is 3, and a step of the run has 4 micro-batches (2 on each of 2): give a number"),
        (("--ranks", "0"), "--ranks is 0: give at least 1"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: tuple[str, ...], sentence: str, stopped: Path, tmp_path: Path, run: Run
) -> None:
    code, _, errors = run("reshard", stopped, tmp_path / "out", *arguments)
    assert code == 2 and sentence in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_was_begun_is_taken_away_when_it_fails(
    stopped: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "out"))

    monkeypatch.setattr(resharding, "note_run", fail)
    code, _, errors = run("reshard", stopped, tmp_path / "out", "--ranks", 1)
    assert code == 2 and "No space left" in errors and not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    code, _, errors = run("reshard", stopped, tmp_path / "full", "--ranks", 1)
    assert code == 2 and "which exists: name a new or empty folder" in errors
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
