"""Ops that touch the same bytes are kept apart by what they wait for, not by luck: on a GPU, too, where lanes are streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import greedysnake as gs
from greedysnake.errors import GreedySnakeError
from greedysnake.ops import Kind, Lane, Op
from races import Period, Recorder, Traced, conflicts, linked, races, relinked
from reference import OPTIMIZER, Batch, make_batches, make_parts, num_targets
from test_bitwise import Poison

pytestmark = pytest.mark.usefixtures("one_thread")

SPIKES = {3: float("nan"), 7: 1e3}
CLIP = 20.0

CONFIGURATIONS: dict[str, dict[str, object]] = {
    "nothing kept": {"alpha": 0.25},
    "kept weights": {"placement": gs.Placement(weights_device=1)},
    "half of the weights kept, some in ram": {
        "alpha": 0.4, "placement": gs.Placement(weights_device=0.5, weights_ram=0.4, optimizer_ram=0.3)
    },
    "half of the graphs kept": {"alpha": 0.5, "placement": gs.Placement(graphs_device=0.5)},
    "optimistic": {"max_grad_norm": CLIP, "optimistic": True, "placement": gs.Placement(gradients_ram=0.5)},
    "optimistic, kept": {"max_grad_norm": CLIP, "optimistic": True, "placement": gs.Placement(weights_device=0.5, weights_ram=0.6)},
    "clipped": {"max_grad_norm": CLIP, "placement": gs.Placement(weights_device=0.5, gradients_ram=0.5)},
    "act": {"alpha": 0.5, "placement": gs.Placement(activations_device=0.3, activations_ram=0.3, gradients_device=0.0, gradients_ram=0)},
    "pairs": {"layers_per_block": 2, "num_layers": 8},
    "one slot": {"slots": gs.Slots(1,1,1,1,1), "alpha": 0.5, "placement": gs.Placement(activations_ram=0, gradients_device=0,gradients_ram=0.5)},
    "one slot, ram": {"slots": gs.Slots(1,1,1,1,1), "alpha": 0.5, "placement": gs.Placement(weights_device=0.5,weights_ram=1, optimizer_ram=0.5)},
    "horizontal": {"schedule": "horizontal", "alpha": 0.5, "placement": gs.Placement(activations_ram=0)},
    "horizontal, clipped": {"schedule": "horizontal", "max_grad_norm": CLIP},
}


def batches(step: int) -> list[Batch]:
    made = make_batches(5 if step == 8 else 3, step)
    for batch in made:
        batch["factor"] = torch.tensor(SPIKES.get(step, 1.0))
    return made


def train(directory: Path, *, layers_per_block: int = 1, num_layers: int = 4, **options: object) -> None:
    parts = make_parts(uneven=True, tied=True, frozen=["layers.2.up"], dropout=0.1, num_layers=num_layers)
    model = gs.Sequential(
        parts.embed, parts.layers, Poison(parts.head), num_targets=num_targets, layers_per_block=layers_per_block
    )
    with gs.Engine(
        model, OPTIMIZER, **{"storage": [directory], "ram": "64MiB", "chunk_params": 4096, **options}
    ) as engine:
        for step in range(10):
            engine.step(batches(step))
            if step == 1:
                engine.evaluate(batches(0)[:2])
            if step == 4:
                engine.flush()
            if step == 8:
                engine.save()
        print(engine.num_revoked, engine.num_skipped)
