"""The same random numbers in a forward and its recompute, whatever the order of the ops."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


def block_seed(seed: int, step: int, block: int, micro_batch: int) -> int:
    """What the random numbers of one block for one micro-batch of one step start from."""
    return (((step * 1_000_003 + block) * 1_000_003 + micro_batch) * 1_000_003 + seed) & 0x7FFF_FFFF_FFFF_FFFF


class Randomness:
    """Sets what a block draws from: torch's generators, those that its modules hold, Python's `random` and numpy's."""

    def __init__(self, modules: Sequence[nn.Module | None], device: torch.device, seed: int) -> None:
        self._seed = seed
        self._generators = [_generators_of(module, device) for module in modules]

    def start(self, step: int, block: int, micro_batch: int) -> None:
        number = block_seed(self._seed, step, block, micro_batch)
        for generator in self._generators[block]:
            generator.manual_seed(number)
        # Of every block: one that has not drawn from them so far may do so for the next batch.
        random.seed(number)
        np.random.seed(number & 0xFFFF_FFFF)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Blocks draw from streams of their own; the user's random numbers go on afterwards as if nothing had been
    drawn."""
    state, state_of_numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    # What is made in inference mode cannot be trained with later.
    with torch.inference_mode(False), torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(state_of_numpy)


def _generators_of(module: nn.Module | None, device: torch.device) -> list[torch.Generator]:
    """torch's own, and those among the attributes of a block's modules."""
    found = [torch.default_generator]
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        found.append(torch.cuda.default_generators[index])
    for part in module.modules() if module is not None else ():
        found += [value for value in vars(part).values() if isinstance(value, torch.Generator)]
    return found
