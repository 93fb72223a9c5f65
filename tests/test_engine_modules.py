"""The engine with unusual modules: what trains as plain PyTorch does, and what may not change meanwhile."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import greedysnake as gs
from reference import (
    OPTIMIZER,
    Batch,
    Embed,
    Layer,
    Parts,
    Plain,
    make_batches,
    make_engine,
    make_parts,
    train_engine,
    train_reference,
)

IN_RAM = gs.Placement(weights_ram=1, optimizer_ram=1)

pytestmark = pytest.mark.usefixtures("one_thread")


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
        return torch.zeros(())


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


def write(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def load(parameter: nn.Parameter) -> None:
    module = nn.Module()
    module.weight = parameter
    module.load_state_dict({"weight": torch.zeros_like(parameter)})


@pytest.mark.parametrize("change", [write, nn.init.zeros_, load])
@pytest.mark.parametrize("tied", [False, True])
def test_step_after_a_parameter_was_written_to_is_refused_and_nothing_of_it_is_saved(
    change: Any, tied: bool, tmp_path: Path
) -> None:
    """What came of it depended on alpha: on which weights had gone up ahead of the step."""
    parts = make_parts(tied=tied)
    with make_engine(parts, tmp_path) as engine:
        engine.step(make_batches(2, 0))
        before = {name: values.clone() for name, values in engine.named_parameters()}
        change(parts.embed.weight)
        for call in (engine.step, engine.evaluate):
            with pytest.raises(gs.ConfigError, match=r"^embed\.weight was written to after the engine was made"):
                call(make_batches(2, 1))
        engine.save()
        assert all(torch.equal(values, before[name]) for name, values in engine.named_parameters())
