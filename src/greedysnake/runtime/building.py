"""Makes the blocks of a model one by one and moves their values to their homes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from greedysnake.errors import ConfigError
from greedysnake.models.sequential import Model
from greedysnake.runtime.chunking import ChunkFilling
from greedysnake.runtime.flat import FlatBlock, Place, take_values
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
        with nullcontext() if resume else state.filling(number) as filling:
            taking = _Taking(block, filling, samples if ranks.count > 1 else None, dtype, device)
            block.module, block.parameters = source.build(values=not resume, made=taking)
            for place in block.places:
                _require_same_shape(place, block.parameters.get(place.name))
        for name, shared_name in block.shared.items():
            shared.setdefault(shared_name, block.parameters[name])
        block.module.to(device)
    if shared:
        block = blocks[-1]
        block.parameters = {place.name: shared[place.name] for place in block.places}
        if not resume:
            with state.filling(len(blocks) - 1) as filling:
                filling.take(block.parameters)
        for parameter in block.parameters.values():
            take_values(parameter, dtype, device)
        _return_free_memory()
        for block in blocks[:-1]:
            block.adopt(shared)
    if resume:
        state.read_ram_parts()
    _require_same(samples, ranks)


class _Taking:
    """Takes what was made of a block: gives its values to their homes and empties its parameters, before the rest of it
    is made."""

    def __init__(
        self,
        block: FlatBlock,
        filling: ChunkFilling | None,
        samples: dict[str, bytes] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._block = block
        self._places = {place.name: place for place in block.places}
        self._filling = filling
        self._samples = samples
        self._dtype = dtype
        self._device = device

    def __call__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        for name in parameters.keys() & self._places.keys():
            _require_same_shape(self._places[name], parameters[name])
        if self._filling is not None:
            self._filling.take(parameters)
            if self._samples is not None:
                self._samples.update((name, _sample(parameter)) for name, parameter in parameters.items())
        for name, parameter in parameters.items():
            if name not in self._block.shared:
                take_values(parameter, self._dtype, self._device)
        _return_free_memory()


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


def _require_same_shape(place: Place, found: torch.Tensor | None) -> None:
    """The second time a block is built it must have the parameters it had the first time."""
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
