"""The engine with odd batches, and used in an unusual order."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import greedysnake as gs
from greedysnake.placement import Home
from greedysnake.runtime import arguments
from greedysnake.runtime.runner import Runner
from greedysnake.runtime.updates import Updates
from reference import (
    OPTIMIZER,
    Batch,
    Head,
    Parts,
    make_batches,
    make_engine,
    make_parts,
    num_targets,
)

IN_RAM = gs.Placement(weights_ram=1, optimizer_ram=1)

pytestmark = pytest.mark.usefixtures("one_thread")


def loss_of(parts: Parts, batches: list[Batch]) -> float:
    total = 0.0
    with torch.no_grad():
        for batch in batches:
            hidden = parts.embed(batch)
            for layer in parts.layers:
                hidden = layer(hidden)
            total += float(parts.head(hidden, batch))
    return total / sum(map(num_targets, batches))


@pytest.mark.parametrize("activations_ram", [0.0, 1.0])
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_evaluation_may_have_more_and_larger_micro_batches_than_training(
    schedule: str, activations_ram: float, tmp_path: Path
) -> None:
    parts = make_parts()
    few, many = make_batches(2, 0), make_batches(9, 1, length=20)
    expected = loss_of(parts, many)
    placement = gs.Placement(activations_ram=activations_ram, gradients_device=0.3)
    with make_engine(parts, tmp_path, schedule=schedule, placement=placement) as engine:
        assert engine.evaluate(many) == pytest.approx(expected, rel=1e-6)
        first = engine.step(few).loss
        engine.evaluate(many)
        assert engine.step(few).loss < first
        assert engine.evaluate(many) != pytest.approx(expected, rel=1e-6)


# Gradients that are not finite


class PoisonedEmbed(nn.Module):
    """The loss is finite, the gradient of the embedding is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(37, 32))

    def forward(self, batch: Batch) -> torch.Tensor:
        weight = self.weight.clone()
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient * float("nan"))
        return functional.embedding(batch["ids"], weight)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_shared_gradient_that_is_not_finite_is_not_applied(schedule: str, tmp_path: Path) -> None:
    embed = PoisonedEmbed()
    parts = Parts(embed, make_parts().layers, Head(37, 32, embed.weight))
    with make_engine(parts, tmp_path, schedule=schedule) as engine:
        with pytest.warns(RuntimeWarning, match="the gradient of shared is not finite"):
            assert engine.step(make_batches(2, 0)).skipped
        assert all(bool(value.isfinite().all()) for _, value in engine.named_parameters())


class PoisonedHead(Head):
    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().forward(hidden, batch) * float("nan")


