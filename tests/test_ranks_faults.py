"""Ranks that fail, are killed, or are told different things: the others do not wait, and no checkpoint is lost."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import greedysnake as gs
import together
from greedysnake.errors import GreedySnakeError
from greedysnake.runtime.context import StepContext
from greedysnake.runtime.directory import EXTENTS, MANIFEST, StoreDirectory
from greedysnake.runtime.store import Store
from greedysnake.runtime.updates import Updates
from reference import make_batches, make_engine, make_parts

pytestmark = pytest.mark.usefixtures("one_thread")

Answers = list[dict[str, Any]]


def batches(step: int, num_each: int = 2) -> list[dict[str, torch.Tensor]]:
    rank = dist.get_rank()
    return make_batches(num_each * dist.get_world_size(), step)[num_each * rank : num_each * (rank + 1)]


def call(num_ranks: int, function: str, *arguments: object) -> Any:
    return together.call(num_ranks, "test_ranks_faults", function, *arguments)


def sentence_of(action: Any) -> str:
    try:
        action()
    except GreedySnakeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def weights_of(engine: gs.Engine) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in engine.named_parameters()}


def try_engine(directory: Path, **options: Any) -> None:
    make_engine(make_parts(), directory, **options).close()


# Mistakes


def make_mistakes(directory: str) -> dict[str, str]:
    """What this rank is told for each; the engine goes on after those that change nothing."""
    is_first = dist.get_rank() == 0
    told = {}
    with make_engine(make_parts(), Path(directory) / "store", max_grad_norm=1.0) as engine:
        engine.step(batches(0))
        told["batch"] = sentence_of(lambda: engine.step(batches(1) if is_first else ["no batch"]))
        told["no batch"] = sentence_of(lambda: engine.step([] if is_first else batches(1)))
        too_long = [{name: value.repeat(4000, 1) for name, value in batch.items()} for batch in batches(1)]
        told["no room"] = sentence_of(lambda: engine.step(batches(1) if is_first else too_long))
        told["rate"] = sentence_of(lambda: engine.step(batches(1), lr=0.1 if is_first else 0.2))
        told["lr"] = sentence_of(lambda: engine.step(batches(1), lr=0.1 if is_first else -1.0))
        told["call"] = sentence_of((lambda: engine.step(batches(1))) if is_first else (lambda: engine.save()))
        told["goes on"] = str(engine.step(batches(1)).loss)
        engine.save({"rank": dist.get_rank()})
        told["metadata"] = str(engine.metadata)
    for name, options in (("alpha", {"alpha": 0.1}), ("schedule", {"schedule": "horizontal"}), ("seed", {"seed": 1})):
        given: dict[str, Any] = {} if is_first else options
        told[name] = sentence_of(partial(try_engine, Path(directory) / name, **given))
    told["argument"] = sentence_of(
        partial(try_engine, Path(directory) / "argument", chunk_params=2048 if is_first else -1)
    )
    (Path(directory) / "foreign").mkdir(exist_ok=True)
    (Path(directory) / "foreign" / "thesis.tex").touch()
    told["foreign"] = sentence_of(partial(try_engine, Path(directory) / "foreign"))
    with make_engine(make_parts(), Path(directory) / "uneven", schedule="horizontal") as engine:
        told["uneven"] = sentence_of(lambda: engine.step(batches(1, 2)[: 2 if is_first else 1]))
        told["uneven evaluation"] = sentence_of(lambda: engine.evaluate(batches(1, 2)[: 2 if is_first else 1]))
        told["even"] = str(engine.step(batches(1)).skipped)
    told["values"] = sentence_of(
        lambda: make_engine(make_parts(seed=dist.get_rank()), Path(directory) / "values").close()
    )
    told["storage"] = sentence_of(
        lambda: make_engine(make_parts(), Path(directory) / "storage" if is_first else Path("/dev/null/x")).close()
    )
    return told


def test_a_mistake_on_one_rank_is_a_sentence_on_all_and_training_goes_on(tmp_path: Path) -> None:
    first, second = call(2, "make_mistakes", str(tmp_path))
    assert first["batch"].startswith("RankError: rank 1 failed: ") and "RankError" not in second["batch"]
    assert first["no batch"] == "ConfigError: a step needs at least one micro-batch"
    assert second["no batch"] == f"RankError: rank 0 failed: {first['no batch']}"
    assert "PlanError" in first["no room"] and "PlanError" in second["no room"]  # both make room for the largest
    assert first["rate"] == second["rate"] and "0.1, 0.2" in first["rate"]
    assert first["lr"] == f"RankError: rank 1 failed: {second['lr']}" and "lr is -1.0" in second["lr"]
    assert (
        "chunk_params is -1" in second["argument"] and "rank 1 failed: ConfigError: chunk_params" in first["argument"]
    )
    assert "thesis.tex" in first["foreign"] and "thesis.tex" in second["foreign"]
    for name in ("uneven", "uneven evaluation"):
        assert first[name] == second[name] and "have 2, 1 micro-batches: the horizontal schedule" in first[name]
    assert first["even"] == "False"
    assert "rank 0 is in step() and rank 1 in save()" in first["call"]
    assert "rank 1 is in save() and rank 0 in step()" in second["call"]
    assert first["goes on"] == second["goes on"] != ""
    assert first["metadata"] == second["metadata"] == "{'rank': 0}"
    assert first["alpha"] == second["alpha"] == ""  # a rank's own affair
    for name in ("schedule", "seed"):
        assert first[name] == second[name] and f"{name} is" in first[name] and "give all ranks the same" in first[name]
    assert "has other values on rank 1 than on rank 0" in first["values"]
    assert first["storage"].startswith("RankError: rank 1 failed: StorageError: ")
    assert second["storage"].startswith("StorageError: ")


def resume_alone(directory: str) -> str:
    return sentence_of(lambda: make_engine(make_parts(), Path(directory), resume=True).close())


def save_one_step(directory: str) -> None:
    with make_engine(make_parts(), Path(directory)) as engine:
        engine.step(batches(0))
        engine.save()


def test_another_number_of_ranks_is_refused_with_both(tmp_path: Path) -> None:
    call(2, "save_one_step", str(tmp_path))
    found = call(3, "resume_alone", str(tmp_path))
    assert all("holds what 2 processes stored, and this run has 3 processes" in told for told in found)
    with pytest.raises(gs.StorageError, match=r"holds what 2 processes stored, and this run has 1 process: start 2"):
        make_engine(make_parts(), tmp_path, overwrite=True)


# Failures


def fail_in_an_update(directory: str, failing: int) -> tuple[str, float]:
    """The second step of one rank fails in the middle; what is told, and after how long."""
    with make_engine(make_parts(), Path(directory)) as engine:
        engine.step(batches(0))
        if dist.get_rank() == failing:
            Updates._adamw = _raise  # type: ignore[method-assign]
        start_s = time.monotonic()
        told = sentence_of(lambda: [engine.step(batches(step)) for step in range(1, 9)])
        return told, time.monotonic() - start_s


def _raise(*_: object) -> int:
    raise gs.StorageError("the drive is gone")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_in_a_step_ends_the_others(failing: int, tmp_path: Path) -> None:
    answers = call(2, "fail_in_an_update", str(tmp_path), failing)
    assert "the drive is gone" in answers[failing][0]
    told, waited_s = answers[1 - failing]
    assert "RankError" in told and "another rank ended" in told
    assert waited_s < 60  # torch's own patience is half an hour


class HandlerError(Exception):
    """What a signal handler of the user raises."""


def interrupt_one(directory: str) -> list[str]:
    """The first rank is interrupted right after it has told the others of its step; then each goes its own way."""
    told = []
    with make_engine(make_parts(), Path(directory)) as engine:
        engine.step(batches(0))
        if dist.get_rank() == 0:
            StepContext.agree = _interrupt(StepContext.agree)  # type: ignore[method-assign, assignment]
        for call in (lambda: engine.step(batches(1)), engine.save):
            try:
                told.append(sentence_of(call))
            except HandlerError:
                told.append("interrupted")
    return told


def _interrupt(method: Any) -> Any:
    def interrupted(*arguments: Any, **options: Any) -> None:
        method(*arguments, **options)
        raise HandlerError

    return interrupted


def test_an_interrupt_that_the_caller_survives_closes_the_engine_on_all_ranks(tmp_path: Path) -> None:
    first, second = call(2, "interrupt_one", str(tmp_path))
    assert first[0] == "interrupted" and "the engine is closed (HandlerError)" in first[1]
    assert "another rank ended" in second[0] and "the engine is closed" in second[1]


def read_what_is_damaged(directory: str) -> list[str]:
    with make_engine(make_parts(), Path(directory)) as engine:
        engine.step(batches(0))
        engine.save()
        if dist.get_rank() == 1:
            file = Path(directory, "rank-1-of-2", EXTENTS)
            file.write_bytes(b"x" * file.stat().st_size)
        dist.barrier()
        return [sentence_of(lambda: dict(engine.named_parameters())), sentence_of(lambda: list(engine.named_moments()))]


def test_what_one_rank_cannot_read_is_a_sentence_on_all(tmp_path: Path) -> None:
    first, second = call(2, "read_what_is_damaged", str(tmp_path))
    for here, there in zip(first, second, strict=True):
        assert there.startswith("StorageError") and "CRC32C" in there and here == f"RankError: rank 1 failed: {there}"


def step_horizontally(directory: str) -> bool:
    parts = make_parts(num_layers=1, hidden=8, width=8)
    with make_engine(parts, Path(directory), schedule="horizontal") as engine:
        return engine.step(make_batches(150, 0, uneven=False, length=2)).skipped


def test_many_micro_batches_of_a_horizontal_step_are_still_finite(tmp_path: Path) -> None:
    assert call(2, "step_horizontally", str(tmp_path)) == [False, False]


def train_until_killed(directory: str, signs: str) -> str:
    with make_engine(make_parts(), Path(directory), alpha=0.5) as engine:
        for step in range(10_000):
            told = sentence_of(lambda step=step: engine.step(batches(step)))  # type: ignore[misc]
            if told:
                return told
            if step == 3:
                Path(signs, str(dist.get_rank())).touch()
    return ""


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    signs = tmp_path / "signs"
    signs.mkdir()
    arguments = (3, "test_ranks_faults", "train_until_killed", str(tmp_path / "store"), str(signs))
    with together.started(*arguments) as processes:
        while len(list(signs.iterdir())) < 3:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        processes[1].kill()
        for rank in (0, 2):
            output, errors = processes[rank].communicate(timeout=60)
            assert processes[rank].returncode == 0 and "another rank ended" in output, errors


# Checkpoints: all ranks or none

POINTS = ("before it is ready", "when it is ready", "before it is in place", "when it is in place")


def save_and_die(directory: str, dying: int, point: str, num_before: int) -> None:
    """Saves after `num_before` steps, then one rank dies within the next checkpoint, at some point of it."""
    with make_engine(make_parts(), Path(directory), alpha=0.5, max_grad_norm=1.0) as engine:
        for step in range(num_before):
            engine.step(batches(step))
        if num_before:
            engine.save({"step": num_before})
        engine.step(batches(num_before))
        engine.step(batches(num_before + 1))
        if dist.get_rank() == dying:
            _die_at(point)
        sentence_of(engine.save)
        os._exit(0)


def _die_at(point: str) -> None:
    stage, rename = StoreDirectory.stage, StoreDirectory.rename

    def dying_stage(self: StoreDirectory, name: str, data: bytes) -> None:
        if point == POINTS[0]:
            os._exit(0)
        stage(self, name, data)
        if point == POINTS[1]:
            os._exit(0)

    def dying_rename(self: StoreDirectory, old: str, new: str) -> None:
        assert new == MANIFEST
        if point == POINTS[2]:
            os._exit(0)
        rename(self, old, new)
        os._exit(0)

    StoreDirectory.stage, StoreDirectory.rename = dying_stage, dying_rename  # type: ignore[method-assign]


def go_on(directory: str, num_steps: int) -> dict[str, Any]:
    parts, store = make_parts(), Path(directory)
    told: dict[str, Any] = {}

    def resumed() -> None:
        with make_engine(parts, store, resume=True, alpha=0.5, max_grad_norm=1.0) as engine:
            told["first"] = engine.num_steps
            for step in range(engine.num_steps, num_steps):
                engine.step(batches(step))
            told["weights"] = weights_of(engine)

    told["sentence"] = sentence_of(resumed)
    return told


def train_quietly(directory: str, num_steps: int) -> dict[str, Any]:
    with make_engine(make_parts(), Path(directory), alpha=0.5, max_grad_norm=1.0) as engine:
        for step in range(num_steps):
            engine.step(batches(step))
        return weights_of(engine)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    wanted: dict[str, Any] = call(2, "train_quietly", str(tmp_path_factory.mktemp("quiet") / "store"), 6)[0]
    return wanted


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_a_checkpoint_is_on_all_ranks_or_on_none_wherever_one_dies(
    point: str, dying: int, quiet: dict[str, Any], tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    with together.started(2, "test_ranks_faults", "save_and_die", store, dying, point, 2) as processes:
        for process in processes:
            process.communicate(timeout=100)
    for told in call(2, "go_on", store, 6):
        assert (told["sentence"], told["weights"]) == ("", quiet)
        # Once one has it in place, so have all.
        assert told["first"] == (4 if point == "when it is in place" else told["first"])
        assert told["first"] in ((2,) if point.startswith("before it is ready") else (2, 4))


def interrupt_a_save(directory: str) -> list[str]:
    """A handler's exception comes to the first rank when all have their manifest ready, and its caller trains on."""
    told = []
    with make_engine(make_parts(), Path(directory), alpha=0.0, max_grad_norm=1.0) as engine:
        for step in range(2):
            engine.step(batches(step))
        engine.save()
        engine.step(batches(2))
        if dist.get_rank() == 0:
            Store._meet = _interrupt(Store._meet)  # type: ignore[method-assign]
        for call in (engine.save, lambda: engine.step(batches(3)), lambda: engine.step(batches(4))):
            try:
                told.append(sentence_of(call))
            except HandlerError:
                told.append("interrupted")
    return told


