"""Which parameters decay."""

from __future__ import annotations

import pytest
import torch

from greedysnake.runtime.flat import decays_by_default


@pytest.mark.parametrize(
    ("name", "shape", "decays"),
    [
        ("layers.0.mlp.up_proj.weight", (4, 4), True),
        ("embed.wte.weight", (4, 4), True),
        ("layers.0.mlp.experts.gate_up_proj", (2, 4, 4), True),
        ("layers.0.input_layernorm.weight", (4,), False),
        ("layers.0.mlp.up_proj.bias", (4,), False),
        ("layers.0.mlp.experts.gate_up_proj_bias", (2, 4), False),
    ],
)
def test_matrices_decay_and_norms_and_biases_do_not(name: str, shape: tuple[int, ...], decays: bool) -> None:
    assert decays_by_default(name, torch.zeros(shape)) is decays
