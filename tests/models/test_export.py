"""A trained model goes out as a folder of Hugging Face, and comes in from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import greedysnake as gs
from families import FAMILIES, OPTIMIZER, make_batches, make_config

EXPORTED = [name for name in FAMILIES if "balanced" not in name]


def make_engine(model: Any, folder: Path, **options: object) -> gs.Engine:
    return gs.Engine(
        model,
        OPTIMIZER,
        **{"storage": [folder / "store"], "ram": "64MiB", "dtype": "float32", "chunk_params": 4096, **options},
    )  # type: ignore[arg-type]


def load_whole(folder: Path, attn_implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attn_implementation, dtype=torch.float32)


def mean_loss(model: Any) -> float:
    batch = make_batches(7)[0]
    with torch.no_grad():
        return float(model(**batch, use_cache=False).loss)


@pytest.mark.parametrize("family", EXPORTED)
def test_an_exported_family_has_the_same_loss_and_loads_again(family: str, tmp_path: Path) -> None:
    model = gs.load_model(make_config(family), seed=3)
    with make_engine(model, tmp_path) as engine:
        engine.step(make_batches(0))
        wanted = engine.evaluate(make_batches(7)[:1])
        trained = dict(engine.named_parameters())
        gs.export_model(engine, model, tmp_path / "out", dtype="float32", max_shard_bytes="30KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert mean_loss(load_whole(tmp_path / "out", model.attn_implementation)) == pytest.approx(wanted, rel=1e-6)
    again = gs.load_model(tmp_path / "out")
    with make_engine(again, tmp_path / "again") as engine:
        found = dict(engine.named_parameters())
        assert engine.evaluate(make_batches(7)[:1]) == pytest.approx(wanted, rel=1e-6)
    assert found.keys() == trained.keys()
    for name, value in trained.items():
        assert torch.equal(found[name], value), name
