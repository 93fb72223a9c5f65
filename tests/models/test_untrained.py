"""What belongs to a model but is not trained: the bias by which GLM 4 and DeepSeek V3 choose their experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import greedysnake as gs
from families import SIZES
from greedysnake.exporting import export_run
from training import train, values_in

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
VALUES = [7.501, 7.5, 7.502, 7.503]
"""The same number in bfloat16, so that other experts would be chosen."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    config = Glm4MoeConfig(
        **SIZES | {"vocab_size": 264, "hidden_size": 16, "num_hidden_layers": 2},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        head_dim=8,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.state_dict()[BIAS].copy_(torch.tensor(VALUES))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def values_of(folder: Path, **training: Any) -> dict[str, Any]:
    values = values_in(folder.parent, **training)
    return {
        **values,
        "model": {"tokenizer": "bytes", "path": str(folder)},
        "data": {**values["data"], "packing": False},
    }


def test_it_is_the_same_after_a_resume(folder: Path, tmp_path: Path) -> None:
    ids = torch.arange(24).reshape(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"storage": [tmp_path / "store"], "ram": "64MiB", "dtype": "float32"}
    with gs.Engine(gs.load_model(folder), gs.AdamW(lr=1e-2), **options) as engine:
        engine.step([batch])
        wanted = engine.evaluate([batch])
        engine.save()
    with gs.Engine(gs.load_model(folder), gs.AdamW(lr=1e-2), **options, resume=True) as engine:
        assert engine.evaluate([batch]) == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_goes_out_as_it_came_in_while_parameters_have_the_dtype_asked_for(dtype: str, folder: Path) -> None:
    from safetensors.torch import load_file

    train(values_of(folder, max_steps=2))
    export_run(folder.parent / "run", folder.parent / "out", dtype=dtype)
    found = load_file(folder.parent / "out" / "model.safetensors")
    assert found[BIAS].tolist() == pytest.approx(VALUES) and found[BIAS].dtype == torch.float32
    others = {value.dtype for name, value in found.items() if name != BIAS}
    assert others == {getattr(torch, dtype)}


def test_a_run_whose_model_lost_its_files_does_not_go_on_without_it(folder: Path) -> None:
    train(values_of(folder, max_steps=2))
    (folder / "model.safetensors").unlink()
    message = r"model\.path: .* has no safetensors any more, and .*e_score_correction_bias come from there"
    with pytest.raises(gs.ConfigError, match=message):
        train(values_of(folder, max_steps=3))
    with pytest.raises(gs.ConfigError, match=message):
        export_run(folder.parent / "run", folder.parent / "out")
    assert not (folder.parent / "out").exists()
