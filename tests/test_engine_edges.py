"""The engine with unusual models, odd batches, interrupts, and used in an unusual order."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import greedysnake as gs
from greedysnake.placement import Home
from greedysnake.runtime.context import StepContext
from greedysnake.runtime.runner import Runner
from greedysnake.runtime.steps import Steps
from greedysnake.runtime.updates import Updates
from reference import (
    OPTIMIZER,
    Batch,
    Embed,
    Head,
    Layer,
    Parts,
    Plain,
    make_batches,
    make_parts,
    num_targets,
    train_engine,
    train_reference,
)

IN_RAM = gs.Placement(weights_ram=1, optimizer_ram=1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(parts: Parts | gs.Sequential, *directories: Path, **options: object) -> gs.Engine:
    model = parts.sequential() if isinstance(parts, Parts) else parts
    defaults = {"ram": "64MiB", "dtype": "float32", "alpha": 0.5, "chunk_params": 2048}
    return gs.Engine(model, OPTIMIZER, storage=directories, **{**defaults, **options})  # type: ignore[arg-type]


# Models


class BareHead(nn.Module):
    """A head that owns nothing."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits = functional.linear(hidden, self.weight).flatten(0, 1)
        return functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def tied_without_norm() -> Parts:
    parts = make_parts()
    return Parts(parts.embed, parts.layers, BareHead(parts.embed.weight))  # type: ignore[arg-type]


def one_layer_three_times() -> Parts:
    parts = make_parts()
    return Parts(parts.embed, [parts.layers[0]] * 3, parts.head)


def layers_without_parameters() -> Parts:
    parts = make_parts()
    return Parts(parts.embed, [Plain(), Plain()], parts.head)


@pytest.mark.parametrize("make", [tied_without_norm, one_layer_three_times, layers_without_parameters])
def test_blocks_that_own_no_parameter_train_as_plain_pytorch(make: object, tmp_path: Path) -> None:
    assert callable(make)

    def batches(step: int) -> list[Batch]:
        return make_batches(2, step)

    parts = make()
    expected = train_reference(copy.deepcopy(parts), OPTIMIZER, batches, 3)
    found = train_engine(parts.sequential(), batches, 3, storage=[tmp_path], dtype="float32", chunk_params=2048)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


class Spare(Embed):
    """Has a matrix that only some batches use. With `listed` its gradient is zero in the others, without it is None."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__(37, 32)
        self.spare = nn.Parameter(torch.randn(32, 32) * 0.1)
        self.listed = listed

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = super().forward(batch)
        if bool(batch["use"]):
            return hidden + hidden @ self.spare
        return hidden + 0 * self.spare.sum() if self.listed else hidden


def with_spare(*, listed: bool) -> Parts:
    parts = make_parts()
    torch.manual_seed(1)
    return Parts(Spare(listed=listed), parts.layers, parts.head)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"schedule": "horizontal"}])
def test_parameter_that_a_step_does_not_use_has_a_gradient_of_zero(options: Any, tmp_path: Path) -> None:
    """Moments shrink and weight decay applies, where torch's AdamW would leave out a parameter without gradient."""

    def batches(step: int) -> list[Batch]:
        return [{**batch, "use": torch.tensor(step == 1)} for batch in make_batches(2, step)]

    def spare_of(parts: Parts) -> torch.Tensor:
        clip = options.get("max_grad_norm")
        return train_reference(parts, OPTIMIZER, batches, 4, max_grad_norm=clip).parameters["embed.spare"]

    with make_engine(with_spare(listed=False), tmp_path, **options) as engine:
        for step in range(4):
            engine.step(batches(step))
        found = dict(engine.named_parameters())["embed.spare"]
    # Rounding in the last place of fp32, of gradients that are as small as 1e-6.
    torch.testing.assert_close(found, spare_of(with_spare(listed=True)), rtol=1e-4, atol=1e-5)
    assert float((found - spare_of(with_spare(listed=False))).abs().max()) > 1e-3


