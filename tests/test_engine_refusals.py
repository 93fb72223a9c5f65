"""Modules that cannot be trained as they are, and arguments that do not fit together: refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import greedysnake as gs
from reference import (
    OPTIMIZER,
    Batch,
    Embed,
    Head,
    Layer,
    Parts,
    Plain,
    make_batches,
    make_engine,
    make_factories,
    make_parts,
)

IN_RAM = gs.Placement(weights_ram=1, optimizer_ram=1)

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_an_embedding_that_changes_its_batch_in_place_is_refused(tmp_path: Path) -> None:
    """It is called for the size, in the forward and in the backward, so it would change it three times."""

    class Shifting(Embed):
        def forward(self, batch: Batch) -> torch.Tensor:
            name = next(iter(batch))
            batch[name].add_(1).remainder_(7)
            return super().forward(batch)

    parts = make_parts()
    with (
        make_engine(Parts(Shifting(37, 32), parts.layers, parts.head), tmp_path) as engine,
        pytest.raises(gs.ConfigError, match=r"embed changes \w+ of its batch in place"),
    ):
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


@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_that_are_tied_by_their_memory_are_refused_in_words(transposed: bool) -> None:
    """They were trained apart, where plain PyTorch updates one memory twice."""
    parts = make_parts(vocab=32)
    memory = parts.embed.weight.data
    parts.head.weight.data = memory.t() if transposed else memory
    with pytest.raises(gs.ConfigError, match=r"^embed\.weight and head\.weight lie in the same memory"):
        gs.Engine(parts.sequential(), OPTIMIZER, ram="64MiB")


def test_parameters_beside_each_other_in_one_memory_are_fine() -> None:
    parts = make_parts()
    memory = torch.randn(37, 64)
    parts.embed.weight.data, parts.head.weight.data = memory.chunk(2, dim=1)
    gs.Engine(parts.sequential(), OPTIMIZER, ram="64MiB", placement=IN_RAM).close()


@pytest.mark.parametrize("functions", [False, True])
def test_module_that_was_made_under_inference_mode_is_refused_in_words(functions: bool) -> None:
    sentence = r"^embed\.weight was made under torch\.inference_mode"
    with torch.inference_mode(), pytest.raises(gs.ConfigError, match=sentence):
        gs.Engine(make_factories() if functions else make_parts().sequential(), OPTIMIZER, ram="64MiB")


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