def test_an_interrupt_between_ready_and_in_place_costs_no_checkpoint(quiet: dict[str, Any], tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    first, second = call(2, "interrupt_a_save", store)
    assert first[0] == "interrupted" and all(first[1:]) and all(second)
    for told in call(2, "go_on", store, 6):
        assert (told["sentence"], told["first"], told["weights"]) == ("", 3, quiet)


def save_twice_and_die(directory: str) -> None:
    with make_engine(make_parts(), Path(directory), alpha=0.5, max_grad_norm=1.0) as engine:
        engine.step(batches(0))
        engine.save({"is": "first"})
        if dist.get_rank() == 0:
            _die_at(POINTS[2])
        sentence_of(lambda: engine.save({"is": "second"}))
        os._exit(0)


def metadata_of(directory: str) -> dict[str, Any]:
    with make_engine(make_parts(), Path(directory), resume=True, max_grad_norm=1.0) as engine:
        return dict(engine.metadata)


def test_of_two_checkpoints_of_one_step_all_ranks_have_the_same(tmp_path: Path) -> None:
    with together.started(2, "test_ranks_faults", "save_twice_and_die", str(tmp_path)) as processes:
        for process in processes:
            process.communicate(timeout=100)
    assert call(2, "metadata_of", str(tmp_path)) == [{"is": "second"}] * 2


def test_the_parts_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    for name in ("one", "other"):
        call(2, "save_one_step", str(tmp_path / name))
    shutil.rmtree(tmp_path / "one" / "rank-1-of-2")
    shutil.copytree(tmp_path / "other" / "rank-1-of-2", tmp_path / "one" / "rank-1-of-2")
    for told in call(2, "resume_alone", str(tmp_path / "one")):
        assert "the ranks have no checkpoint in common" in told


def test_the_first_checkpoint_too(quiet: dict[str, Any], tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with together.started(2, "test_ranks_faults", "save_and_die", store, 1, "before it is in place", 0) as processes:
        for process in processes:
            process.communicate(timeout=100)
    here = [(tmp_path / "store" / f"rank-{rank}-of-2" / MANIFEST).exists() for rank in range(2)]
    assert here == [True, False]
    for told in call(2, "go_on", store, 6):
        assert (told["sentence"], told["first"], told["weights"]) == ("", 2, quiet)