def test_skipped_step_is_told_when_its_verdict_comes_late(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The verdict falls on a lane of the CPU, which may come to it after everything else has ended."""
    parts = make_parts(frozen=["embed", "layers"])
    model = Parts(parts.embed, parts.layers, PoisonedHead(37, 32))
    released = threading.Event()
    with delayed(Updates, "decide", released), make_engine(model, tmp_path) as engine:
        threading.Timer(0.2, released.set).start()
        result = engine.step(make_batches(1, 0))
        assert result.skipped and engine.num_skipped == 1
        assert not [warning for warning in recwarn if "is not finite" in str(warning.message)]


@contextmanager
def delayed(owner: type, name: str, released: threading.Event) -> Iterator[None]:
    """Calls of a method wait until they are released."""
    method = getattr(owner, name)

    def wait_first(*arguments: object) -> object:
        assert released.wait(10)
        return method(*arguments)

    setattr(owner, name, wait_first)
    try:
        yield
    finally:
        released.set()
        setattr(owner, name, method)


# Steps that cannot be run


def test_gradients_come_back_to_ram_after_a_step_that_did_not_fit(tmp_path: Path) -> None:
    """The second step spills them, the third is refused and frees its room, the fourth has room for all again."""
    lengths = (12, 60, 4000, 12)
    options = {"alpha": 1.0, "slots": gs.Slots(transfers=1)}
    found = []
    with make_engine(make_parts(), tmp_path, ram="560KiB", **options) as engine:
        for length in lengths:
            if length == 4000:
                with pytest.raises(gs.PlanError):
                    engine.step(make_batches(2, 2, length=length))
            else:
                found.append(engine.step(make_batches(2, 2, length=length)).loss)
            if length == 60:
                assert any(home.gradient is Home.SSD for homes in engine.plan.homes for home in homes)
        assert not any(home.gradient is Home.SSD for homes in engine.plan.homes for home in homes)
    with make_engine(make_parts(), tmp_path / "other", **options) as engine:
        assert found == [engine.step(make_batches(2, 2, length=length)).loss for length in (12, 60, 12)]


def test_bad_batches_are_refused_in_words_and_the_engine_goes_on(tmp_path: Path) -> None:
    good = make_batches(2, 0)
    with make_engine(make_parts(), tmp_path) as engine:
        for wrong, message in (
            ([], "at least one micro-batch"),
            (good[0], "give a list of micro-batches"),
            ([[1, 2]], "micro-batch 0 is a list"),
            ([good[0], {**good[1], "note": "text"}], "'note' of micro-batch 1 is a str"),
        ):
            with pytest.raises(gs.ConfigError, match=message):
                engine.step(wrong)  # type: ignore[arg-type]
            with pytest.raises(gs.ConfigError, match=message):
                engine.evaluate(wrong)  # type: ignore[arg-type]
        expected = engine.evaluate(good)
        assert engine.step(batch for batch in good).loss == pytest.approx(expected)  # type: ignore[arg-type]


def counting(count: Any) -> gs.Sequential:
    parts = make_parts()
    return gs.Sequential(parts.embed, parts.layers, parts.head, num_targets=count)


def test_number_of_targets_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    model = counting(lambda batch: num_targets(batch) / 7)
    with make_engine(model, tmp_path) as engine, pytest.raises(gs.ConfigError, match=r"num_targets gave \d\.\d+: give"):
        engine.step(make_batches(2, 0))


def test_number_of_targets_may_be_a_tensor(tmp_path: Path) -> None:
    with make_engine(counting(lambda batch: (batch["labels"] != -100).sum()), tmp_path) as engine:
        result = engine.step(make_batches(2, 0))
        assert (type(result.loss), type(result.num_tokens)) == (float, int)


def test_step_and_evaluation_run_under_inference_mode(tmp_path: Path) -> None:
    with make_engine(make_parts(), tmp_path / "plain") as engine:
        expected = [engine.step(make_batches(2, step)).loss for step in range(2)]
    with make_engine(make_parts(), tmp_path / "inference") as engine:
        with torch.inference_mode():
            assert engine.evaluate(make_batches(2, 0)) == pytest.approx(expected[0])
            assert engine.step(make_batches(2, 0)).loss == expected[0]
        assert engine.step(make_batches(2, 1)).loss == expected[1]


@pytest.mark.parametrize("resume", [False, True])
def test_engine_that_is_made_under_inference_mode_trains(resume: bool, tmp_path: Path) -> None:
    with make_engine(make_parts(), tmp_path) as engine:
        engine.save()
        expected = engine.step(make_batches(2, 0)).loss
    parts = make_parts()
    with torch.inference_mode():
        engine = make_engine(parts, tmp_path, resume=resume, overwrite=not resume)
    with engine:
        assert engine.step(make_batches(2, 0)).loss == expected


def test_autocast_around_a_whole_run_computes_with_the_weights_of_each_step(tmp_path: Path) -> None:
    found = []
    for number, around_run in enumerate((False, True)):
        with make_engine(make_parts(), tmp_path / str(number)) as engine, autocast(around_run):
            losses = []
            for step in range(3):
                with autocast(not around_run):
                    losses += [engine.step(make_batches(2, step)).loss, engine.evaluate(make_batches(2, step))]
            found.append(losses)
    assert found[0] == found[1]


def autocast(enabled: bool) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if enabled else nullcontext()


def test_micro_batch_without_rows_is_no_error(tmp_path: Path) -> None:
    batches = make_batches(2, 0)
    empty = {name: value[:0] for name, value in batches[0].items()}
    with make_engine(make_parts(), tmp_path, placement=gs.Placement(activations_ram=0)) as engine:
        expected = engine.evaluate(batches)
        assert engine.step([batches[0], empty, batches[1]]).loss == pytest.approx(expected)


# Used in an unusual order


def test_steps_may_come_while_parameters_are_listed(tmp_path: Path) -> None:
    def train(engine: gs.Engine) -> dict[str, torch.Tensor]:
        for step in range(3):
            engine.step(make_batches(2, step))
        return dict(engine.named_parameters())

    with make_engine(make_parts(), tmp_path / "plain", alpha=1.0) as engine:
        expected = train(engine)
    with make_engine(make_parts(), tmp_path / "listed", alpha=1.0) as engine:
        parameters, moments = engine.named_parameters(), engine.named_moments()
        next(parameters), next(moments)
        found = train(engine)
        assert len(list(parameters)) == len(list(moments)) == len(expected) - 1
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        parameters = engine.named_parameters()
        next(parameters)
    with pytest.raises(gs.GreedySnakeError, match="the engine is closed"):
        list(parameters)


def test_parameters_are_listed_whatever_the_default_device(tmp_path: Path) -> None:
    with make_engine(make_parts(), tmp_path, dtype="bfloat16") as engine:
        engine.step(make_batches(2, 0))
        expected = dict(engine.named_parameters())
        with torch.device("meta"):
            assert all(value.is_cpu for _, value in engine.named_parameters())
            assert all(torch.equal(expected[name], value) for name, value in engine.named_parameters())
            assert all(exp_avg.is_cpu for _, exp_avg, _ in engine.named_moments())


def test_model_whose_values_an_engine_took_is_refused_unless_a_checkpoint_has_them(tmp_path: Path) -> None:
    model = make_parts().sequential()
    with make_engine(model, tmp_path) as engine:
        engine.save()  # before any step
    with make_engine(model, tmp_path, resume=True) as engine:
        expected = engine.step(make_batches(2, 0)).loss
    with make_engine(make_parts(), tmp_path / "other") as engine:
        assert engine.step(make_batches(2, 0)).loss == expected
    with pytest.raises(gs.ConfigError, match=r"embed\.weight .*make the modules anew"):
        make_engine(model, tmp_path / "third")


# Plans and bounds


def test_without_storage_late_gradients_stay_in_ram() -> None:
    with make_engine(make_parts(), placement=gs.Placement(1, 1, gradients_ram=0)) as engine:
        first = engine.step(make_batches(2, 0)).loss
        assert engine.step(make_batches(2, 0)).loss < first


def test_evaluations_do_not_count_in_the_bound_of_the_next_step(tmp_path: Path) -> None:
    with make_engine(make_parts(), tmp_path, trace=True) as engine:
        engine.step(make_batches(2, 0))
        num_records = len(engine.records)
        for _ in range(10):
            engine.evaluate(make_batches(4, 0, length=200))
        assert len(engine.records) > num_records
        with held_up(0.5):
            assert engine.step(make_batches(2, 0)).bound_fraction < 0.5


@contextmanager
def held_up(seconds: float) -> Iterator[None]:
    """A step takes this much longer, without anyone being busy."""
    method = gs.Engine._prepare

    def slow(self: gs.Engine, *arguments: Any) -> None:
        time.sleep(seconds)
        method(self, *arguments)

    gs.Engine._prepare = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        gs.Engine._prepare = method  # type: ignore[method-assign]


class PoisonedAtTimes(PoisonedEmbed):
    def forward(self, batch: Batch) -> torch.Tensor:
        if bool(batch["poison"]):
            return super().forward(batch)
        return functional.embedding(batch["ids"], self.weight)


@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_shared_gradient_is_not_applied_whichever_micro_batch_is_not_finite(
    schedule: str, poisoned: int, tmp_path: Path
) -> None:
    embed = PoisonedAtTimes()
    model = Parts(embed, make_parts(num_layers=1).layers, Head(37, 32, embed.weight))
    before = embed.weight.detach().clone()
    batches = [{**batch, "poison": torch.tensor(index == poisoned)} for index, batch in enumerate(make_batches(3, 0))]
    with make_engine(model, tmp_path, schedule=schedule) as engine:
        with pytest.warns(RuntimeWarning, match="the gradient of shared is not finite"):
            assert engine.step(batches).skipped
        assert torch.equal(dict(engine.named_parameters())["embed.weight"], before)
        assert not engine.step([{**batch, "poison": torch.tensor(False)} for batch in batches]).skipped


def test_shared_gradient_is_looked_at_once_for_each_block_that_adds_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each micro-batch: it is as large as the vocabulary."""
    vector_norm, sizes = torch.linalg.vector_norm, list[int]()

    def noted(tensor: torch.Tensor, *values: Any) -> torch.Tensor:
        sizes.append(tensor.numel())
        return vector_norm(tensor, *values)

    monkeypatch.setattr(torch.linalg, "vector_norm", noted)
    with make_engine(make_parts(tied=True, vocab=300), tmp_path) as engine:
        engine.step(make_batches(8, 0))
        assert sizes.count(engine.plan.blocks[-1].num_trainable) == 2


def test_horizontal_micro_batch_that_is_not_finite_is_seen_though_the_cpu_lags(tmp_path: Path) -> None:
    """The gradient of the second micro-batch, a finite one, is there before that of the first is added up."""
    model = Parts(PoisonedAtTimes(), [], Head(37, 32))
    batches = [{**batch, "poison": torch.tensor(index == 0)} for index, batch in enumerate(make_batches(2, 0))]
    released = threading.Event()
    with (
        delayed(Updates, "accumulate", released),
        make_engine(model, tmp_path, schedule="horizontal", chunk_params=1 << 20) as engine,
    ):
        with pytest.warns(RuntimeWarning, match="the gradient of embed is not finite"):
            assert engine.step(batches).skipped
        released.set()
        assert all(bool(value.isfinite().all()) for _, value in engine.named_parameters())


class HugeEmbed(PoisonedEmbed):
    """The gradient of every micro-batch is finite, the sum of two is not."""

    def forward(self, batch: Batch) -> torch.Tensor:
        weight = self.weight.clone()
        if weight.requires_grad:
            weight.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
        return functional.embedding(batch["ids"], weight)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_sum_of_micro_batches_that_overflows_is_not_applied(schedule: str, alpha: float, tmp_path: Path) -> None:
    model = Parts(HugeEmbed(), [], Head(37, 32))
    before = {name: value.detach().clone() for name, value in model.named_parameters().items()}
    with make_engine(model, tmp_path, schedule=schedule, alpha=alpha) as engine:
        with pytest.warns(RuntimeWarning, match="the gradient of embed is not finite"):
            assert engine.step(make_batches(2, 0)).skipped
        assert torch.equal(dict(engine.named_parameters())["embed.weight"], before["embed.weight"])
        assert not engine.step(make_batches(1, 0)).skipped  # a single one has room in fp32


def test_without_checkpoints_only_what_lives_on_the_drive_has_room_there(tmp_path: Path) -> None:
    """A run that fits no other way: the same training, less of the disk, and no promise that cannot be kept."""

    def train(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], int]:
        parts = make_parts(hidden=64, width=256)
        placement = gs.Placement(weights_ram=1, optimizer_ram=0.5)
        with gs.Engine(
            parts.sequential(),
            OPTIMIZER,
            storage=[folder],
            ram="64MiB",
            placement=placement,
            chunk_params=4096,
            **options,
        ) as engine:
            for step in range(3):
                engine.step(make_batches(2, step))
            if not options.get("checkpoints", True):
                with pytest.raises(gs.ConfigError, match="checkpoints=False, which keeps no room"):
                    engine.save()
            used = sum((folder / name).stat().st_blocks * 512 for name in os.listdir(folder))
            return dict(engine.named_parameters()), used

    usual, all_bytes = train(tmp_path / "usual", single_slot=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing about checkpoints that single_slot would overwrite
        found, fewer_bytes = train(tmp_path / "found", checkpoints=False)
    assert all(torch.equal(found[name], value) for name, value in usual.items())
    assert fewer_bytes < 0.5 * all_bytes  # about half of 10 in 12 bytes
    with pytest.raises(gs.ConfigError, match="a run without checkpoints cannot continue one"):
        gs.Engine(
            make_parts().sequential(),
            OPTIMIZER,
            storage=[tmp_path / "found"],
            ram="64MiB",
            resume=True,
            checkpoints=False,
        )


# Streams of a GPU


class ComputeStream:
    """Stands for a CUDA stream: notes in order what is done with it, and what `note` is told."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def note(self, what: str) -> None:
        self.noted.append(what)

    def wait_stream(self, other: str) -> None:
        self.note(f"waits for {other}")

    def synchronize(self) -> None:
        self.note("is done")

    @contextmanager
    def current(self, stream: object) -> Iterator[None]:
        assert stream is self
        self.note("begins")
        yield
        self.note("ends")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> ComputeStream:
    """Engines on the CPU have a compute stream as they would on a GPU. Its lane does without."""
    stream = ComputeStream()
    monkeypatch.setattr(Runner, "compute_stream", property(lambda runner: stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", stream.current)
    return stream


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_batch_that_the_callers_stream_still_makes_is_waited_for(
    call: str, stream: ComputeStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_device = arguments.to_device

    def noted(batch: Batch, device: torch.device) -> Any:
        stream.note("takes a batch")
        return to_device(batch, device)

    monkeypatch.setattr(arguments, "to_device", noted)
    with make_engine(make_parts(), tmp_path) as engine:
        getattr(engine, call)(make_batches(1, 0))
    assert stream.noted[:4] == ["waits for the caller's", "begins", "takes a batch", "ends"]


def test_memory_of_a_step_is_zeroed_before_any_stream_may_use_it(
    stream: ComputeStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros

    def noted(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            stream.note("zeroes")
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", noted)
    placement = gs.Placement(activations_device=0.5)
    with make_engine(make_parts(), tmp_path, placement=placement) as engine:
        engine.evaluate(make_batches(2, 0))
        stream.noted.clear()
        engine.evaluate(make_batches(4, 0))
    first = stream.noted.index("zeroes")
    assert stream.noted[first - 1 :] == ["begins", "zeroes", "zeroes", "ends", "is done"]