class Adapter(nn.Module):
    """Has a matrix that only long sequences use. With `listed` its gradient is zero for others, without it is None."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) * 0.1)
        self.listed = listed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[1] > 8:
            return hidden + hidden @ self.weight
        return hidden + 0 * self.weight.sum() if self.listed else hidden


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"placement": gs.Placement(graphs_device=1)}])
def test_lowest_trained_block_need_not_be_used(options: Any, tmp_path: Path) -> None:
    """Then nothing of it has a gradient, as its input has none either."""

    def batches(step: int) -> list[Batch]:
        lengths = ((12, 6), (6, 6), (6, 12))[step]
        return [make_batches(1, step, length=length)[0] for length in lengths]

    def with_adapter(*, listed: bool) -> Parts:
        parts = make_parts(frozen=["embed"])
        torch.manual_seed(1)
        return Parts(parts.embed, [Adapter(listed=listed), *parts.layers], parts.head)

    clip = options.get("max_grad_norm")
    expected = train_reference(with_adapter(listed=True), OPTIMIZER, batches, 3, max_grad_norm=clip)
    found = train_engine(
        with_adapter(listed=False).sequential(), batches, 3, storage=[tmp_path], dtype="float32", **options
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_backward_ends_at_the_first_block_that_uses_a_trained_shared_parameter(schedule: str, tmp_path: Path) -> None:
    """The embedding and the head share one too, but it is frozen."""

    def batches(step: int) -> list[Batch]:
        return make_batches(2, step)

    def model() -> Parts:
        return make_parts(tied=True, repeated=True, frozen=["embed", "layers.2"])

    expected = train_reference(model(), OPTIMIZER, batches, 3)
    with make_engine(model(), tmp_path, schedule=schedule) as engine:
        assert engine.plan.lowest == 1
        losses = [engine.step(batches(step)).loss for step in range(3)]
        found = dict(engine.named_parameters())
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


class Scaled(Layer):
    """Asks for a factor of each batch, and does without."""

    def extra_inputs(self, batch: Batch) -> tuple[torch.Tensor]:
        return (batch["factor"],)

    def forward(self, hidden: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        hidden = super().forward(hidden)
        return hidden if factor is None else hidden * factor


@pytest.mark.parametrize("graphs_device", [0.0, 1.0])
def test_layers_of_one_block_get_their_extra_inputs(graphs_device: float, tmp_path: Path) -> None:
    def train(layers_per_block: int) -> list[float]:
        parts = make_parts()
        torch.manual_seed(1)
        layers = [Scaled(32, 64), parts.layers[0], Scaled(32, 64)]
        model = Parts(parts.embed, layers, parts.head).sequential(layers_per_block=layers_per_block)
        placement = gs.Placement(graphs_device=graphs_device)
        with make_engine(model, tmp_path / str(layers_per_block), placement=placement) as engine:
            return [
                engine.step([{**batch, "factor": torch.tensor(3.0)} for batch in make_batches(2, step)]).loss
                for step in range(2)
            ]

    expected = train(1)
    assert train(2) == pytest.approx(expected, rel=1e-6)
    assert train(3) == pytest.approx(expected, rel=1e-6)


class Sided(Layer):
    def side_gradient(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError


def test_layer_with_a_second_output_is_refused_in_a_block_of_several() -> None:
    parts = make_parts()
    model = Parts(parts.embed, [parts.layers[0], Sided(32, 64)], parts.head).sequential(layers_per_block=2)
    with pytest.raises(gs.ConfigError, match=r"layers\.1 has a side_gradient and needs a block of its own"):
        make_engine(model, placement=IN_RAM)


class Drawing(nn.Module):
    """Draws from Python or numpy, but only for long sequences."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.draw = draw

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        factor = self.draw() if hidden.shape[1] > 8 else 1.0
        return hidden + factor * torch.tanh(self.linear(hidden))


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_layer_that_draws_only_at_times_draws_the_same_when_it_is_computed_again(draw: Any, tmp_path: Path) -> None:
    def train(folder: Path, placement: gs.Placement) -> dict[str, torch.Tensor]:
        parts = make_parts()
        torch.manual_seed(1)
        with make_engine(Parts(parts.embed, [Drawing(draw)], parts.head), folder, placement=placement) as engine:
            for step, length in enumerate((6, 12, 12)):
                engine.step(make_batches(2, step, length=length))
            return dict(engine.named_parameters())

    once = train(tmp_path / "once", gs.Placement(graphs_device=1))
    twice = train(tmp_path / "twice", gs.Placement())
    assert all(torch.equal(twice[name], value) for name, value in once.items())


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(torch.tanh(self.linear(hidden)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("layers_per_block", [1, 2])
def test_modes_of_modules_do_not_depend_on_evaluations_or_blocks(layers_per_block: int, tmp_path: Path) -> None:
    """A part in evaluation mode stays in it; a layer that is in it as a whole, as a loaded one, is trained."""

    def train(name: str, prepare: Callable[[Modes], object], *, evaluates: bool) -> list[float]:
        parts = make_parts()
        torch.manual_seed(1)
        layers = [Modes(), Modes()]
        for layer in layers:
            prepare(layer)
        model = Parts(parts.embed, [*layers], parts.head).sequential(layers_per_block=layers_per_block)
        losses = []
        with make_engine(model, tmp_path / f"{name}{evaluates}") as engine:
            for step in range(3):
                losses.append(engine.step(make_batches(2, step)).loss)
                if evaluates:
                    engine.evaluate(make_batches(2, 9))
        return losses

    usual = train("usual", lambda layer: None, evaluates=False)
    without = train("without", lambda layer: setattr(layer.dropout, "p", 0.0), evaluates=False)
    assert usual != without
    for evaluates in (False, True):
        assert train("part", lambda layer: layer.dropout.eval(), evaluates=evaluates) == without
        assert train("whole", lambda layer: layer.eval(), evaluates=evaluates) == usual


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


def test_skipped_step_is_told_without_waiting_for_the_cpu(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The verdict falls on the CPU lane, which may come to it after step() has returned."""
    parts = make_parts(frozen=["embed", "layers"])
    model = Parts(parts.embed, parts.layers, PoisonedHead(37, 32))
    released = threading.Event()
    with delayed(Updates, "decide", released), make_engine(model, tmp_path) as engine:
        result = engine.step(make_batches(1, 0))
        assert result.skipped and engine.num_skipped == 1
        assert not [warning for warning in recwarn if "is not finite" in str(warning.message)]
        released.set()


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


# Interrupts and ends


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs in a process of its own, which must end: a hang fails after a minute."""
    command = [sys.executable, "-c", SCRIPT_START + script, *map(str, arguments)]
    tests = str(Path(__file__).parent)
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": tests}, capture_output=True, text=True, timeout=60, check=False
    )


SCRIPT_START = """
import sys
from pathlib import Path
from typing import Any
import torch
import greedysnake as gs
from reference import make_batches, make_parts
from test_engine_edges import make_engine
torch.set_num_threads(1)
engine = make_engine(make_parts(), Path(sys.argv[1]), alpha=1.0)
engine.step(make_batches(2, 0))
"""


def test_interrupt_between_two_ops_closes_the_engine(tmp_path: Path) -> None:
    """Other lanes wait for compute ops that never come: they must not be waited for."""
    ended = run_script(
        """
engine.save()
from greedysnake.runtime.runner import Runner
from greedysnake.runtime.steps import Steps
from greedysnake.runtime.updates import Updates
collect, calls = Runner._collect, []
def interrupted(self):
    calls.append(self)
    if len(calls) == 2:  # the first is before the step
        raise KeyboardInterrupt
    collect(self)
Runner._collect = interrupted
try:
    engine.step(make_batches(2, 1))
except KeyboardInterrupt:
    pass
with make_engine(make_parts(), Path(sys.argv[1]), resume=True) as resumed:
    print(resumed.num_steps)
""",
        tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr


@pytest.mark.parametrize(("owner", "where"), [(Steps, "_take_next"), (gs.Engine, "_judge"), (gs.Engine, "_result")])
def test_interrupt_within_a_step_leaves_no_half_step_to_be_saved(
    owner: type, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(make_parts(), tmp_path) as engine:
        engine.step(make_batches(2, 0))
        monkeypatch.setattr(owner, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step(make_batches(2, 1))
        with pytest.raises(gs.GreedySnakeError, match="the engine is closed"):
            engine.save()


def test_interrupt_within_a_flush_loses_no_late_update_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(make_parts(), tmp_path, alpha=1.0) as engine:
        engine.step(make_batches(2, 0))
        monkeypatch.setattr(Runner, "link", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.flush()
        with pytest.raises(gs.GreedySnakeError, match="the engine is closed"):
            engine.save()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_process_ends_though_the_engine_was_not_closed(tmp_path: Path) -> None:
    ended = run_script("print('end')", tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


def test_engine_that_nobody_holds_gives_its_directory_back(tmp_path: Path) -> None:
    num_threads = threading.active_count()
    engine = make_engine(make_parts(), tmp_path)
    engine.step(make_batches(2, 0))
    engine.flush()
    del engine
    gc.collect()
    make_engine(make_parts(), tmp_path).close()
    assert threading.active_count() == num_threads


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


def test_number_of_targets_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    parts = make_parts()
    model = gs.Sequential(
        parts.embed,
        parts.layers,
        parts.head,
        num_targets=lambda batch: num_targets(batch) / 7,  # type: ignore[arg-type,return-value]
    )
    with make_engine(model, tmp_path) as engine, pytest.raises(gs.ConfigError, match=r"num_targets gave \d\.\d+: give"):
        engine.step(make_batches(2, 0))


@pytest.mark.parametrize(
    ("number", "message"),
    [(0, r"layers\.0\.norm\.weight was frozen .* now to be trained"), (1, "was trained .* now to be frozen")],
)
def test_step_after_another_choice_of_what_is_trained_is_refused(number: int, message: str, tmp_path: Path) -> None:
    parts = make_parts(frozen=["layers.0"])
    with make_engine(parts, tmp_path) as engine:
        parts.layers[number].requires_grad_(number == 0)
        with pytest.raises(gs.ConfigError, match=message):
            engine.step(make_batches(2, 0))
        parts.layers[number].requires_grad_(number == 1)
        engine.step(make_batches(2, 0))


def test_number_of_targets_may_be_a_tensor(tmp_path: Path) -> None:
    parts = make_parts()
    model = gs.Sequential(
        parts.embed,
        parts.layers,
        parts.head,
        num_targets=lambda batch: (batch["labels"] != -100).sum(),  # type: ignore[arg-type,return-value]
    )
    with make_engine(model, tmp_path) as engine:
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


# What a block may not do, and what no plan can do


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden += 1.0
        return self.linear(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("frozen", [(), ("embed",)])
@pytest.mark.parametrize("activations_device", [0.0, 1.0])
def test_layer_that_changes_its_input_in_place_is_refused(
    activations_device: float, frozen: tuple[str, ...], tmp_path: Path
) -> None:
    """With its input's home on the device the backward would start from the changed input, and nobody would know."""
    parts = make_parts(frozen=frozen)
    placement = gs.Placement(activations_device=activations_device, activations_ram=1 - activations_device)
    engine = make_engine(Parts(parts.embed, [InPlace()], parts.head), tmp_path, placement=placement)
    with engine, pytest.raises(gs.ConfigError, match=r"layers\.0 changes its input in place"):
        engine.step(make_batches(2, 0))


class Counting(nn.Module):
    """A layer that remembers something: in place, or in a new tensor each time."""

    def __init__(self, *, in_place: bool, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.in_place = in_place
        self.register_buffer("fixed", torch.ones(32))
        self.register_buffer("mean", torch.zeros(32), persistent=persistent)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.detach().mean((0, 1))
        if self.training and self.in_place:
            self.mean.mul_(0.9).add_(mean)
        elif self.training:
            self.mean = self.mean * 0.9 + mean
        return self.linear(hidden) * self.fixed  # type: ignore[no-any-return]


class Normed(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32, **options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.norm(hidden.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class NormedHead(Head):
    def __init__(self) -> None:
        super().__init__(37, 32)
        self.batch_norm = Normed()

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().forward(self.batch_norm(hidden), batch)


@pytest.mark.parametrize("options", [{}, {"schedule": "horizontal"}, {"placement": gs.Placement(graphs_device=1)}])
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: Counting(in_place=True, persistent=True), "mean"),
        (lambda: Counting(in_place=True, persistent=False), "mean"),
        (lambda: Counting(in_place=False, persistent=True), "mean"),
        (Normed, r"norm\.\w+"),
    ],
)
def test_layer_that_changes_a_buffer_is_refused(layer: Any, name: str, options: Any, tmp_path: Path) -> None:
    """The backward would run it again, and no checkpoint has it."""
    parts = make_parts()
    engine = make_engine(Parts(parts.embed, [parts.layers[0], layer()], parts.head), tmp_path, **options)
    message = rf"F2\.\d: layers\.1 changes its buffer {name} in the forward.*LayerNorm instead"
    with engine:
        engine.evaluate(make_batches(2, 0))  # where nothing is changed
        with pytest.raises(gs.ConfigError, match=message):
            engine.step(make_batches(2, 0))


def test_head_that_changes_a_buffer_is_refused(tmp_path: Path) -> None:
    engine = make_engine(Parts(make_parts().embed, [], NormedHead()), tmp_path)
    with engine, pytest.raises(gs.ConfigError, match=r"head changes its buffer batch_norm\.norm\.\w+"):
        engine.step(make_batches(2, 0))


def test_compiled_layer_that_changes_a_buffer_is_refused(tmp_path: Path) -> None:
    torch._dynamo.reset()
    parts = make_parts()
    layers = [parts.layers[0], Counting(in_place=True, persistent=True)]
    engine = make_engine(Parts(parts.embed, layers, parts.head), tmp_path, compile=True)
    with engine, pytest.raises(gs.ConfigError, match=r"layers\.1 changes its buffer mean"):
        engine.step(make_batches(2, 0))


@pytest.mark.parametrize(
    "layer", [lambda: Counting(in_place=False, persistent=False), lambda: Normed(track_running_stats=False)]
)
def test_layer_with_buffers_that_are_a_cache_or_do_not_change_is_fine(layer: Any, tmp_path: Path) -> None:
    parts = make_parts()
    with make_engine(Parts(parts.embed, [layer()], parts.head), tmp_path) as engine:
        first = engine.step(make_batches(2, 0)).loss
        assert engine.step(make_batches(2, 0)).loss < first


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(37, 32, max_norm=1.0)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.table(batch["ids"])  # type: ignore[no-any-return]


@pytest.mark.parametrize("frozen", [False, True])
def test_block_that_changes_its_parameter_is_refused(frozen: bool, tmp_path: Path) -> None:
    """What it writes reaches the SSD with an early update, and is lost otherwise."""
    parts = make_parts()
    embed = Renormed().requires_grad_(not frozen)
    engine = make_engine(Parts(embed, parts.layers, parts.head), tmp_path)
    message = r"embed changes its parameter embed\.table\.weight in the forward.*without max_norm"
    with engine, pytest.raises(gs.ConfigError, match=message):
        engine.step(make_batches(2, 0))


class Pair(nn.Embedding):
    def forward(self, batch: Batch) -> tuple[torch.Tensor]:  # type: ignore[override]
        return (super().forward(batch["ids"]),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": gs.Placement(weights_ram=1, optimizer_ram=1, activations_ram=0.5)}, "activations_ram"),
        ({"storage": "directory"}, "a list of directories"),
        ({"storage": Path("directory")}, "a list of directories"),
        ({"chunk_params": 1e6}, "chunk_params is 1000000.0"),
        ({"schedule": "horizontal", "placement": gs.Placement(1, 1, graphs_device=1)}, "graphs_device"),
    ],
)
def test_what_cannot_work_is_refused_when_the_engine_is_made(
    options: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    defaults = {"storage": (), "ram": "64MiB", "placement": IN_RAM}
    with pytest.raises(gs.GreedySnakeError, match=message):
        gs.Engine(make_parts().sequential(), OPTIMIZER, **{**defaults, **options})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("owns", [True, False])
def test_model_without_trainable_parameters_is_refused_when_the_engine_is_made(owns: bool) -> None:
    parts = make_parts(frozen=["embed", "layers", "head"]) if owns else Parts(Plain(), [], Plain())
    with pytest.raises(gs.PlanError, match="nothing to train"):
        make_engine(parts, placement=IN_RAM)


def test_without_storage_late_gradients_stay_in_ram() -> None:
    with make_engine(make_parts(), placement=gs.Placement(1, 1, gradients_ram=0)) as engine:
        first = engine.step(make_batches(2, 0)).loss
        assert engine.step(make_batches(2, 0)).loss < first


def test_module_without_values_is_refused_in_words() -> None:
    parts = make_parts()
    with torch.device("meta"):
        layer = Layer(32, 96)
    with pytest.raises(gs.ConfigError, match=r"layers\.0\.up\.weight is on the meta device"):
        make_engine(Parts(parts.embed, [layer], parts.head), placement=IN_RAM)


def test_embedding_that_returns_no_tensor_is_refused_in_words() -> None:
    parts = make_parts()
    engine = make_engine(Parts(Pair(37, 32), parts.layers, parts.head), placement=IN_RAM)
    with engine, pytest.raises(gs.ConfigError, match="embed returned a tuple"):
        engine.step(make_batches(2, 0))


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

    def slow(self: gs.Engine, context: StepContext) -> None:
        time.sleep(seconds)
        method(self, context)

    gs.Engine._prepare = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        gs.Engine._prepare = method  # type: ignore[method-assign]


def test_forked_child_leaves_its_parents_engine_alone(tmp_path: Path) -> None:
    ended = run_script(
        """
import os
with engine:
    child = os.fork()
    if child == 0:
        try:
            engine.step(make_batches(2, 1))
        except gs.GreedySnakeError as error:
            print(error, flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    engine.step(make_batches(2, 1))
    engine.save()
    print(engine.num_steps)
""",
        tmp_path,
    )
    message, steps = ended.stdout.splitlines()
    assert "forked" in message
    assert (ended.returncode, steps) == (0, "2"), ended.stderr


class PoisonedAtTimes(PoisonedEmbed):
    def forward(self, batch: Batch) -> torch.Tensor:
        if bool(batch["poison"]):
            return super().forward(batch)
        return functional.embedding(batch["ids"], self.weight)


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
