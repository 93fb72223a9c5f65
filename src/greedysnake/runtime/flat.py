"""A block's parameters as one flat vector: where each lies, what decays, what is trained, what is shared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from greedysnake.errors import ConfigError, GreedySnakeError
from greedysnake.models.sequential import BlockSource, Model
from greedysnake.shapes import MOMENT_GROUP, BlockShape, Share, block_shape, pad

ALIGNMENT = MOMENT_GROUP
"""Parameters start at multiples of this many elements: kernels get addresses they run fast on, and moments that share a
scale belong to one parameter, whose weights all decay or do not."""

TAKEN = "values_taken"
"""Attribute of a parameter whose values an engine took: what it holds now is whatever passed through a device slot."""

DecayRule = Callable[[str, torch.Tensor], bool]


@dataclass(frozen=True)
class Place:
    """Where one parameter lies in its block's flat vector."""

    name: str
    offset: int
    shape: torch.Size
    trainable: bool

    @property
    def end(self) -> int:
        return self.offset + self.shape.numel()


@dataclass
class FlatBlock:
    """A block's module, and the places of the parameters that it owns."""

    name: str
    module: nn.Module | None
    places: list[Place]
    shape: BlockShape
    decay_end: int
    """Parameters before this offset decay; none after it."""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """By name; their data point into a device slot while the block is there."""
    shared: dict[str, str] = field(default_factory=dict)
    """Parameters that this block uses but does not own: its name for each, and the name in the shared block."""

    def adopt(self, shared: dict[str, nn.Parameter]) -> None:
        """Uses the one copy of each shared parameter, whoever made it."""
        assert self.module is not None
        for name, shared_name in self.shared.items():
            old, new = self.parameters[name], shared[shared_name]
            self.parameters[name] = new
            for module in self.module.modules():
                for attribute, parameter in list(module.named_parameters(recurse=False)):
                    if parameter is old:
                        setattr(module, attribute, new)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Ranges of the trainable part that belong to no parameter; their gradient is zero."""
        reach = 0
        for place in sorted((place for place in self.places if place.trainable), key=lambda place: place.offset):
            if place.offset > reach:
                yield reach, place.offset
            reach = place.end
        if reach < self.shape.num_trainable:
            yield reach, self.shape.num_trainable


def decays_by_default(name: str, parameter: torch.Tensor) -> bool:
    """Matrices decay; norms and biases do not, also where a matrix holds the biases of several experts."""
    return parameter.dim() >= 2 and not name.endswith("bias")


def take_values(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Frees a parameter's memory: its values have another home now. Its shape stays."""
    parameter.data = torch.empty((), dtype=dtype, device=device).expand(parameter.shape)
    setattr(parameter, TAKEN, True)


def survey(
    model: Model, chunk_params: int, decays: DecayRule, *, needs_values: bool, share: Share | None = None
) -> list[FlatBlock]:
    """The shapes of all blocks, without their values. Shared parameters, if any, make one more block at the end.
    With `needs_values` it refuses parameters that an engine has emptied. `share` is what one of several ranks holds."""
    share = share or Share()
    built: list[tuple[BlockSource, dict[str, nn.Parameter]]] = []
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        # What load_state_dict says here: values that are read now are not kept.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        for source in model.sources():
            parameters = _shapes_of(source)
            for name, parameter in parameters.items():
                if needs_values and hasattr(parameter, TAKEN):
                    raise ConfigError(
                        f"{name} was given to an engine before, which took its values: make the modules anew, or give "
                        "functions that make them"
                    )
            built.append((source, parameters))
    _refuse_same_memory([named for _, parameters in built for named in parameters.items()])
    owners: dict[int, tuple[int, str]] = {}
    shared: dict[int, str] = {}
    for index, (_, parameters) in enumerate(built):
        for name, parameter in parameters.items():
            owner, first_name = owners.setdefault(id(parameter), (index, name))
            if owner != index:
                shared[id(parameter)] = first_name
    if not built:
        raise ConfigError("the model has no blocks")
    blocks = []
    for index, (source, parameters) in enumerate(built):
        own = {name: parameter for name, parameter in parameters.items() if id(parameter) not in shared}
        pool = "ends" if index in (0, len(built) - 1) else "layers"
        block = _lay_out(source.name, own, chunk_params, decays, pool, share)
        block.shared = {name: shared[key] for name, parameter in parameters.items() if (key := id(parameter)) in shared}
        blocks.append(block)
    if shared:
        first = {
            shared[key]: parameter for _, ps in built for parameter in ps.values() if (key := id(parameter)) in shared
        }
        blocks.append(_lay_out("shared", first, chunk_params, decays, "shared", share))
    return blocks


def _refuse_same_memory(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Two parameters that begin at one address, tied by `.data`, would each be given a home and drift apart."""
    at: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in parameters:
        if parameter.is_meta or not parameter.numel() or hasattr(parameter, TAKEN):
            continue
        other, found = at.setdefault(parameter.data_ptr(), (name, parameter))
        if found is not parameter:
            raise ConfigError(
                f"{other} and {name} lie in the same memory but are two parameters, which would be trained apart: tie "
                "them by giving both modules the same nn.Parameter, not the same .data"
            )


def _shapes_of(source: BlockSource) -> dict[str, nn.Parameter]:
    try:
        return source.build()[1]
    except GreedySnakeError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{source.name} could not be made ({type(error).__name__}: {error}): its function is called twice, first "
            "under torch.device('meta') for the shapes: let it work there, or give the module itself"
        ) from error


def _lay_out(
    name: str, parameters: dict[str, nn.Parameter], chunk_params: int, decays: DecayRule, pool: str, share: Share
) -> FlatBlock:
    """Decaying parameters first, then the other trainable ones, then, from a chunk of their own, the frozen ones."""
    for parameter_name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ConfigError(f"{parameter_name} is {parameter.dtype}: parameters must be floating-point numbers")
        if parameter.is_inference():
            raise ConfigError(
                f"{parameter_name} was made under torch.inference_mode(), so it cannot be trained: make the modules "
                "outside of it, and the engine that is given functions for them"
            )
    trainable = {key: value for key, value in parameters.items() if value.requires_grad}
    decaying = [key for key, value in trainable.items() if decays(key, value)]
    others = [key for key in trainable if key not in set(decaying)]
    frozen = [key for key in parameters if key not in trainable]
    places: list[Place] = []
    decay_end, end = 0, 0
    for key in (*decaying, *others):
        places.append(Place(key, end, parameters[key].shape, True))
        end = align(places[-1].end)
        if key in decaying:
            decay_end = end
    num_trainable, start = end, pad(end, share.num_ranks)
    end = start
    for key in frozen:
        places.append(Place(key, end, parameters[key].shape, False))
        end = align(places[-1].end)
    shape = block_shape(name, num_trainable, end - start, chunk_params, pool, share)
    return FlatBlock(name, None, places, shape, decay_end)


def align(offset: int) -> int:
    """Where the next parameter may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
