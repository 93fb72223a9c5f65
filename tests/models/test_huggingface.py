"""Models of Hugging Face train in the engine as they do whole in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

import greedysnake as gs
from families import FAMILIES, OPTIMIZER, make_batches, make_config, train_whole, whole_model
from reference import Batch

NUM_STEPS = 3
TOLERANCE = 1e-5
"""Of a tensor's largest value: the same sums in another order."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_the_whole_model(family: str, tmp_path: Path) -> None:
    """Plain, padded and packed micro-batches in one step; packed documents as if each had been alone."""
    # Packed, Hugging Face's gpt-oss lets documents see each other, and one by one they have other balancing losses.
    kinds = 2 if family == "gpt_oss balanced" else 3

    def batches(step: int) -> list[Batch]:
        return make_batches(step)[:kinds]

    model = gs.load_model(make_config(family), seed=1, chunk_tokens=5)
    with gs.Engine(
        model,
        OPTIMIZER,
        storage=[tmp_path / "store"],
        ram="64MiB",
        dtype="float32",
        max_grad_norm=1.0,
        chunk_params=4096,
    ) as engine:
        start = dict(engine.named_parameters())
        whole = whole_model(model, start)
        results = [engine.step(batches(step)) for step in range(NUM_STEPS)]
        found = dict(engine.named_parameters())
    wanted = train_whole(whole, batches, NUM_STEPS, apart="balanced" not in family)
    assert [result.loss for result in results] == pytest.approx(wanted.losses, rel=TOLERANCE)
    assert [result.grad_norm for result in results] == pytest.approx(wanted.norms, rel=1e-4)
    assert {model.name_in_model(name) for name in found} == set(wanted.parameters)
    for name, value in found.items():
        expected = wanted.parameters[model.name_in_model(name)]
        difference = float((value - expected).abs().max())
        assert difference <= TOLERANCE * max(1.0, float(expected.abs().max())), name
