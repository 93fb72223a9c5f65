"""Ops that touch the same bytes are kept apart by what they wait for, and not by luck: on a GPU, too, where lanes are
streams that run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import greedysnake as gs
import together
from greedysnake.ops import LANES, Kind, Lane, Op, Resource
from races import MEMORY, Period, Traced, Waits, as_linked, races, recorded, relinked, without
from reference import OPTIMIZER, Batch, make_batches, make_parts, num_targets
from test_bitwise import Poison

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 10
LARGE_STEP = 8
"""Has more micro-batches than any before it: memory changes hands."""
CLIP = 20.0
SPIKES = {3: float("nan"), 7: 1e3}
"""Factors of the loss. Step 3 is skipped; both are steps with tentative updates where there may be any."""
CLIPPED = {"max_grad_norm": CLIP}
OPTIMISTIC = {"max_grad_norm": CLIP, "optimistic": True}
ONE_SLOT = gs.Slots(1, 1, 1, 1, 1)
LOWER_HALF = ("embed", "layers.0", "layers.1.up")

Options = dict[str, object]
CONFIGURATIONS: dict[str, tuple[Options, Options]] = {
    # Placement, and everything else.
    "nothing kept": ({}, {"alpha": 0.25}),
    "weights kept": ({"weights_device": 1}, {"alpha": 0.0}),
    "half of the weights kept": ({"weights_device": 0.5, "weights_ram": 0.4, "optimizer_ram": 0.3}, {"alpha": 0.4}),
    "half of the graphs kept": ({"graphs_device": 0.5}, {"alpha": 0.5}),
    "clipped": ({"weights_device": 0.5, "gradients_ram": 0.5}, CLIPPED),
    "optimistic": ({"gradients_ram": 0.5}, OPTIMISTIC),
    "optimistic, half of the weights kept": ({"weights_device": 0.5, "weights_ram": 0.6}, OPTIMISTIC),
    "activations everywhere": (
        {"activations_device": 0.3, "activations_ram": 0.3, "gradients_device": 0, "gradients_ram": 0},
        {"alpha": 0.5, "frozen": LOWER_HALF, "tied": False, "dtype": "float32"},
    ),
    "layers in pairs": ({}, {"layers_per_block": 2, "num_layers": 8, "moments": "int8"}),
    "one slot of each": (
        {"activations_ram": 0, "gradients_device": 0, "gradients_ram": 0.5},
        {"slots": ONE_SLOT, "alpha": 0.5},
    ),
    "one slot of each, half of the weights kept": (
        {"weights_device": 0.5, "weights_ram": 1, "optimizer_ram": 0.5},
        {"slots": ONE_SLOT, "alpha": 0.5},
    ),
    "horizontal": ({"activations_ram": 0}, {"schedule": "horizontal", "alpha": 0.5}),
    "horizontal, clipped": ({}, {"schedule": "horizontal", **CLIPPED}),
}
FEWEST_CONFLICTS = 4000
"""Pairs of ops that have to be kept apart, in each of the configurations: 4.500 to 13.000."""


def batches(step: int, num_micro_batches: int = 3) -> list[Batch]:
    made = make_batches(num_micro_batches, step)
    for batch in made:
        batch["factor"] = torch.tensor(SPIKES.get(step, 1.0))
    return made


def train(
    directory: str | Path,
    placement: Options,
    *,
    layers_per_block: int = 1,
    moments: str = "float32",
    num_layers: int = 4,
    tied: bool = True,
    frozen: Iterable[str] = ("layers.2.up",),
    **options: object,
) -> gs.Engine:
    """Steps of all kinds, with calls between them after which the next one is not what was written ahead."""
    parts = make_parts(uneven=True, tied=tied, frozen=tuple(frozen), dropout=0.1, num_layers=num_layers)
    model = gs.Sequential(
        parts.embed, parts.layers, Poison(parts.head), num_targets=num_targets, layers_per_block=layers_per_block
    )
    defaults = {"storage": [directory], "ram": "64MiB", "chunk_params": 4096, "placement": gs.Placement(**placement)}
    with gs.Engine(model, replace(OPTIMIZER, moments=moments), **defaults | options) as engine:  # type: ignore[arg-type]
        for step in range(NUM_STEPS):
            engine.step(batches(step, 5 if step == LARGE_STEP else 3))
            if step == 1:
                engine.evaluate(batches(0, 2))
            if step == 4:
                engine.flush()
            if step == 5:
                engine.save()
    return engine


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Period]]:
    """What was recorded in a configuration, once for all tests."""
    made: dict[str, list[Period]] = {}

    def get(name: str) -> list[Period]:
        if name not in made:
            placement, options = CONFIGURATIONS[name]
            with recorded() as periods:
                engine = train(tmp_path_factory.mktemp("store"), placement, **options)  # type: ignore[arg-type]
            num_revoked = 2 if "optimistic" in options else 0
            assert (engine.num_skipped, engine.num_revoked) == (1, num_revoked), "the steps are not what they are for"
            made[name] = periods
        return made[name]

    return get


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_ops_that_touch_the_same_are_kept_apart(name: str, record: Callable[[str], list[Period]]) -> None:
    periods = record(name)
    found = [race for period in periods for race in races(period)]
    assert not found, "\n".join([f"{len(found)} races, among them", *found[:20]])
    assert sum(len(period.conflicts) for period in periods) >= FEWEST_CONFLICTS
