"""A model as a sequence of blocks: embedding, layers, head. Any torch modules, or functions that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from greedysnake.errors import ConfigError

Batch = Mapping[str, torch.Tensor]


class MicroBatch(dict[str, torch.Tensor]):
    """One micro-batch of a step, on the device. `notes` is what blocks remember about it; both end with the step."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.notes: dict[str, Any] = {}


ModuleSource = nn.Module | Callable[[], nn.Module]


class LayerGroup(nn.Module):
    """Several layers that stream as one block."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.training = all(layer.training for layer in layers)

    def extra_inputs(self, batch: Batch) -> tuple[tuple[object, ...], ...]:
        """For each layer what it asks for."""
        return tuple(layer.extra_inputs(batch) if hasattr(layer, "extra_inputs") else () for layer in self.layers)  # type: ignore[operator]

    def forward(self, hidden: torch.Tensor, *extra: tuple[object, ...]) -> torch.Tensor:
        for layer, inputs in zip(self.layers, extra, strict=True):
            hidden = layer(hidden, *inputs)
        return hidden


Built = tuple[nn.Module, dict[str, nn.Parameter]]
"""A block's module, and its parameters by their full names."""


Made = Callable[[Mapping[str, nn.Parameter]], None]


def ignore(parameters: Mapping[str, nn.Parameter]) -> None:
    """What was made is wanted as it is."""


class BlockSource(Protocol):
    """How to make one block."""

    @property
    def name(self) -> str: ...

    def build(self, *, values: bool = True, made: Made = ignore) -> Built:
        """Makes it. Without `values` the parameters' contents do not matter, as when they come from a checkpoint.
        `made` is called as soon as some of its parameters are there, and may take their values: those of a layer before
        the next is made."""


@dataclass(frozen=True)
class _Single:
    """A block of one module."""

    name: str
    source: ModuleSource

    def build(self, *, values: bool = True, made: Made = ignore) -> Built:
        module = _build(self.name, self.source)
        parameters = {f"{self.name}.{name}": parameter for name, parameter in module.named_parameters()}
        made(parameters)
        return module, parameters


@dataclass(frozen=True)
class _Group:
    """A block of several layers."""

    name: str
    layers: tuple[BlockSource, ...]

    def build(self, *, values: bool = True, made: Made = ignore) -> Built:
        modules: list[nn.Module] = []
        parameters: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for layer in self.layers:
            module, found = layer.build(values=values)
            if hasattr(module, "side_gradient"):
                raise ConfigError(
                    f"{layer.name} has a side_gradient and needs a block of its own: set layers_per_block to 1"
                )
            modules.append(module)
            new = {name: parameter for name, parameter in found.items() if id(parameter) not in seen}
            made(new)  # without those of a layer that is there twice
            seen.update(map(id, new.values()))
            parameters.update(new)
        return LayerGroup(modules), parameters


def grouped(sources: Sequence[BlockSource], layers_per_block: int) -> Iterator[BlockSource]:
    """Embedding, layers and head with so many layers in a block, or what is left of them in the last one."""
    embed, *layers, head = sources
    yield embed
    for first in range(0, len(layers), layers_per_block):
        group = tuple(layers[first : first + layers_per_block])
        yield group[0] if len(group) == 1 else _Group(f"layers.{first}-{first + len(group) - 1}", group)
    yield head


def require_layers_per_block(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"layers_per_block is {count}: give a whole number, 1 or more")


class Model(Protocol):
    """What the engine needs of a model."""

    def sources(self) -> Iterator[BlockSource]:
        """The blocks in forward order."""

    def num_targets(self, batch: Batch) -> int:
        """How many tokens of a batch have a loss."""


class Sequential:
    """embed(batch) -> hidden; layer(hidden) -> hidden; head(hidden, batch) -> sum of the losses of the batch's
    target tokens, a scalar.

    Each may be a module or a function without arguments that makes one; such functions are called block by block,
    so a model need never be in memory as a whole. They are called twice, the first time only for the shapes,
    under `torch.device("meta")`. A parameter that several blocks share is recognised by identity. The forward may
    run twice and must leave buffers and the batch as they are: no running statistics. No block's output may be larger
    than the embedding's.

    A layer may have more methods, which are called outside of compiled code:
    - `extra_inputs(batch)`, a tuple: the layer is called as layer(hidden, *extra_inputs).
    - `keep_side(batch, side)` and `side_gradient(batch)`: such a layer returns (hidden, side), a second tensor that the
      loss depends on. `keep_side` gets its value in the forward; `side_gradient` is asked in the backward for the
      gradient of the summed loss by it, when all layers have been through the forward.
    The batch that they get is a `MicroBatch`.
    """

    def __init__(
        self,
        embed: ModuleSource,
        layers: Sequence[ModuleSource],
        head: ModuleSource,
        *,
        num_targets: Callable[[Batch], int],
        layers_per_block: int = 1,
    ) -> None:
        """`num_targets(batch)` is known before the forward, so that a step's loss is its sum over the targets of
        all its micro-batches divided by their number. `layers_per_block` layers stream as one block, which keeps
        one activation for all of them, and takes memory on the device for the weights, gradients and graphs of all."""
        require_layers_per_block(layers_per_block)
        if not isinstance(layers, Iterable):
            raise ConfigError(f"layers is a {type(layers).__name__}: give a list of modules, or of functions")
        self._count = num_targets
        self._embed = embed
        self._layers = list(layers)
        self._head = head
        self._layers_per_block = layers_per_block

    def num_targets(self, batch: Batch) -> int:
        return self._count(batch)

    def sources(self) -> Iterator[BlockSource]:
        """The blocks in forward order."""
        layers = [_Single(f"layers.{number}", layer) for number, layer in enumerate(self._layers)]
        sources = [_Single("embed", self._embed), *layers, _Single("head", self._head)]
        return grouped(sources, self._layers_per_block)


def _build(name: str, source: ModuleSource) -> nn.Module:
    if isinstance(source, nn.Module):
        return source
    if not callable(source):
        raise ConfigError(f"{name} is a {type(source).__name__}: give a torch module or a function that makes one")
    module = source()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the function given for {name} made a {type(module).__name__}: it must return a torch module"
        )
    return module
