"""The backward of a block without its output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import greedysnake as gs
from greedysnake.runtime.compute import compiler_options
from greedysnake.runtime.recompute import Recompute
from reference import OPTIMIZER, Layer, Parts, make_batches, make_parts, train_reference


def gradients(output: torch.Tensor, inputs: list[torch.Tensor], seed: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output, inputs, seed))


def test_gradients_are_those_of_the_module() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    hidden, seed = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    inputs = [hidden, *module.parameters()]
    found = gradients(Recompute(module)(hidden, seed), inputs, None)
    for ours, theirs in zip(found, gradients(module(hidden), inputs, seed), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("graphs", [0.0, 0.5])
def test_a_compiled_engine_trains_as_plain_pytorch(graphs: float, tmp_path: Path) -> None:
    torch._dynamo.reset()
    wanted = train_reference(make_parts(), OPTIMIZER, lambda step: make_batches(2, step, uneven=False), 3)
    with gs.Engine(
        make_parts().sequential(),
        OPTIMIZER,
        storage=[tmp_path / "store"],
        ram="64MiB",
        dtype="float32",
        compile=True,
        placement=gs.Placement(graphs_device=graphs),
    ) as engine:
        losses = [engine.step(make_batches(2, step, uneven=False)).loss for step in range(3)]
        found = dict(engine.named_parameters())
    assert losses == pytest.approx(wanted.losses, rel=1e-5)
    for name, parameter in wanted.parameters.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-4, atol=1e-5)


def test_one_more_variant_of_compiled_code_serves_all_other_lengths(tmp_path: Path) -> None:
    """Wherever tensors between blocks lie: code for several lengths asks whether one begins where its storage does."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with gs.Engine(
        make_parts().sequential(),
        OPTIMIZER,
        storage=[tmp_path],
        ram="64MiB",
        dtype="float32",
        compile=True,
        placement=gs.Placement(activations_device=1, activations_ram=0),
    ) as engine:
        engine.step(make_batches(4, 0, uneven=False, length=16))
        assert counters["stats"]["unique_graphs"] == 2  # the forward and the recompute
        for step, length in enumerate((15, 14, 12, 13)):
            engine.step(make_batches(4, step, uneven=False, length=length))
    assert counters["stats"]["unique_graphs"] == 4


class Drawing(Layer):
    """Draws noise, which no gradient depends on, and then a mask."""

    def __init__(self) -> None:
        super().__init__(32, 96, dropout=0.3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        noise = 0.01 * torch.randn_like(hidden) if self.training else 0
        return super().forward(hidden) + noise


@pytest.mark.parametrize("limit", [8, 1])
def test_compiled_layers_draw_as_uncompiled_ones(limit: int, tmp_path: Path) -> None:
    """Also when torch gives up compiling the forward, here because of the evaluation, but not the recompute."""
    torch._dynamo.reset()

    def parts() -> Parts:
        plain = make_parts()
        return Parts(plain.embed, [Drawing()], plain.head)

    options = {"storage": [tmp_path], "ram": "64MiB", "dtype": "float32", "compile": True}
    wanted = train_reference(parts(), OPTIMIZER, lambda step: make_batches(2, step), 3)
    with (
        torch._dynamo.config.patch(recompile_limit=limit),
        gs.Engine(parts().sequential(), OPTIMIZER, **options) as engine,  # type: ignore[arg-type]
    ):
        engine.evaluate(make_batches(2, 0))
        losses = [engine.step(make_batches(2, step)).loss for step in range(3)]
    assert losses == pytest.approx(wanted.losses, rel=1e-5)  # another mask in the recompute: 1e-2


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0"])
@pytest.mark.parametrize(
    ("layer", "draws"),
    [
        (Layer(8, 8), True),  # nobody knows
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), False),
        (nn.MultiheadAttention(8, 2, dropout=0.1), True),
        (nn.MultiheadAttention(8, 2), False),
    ],
)
def test_only_layers_that_draw_lose_anything_by_the_order_of_their_draws(
    layer: nn.Module, draws: bool, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    options = compiler_options([nn.Linear(8, 8), layer])
    assert options.pop("fallback_random") is True
    assert bool(options) == (draws and version < "2.13")
