"""Makes the blocks of a model one by one and moves their values to their homes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from greedysnake.errors import ConfigError
from greedysnake.models.sequential import Model
from greedysnake.runtime.flat import FlatBlock, take_values
from greedysnake.runtime.ranks import Ranks
from greedysnake.runtime.state import ModelState


def build_blocks(
    model: Model,
    blocks: Sequence[FlatBlock],
    state: ModelState,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    device: torch.device,
    resume: bool,
) -> None:
    """Gives every block its module, whose parameters are left empty; buffers go to the device. With `resume` the
    values come from the checkpoint instead. Every rank makes the whole model and keeps a part of it: the parts must be
    of one model."""
    shared: dict[str, torch.nn.Parameter] = {}
    samples: dict[str, bytes] = {}
    for number, source in enumerate(model.sources()):
        block = blocks[number]
        module, parameters = source.build(values=not resume)
        _require_parameters(block, parameters)
        for name, shared_name in block.shared.items():
            shared.setdefault(shared_name, parameters[name])
        if not resume:
            state.fill(number, parameters)
            if ranks.count > 1:
                samples |= {name: _sample(parameter) for name, parameter in parameters.items()}
        block.module, block.parameters = module, parameters
        for name, parameter in parameters.items():
            if name not in block.shared:
                take_values(parameter, dtype, device)
        module.to(device)
        _return_free_memory()
    if shared:
        block = blocks[-1]
        block.parameters = {place.name: shared[place.name] for place in block.places}
        if not resume:
            state.fill(len(blocks) - 1, block.parameters)
        for parameter in block.parameters.values():
            take_values(parameter, dtype, device)
        _return_free_memory()
        for block in blocks[:-1]:
            block.adopt(shared)
    if resume:
        state.read_ram_parts()
    _require_same(samples, ranks)


def _require_same(samples: Mapping[str, bytes], ranks: Ranks) -> None:
    for rank, others in enumerate(ranks.exchange("Engine()", dict(samples))):
        for name, sample in samples.items():
            if others.get(name) != sample:
                raise ConfigError(
                    f"{name} has other values on rank {rank} than on rank {ranks.rank}: seed all ranks alike before "
                    "the model is made (torch.manual_seed), or load the same files"
                )


def _sample(parameter: torch.Tensor) -> bytes:
    values = parameter.detach().reshape(-1)
    few = values[:: max(1, len(values) // NUM_SAMPLED)][:NUM_SAMPLED]
    return few.float().cpu().numpy().tobytes()


NUM_SAMPLED = 8
"""Values by which ranks notice that they were not given the same model."""


def _require_parameters(block: FlatBlock, parameters: Mapping[str, torch.Tensor]) -> None:
    """The second time a block is built it must have the parameters it had the first time."""
    for place in block.places:
        found = parameters.get(place.name)
        if found is None or found.shape != place.shape:
            shape = None if found is None else tuple(found.shape)
            raise ConfigError(
                f"{place.name} was {tuple(place.shape)} when the model's shapes were read and is {shape} when it is "
                "built: its function must make the same module each time"
            )


def _return_free_memory() -> None:
    """Gives back to the system what malloc keeps for later. glibc keeps freed tensors of up to 32 MiB, so a model that
    is made and freed layer by layer would still grow the process by most of its size."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
