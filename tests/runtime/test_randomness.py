"""Layers that draw random numbers, from wherever: the recompute draws the same, and the user's go on undisturbed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import greedysnake as gs
from reference import OPTIMIZER, Layer, Parts, make_batches, make_parts

pytestmark = pytest.mark.usefixtures("one_thread")


class Noisy(nn.Module):
    """A layer whose output is scaled by a random number, which it notes."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner = Layer(32, 96)
        self.draw = draw
        self.drawn: list[float] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.drawn.append(self.draw())
        return self.inner(hidden) * (0.5 + self.drawn[-1])


class OwnGenerator(Noisy):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(lambda: float(torch.rand((), generator=self.generator)))
        self.generator = torch.Generator()


SOURCES: dict[str, Callable[[], Noisy]] = {
    "torch": lambda: Noisy(lambda: float(torch.rand(()))),
    "random": lambda: Noisy(random.random),
    "numpy": lambda: Noisy(lambda: float(np.random.rand())),
    "own generator": OwnGenerator,
}


@pytest.mark.parametrize("name", SOURCES)
def test_forward_and_recompute_draw_the_same(name: str, tmp_path: Path) -> None:
    parts = make_parts()
    layer = SOURCES[name]()
    parts = Parts(parts.embed, [parts.layers[0], layer, parts.layers[1]], parts.head)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[union-attr,index]
    with gs.Engine(parts.sequential(), OPTIMIZER, storage=[tmp_path], ram="64MiB", chunk_params=4096) as engine:
        for step in range(2):
            layer.drawn.clear()
            engine.step(make_batches(3, step))
            forward, recompute = layer.drawn[:3], layer.drawn[3:]
            assert len(set(forward)) == 3
            assert recompute == forward[::-1] or recompute == forward
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[union-attr,index]
    assert after == before
