"""Turns values that come parameter by parameter into chunks of a block, and back. Knows no homes and no drives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping

import torch

from greedysnake.errors import ConfigError
from greedysnake.runtime.flat import FlatBlock, Place
from greedysnake.shapes import Chunk


class ChunkFilling:
    """Collects the fp32 values of a block's chunks, and gives each away as soon as it is complete: of a block of many
    layers that are made one after the other, few chunks are in memory at once."""

    def __init__(self, block: FlatBlock, put: Callable[[int, torch.Tensor], None]) -> None:
        """`put` is given the number of a chunk and its values, which are there no longer than the call."""
        self._block = block
        self._put = put
        self._starts = [chunk.start for chunk in block.shape.chunks]
        self._begun: dict[int, torch.Tensor] = {}
        """Chunks of which something is there, each in a vector that any chunk fits into."""
        self._spare: list[torch.Tensor] = []
        """Vectors of chunks that were given away: memory that nobody has touched yet costs as much as filling it."""
        self._missing = [0] * len(self._starts)
        """Elements that are still to come, of each chunk."""
        for place in block.places:
            for index, _, values in self._overlaps(place):
                self._missing[index] += len(values)
        for index, missing in enumerate(self._missing):
            if not missing:  # it is all padding
                self._begin(index)
                self._give(index)

    def take(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Values of some of the block's parameters, each once."""
        places = [place for place in self._block.places if place.name in parameters]
        for place in places:
            if parameters[place.name].is_meta:
                raise ConfigError(
                    f"{place.name} is on the meta device and has no values: give a function that makes the module"
                )
        for place in places:
            flat = parameters[place.name].detach().reshape(-1)
            for index, into, values in self._overlaps(place):
                whole = self._begun[index] if index in self._begun else self._begin(index)
                whole[into : into + len(values)].copy_(flat[values.start : values.stop])
                self._missing[index] -= len(values)
                if not self._missing[index]:
                    self._give(index)

    @property
    def is_done(self) -> bool:
        return not any(self._missing)

    def _begin(self, index: int) -> torch.Tensor:
        chunks = self._block.shape.chunks
        if not self._spare:
            largest = max(chunk.num_params for chunk in chunks)
            self._spare.append(torch.empty(largest, dtype=torch.float32, device="cpu"))
        whole = self._spare.pop()
        whole[: chunks[index].num_params].zero_()
        self._begun[index] = whole
        return whole

    def _give(self, index: int) -> None:
        whole = self._begun.pop(index)
        self._put(index, whole[: self._block.shape.chunks[index].num_params])
        self._spare.append(whole)

    def _overlaps(self, place: Place) -> Iterator[tuple[int, int, range]]:
        """Chunks that a parameter lies in: where in the chunk, and which of its elements."""
        chunks = self._block.shape.chunks
        for index in range(max(0, bisect_right(self._starts, place.offset) - 1), len(chunks)):
            if chunks[index].start >= place.end:
                return
            into, elements = overlap(place, chunks[index])
            if elements:
                yield index, into, elements


class ParameterCollecting:
    """Puts the parameters of a block together again from chunks, in any order, those of all ranks."""

    def __init__(self, block: FlatBlock) -> None:
        self._places = block.places
        self._begun: dict[str, torch.Tensor] = {}
        self._missing = {place.name: place.shape.numel() for place in block.places}

    def add(self, chunk: Chunk, master: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Gives the parameters (name, fp32 values) that are complete with this one, and keeps none of them."""
        for place in self._places:
            start, elements = overlap(place, chunk)
            if not elements:
                continue
            if place.name not in self._begun:
                self._begun[place.name] = torch.empty(place.shape.numel(), dtype=torch.float32, device="cpu")
            flat = self._begun[place.name]
            flat[elements.start : elements.stop].copy_(master[start : start + len(elements)])
            self._missing[place.name] -= len(elements)
            if not self._missing[place.name]:
                del flat
                yield place.name, self._begun.pop(place.name).view(place.shape)


def overlap(place: Place, chunk: Chunk) -> tuple[int, range]:
    """Where in a chunk a parameter lies, and which of its elements; none where it does not."""
    first, last = max(place.offset, chunk.start), min(place.end, chunk.start + chunk.num_params)
    return first - chunk.start, range(first - place.offset, last - place.offset)
