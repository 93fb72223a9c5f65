"""Where the values of a Hugging Face model come from, what it takes to load them, and what is refused."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

import child
import greedysnake as gs
from families import OPTIMIZER, make_batches, make_config
from greedysnake.models.loading import Files
from greedysnake.threads import torch_threads

SAVED = ["llama", "llama tied", "gpt2", "opt", "gpt_neox", "gemma3", "mixtral", "qwen3_moe", "gpt_oss"]


def values_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What an engine starts from, by Hugging Face's names."""
    with gs.Engine(model, OPTIMIZER, storage=[folder], ram="64MiB", dtype="float32", chunk_params=4096) as engine:
        return {model.name_in_model(name): value for name, value in engine.named_parameters()}


def make_whole(family: str, **changes: object) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(make_config(family, **changes), dtype=torch.float32)


@pytest.mark.parametrize("family", SAVED)
def test_values_are_those_that_transformers_saved(family: str, tmp_path: Path) -> None:
    whole = make_whole(family)
    whole.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    found = values_of(gs.load_model(tmp_path / "model"), tmp_path / "store")
    wanted = dict(whole.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_file_is_opened_once_for_all_that_a_block_needs_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open one is to read its whole table, which has a thousand lines where every expert is a tensor of its own."""
    make_whole("qwen3_moe").save_pretrained(tmp_path / "model")
    model = gs.load_model(tmp_path / "model")
    opened: list[str] = []
    safe_open = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda path, **how: opened.append(path) or safe_open(path, **how))
    values_of(model, tmp_path / "store")
    assert len(opened) == model.config.num_hidden_layers + 2


def test_the_table_of_files_is_not_copied_for_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_whole("qwen3_moe").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    model = gs.load_model(tmp_path / "model")
    copied: list[Files] = []
    monkeypatch.setattr(Files, "__deepcopy__", lambda files, _: copied.append(files) or files, raising=False)
    values_of(model, tmp_path / "store")
    assert not copied


def test_one_file_beside_the_index_of_earlier_shards_is_the_one_that_is_read(tmp_path: Path) -> None:
    """What save_pretrained leaves where a model in shards was before; shards that were copied there stay as well."""
    make_whole("llama").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    shards = {path: path.read_bytes() for path in (tmp_path / "model").glob("model-*.safetensors")}
    whole = make_whole("llama")
    torch.nn.init.ones_(whole.lm_head.weight)
    whole.save_pretrained(tmp_path / "model")
    for name in ("without", "with"):
        found = values_of(gs.load_model(tmp_path / "model"), tmp_path / f"{name} shards")
        assert torch.equal(found["lm_head.weight"], whole.lm_head.weight)
        for path, content in shards.items():
            path.write_bytes(content)


def test_files_in_bfloat16_and_without_the_prefix_of_the_model_are_read(tmp_path: Path) -> None:
    """As the first GPT-2 was published: one file, of the model without its head."""
    whole = make_whole("gpt2").to(torch.bfloat16)
    whole.transformer.save_pretrained(tmp_path / "model")
    found = values_of(gs.load_model(tmp_path / "model"), tmp_path / "store")
    for name, value in whole.named_parameters():
        assert torch.equal(found[name], value.float()), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt projected", "gemma3", "mixtral", "gpt_oss", "gpt_neox"])
def test_a_model_without_weights_starts_as_transformers_starts_it(family: str, tmp_path: Path) -> None:
    """The same distribution for every parameter, from other random numbers."""
    found = values_of(gs.load_model(make_config(family), seed=4), tmp_path / "store")
    for name, parameter in make_whole(family).named_parameters():
        wanted = parameter.detach()
        value = found[name]
        assert value.shape == wanted.shape
        if wanted.numel() == 1 or wanted.std() == 0:
            assert torch.equal(value, wanted), name
            continue
        error = 5 / math.sqrt(wanted.numel())  # both are samples: five sigmas of their difference
        assert float(value.std() / wanted.std()) == pytest.approx(1, abs=error), name
        assert float(value.mean() / wanted.std()) == pytest.approx(0, abs=error), name


def test_values_depend_on_the_seed_alone(tmp_path: Path) -> None:
    """Not on the order in which blocks are made, nor on random numbers drawn elsewhere."""
    config = make_config("llama")
    first = values_of(gs.load_model(config, seed=1), tmp_path / "first")
    torch.manual_seed(99)
    model = gs.load_model(config.to_dict(), seed=1)
    before = torch.get_rng_state()
    backwards = [source.build()[1] for source in reversed(list(model.sources()))]
    assert torch.equal(torch.get_rng_state(), before)
    for parameters in backwards:
        for name, value in parameters.items():
            assert torch.equal(value, first[model.name_in_model(name)]), name
    other = values_of(gs.load_model(config, seed=2), tmp_path / "other")
    assert not torch.equal(other["lm_head.weight"], first["lm_head.weight"])
    layers = [first[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in range(2)]
    assert not torch.equal(*layers)


def test_rotary_frequencies_are_computed_although_no_file_has_them() -> None:
    model = gs.load_model(make_config("llama"))
    embed, _ = next(iter(model.sources())).build()
    (frequencies,) = [buffer for name, buffer in embed.named_buffers() if name.endswith(".inv_freq")]
    assert torch.equal(frequencies, 10000.0 ** -(torch.arange(0, 8, 2) / 8))


def test_a_resumed_engine_does_not_read_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_whole("mixtral").save_pretrained(tmp_path / "model")
    model = gs.load_model(tmp_path / "model")
    options: dict[str, Any] = {"storage": [tmp_path / "store"], "ram": "64MiB", "dtype": "float32"}
    with gs.Engine(model, OPTIMIZER, **options) as engine:
        engine.step(make_batches(0))
        engine.save()
        wanted = engine.step(make_batches(1)).loss
    monkeypatch.setattr("greedysnake.models.loading.Files.read", pytest.fail)
    with gs.Engine(model, OPTIMIZER, **options, resume=True) as engine:
        assert engine.step(make_batches(1)).loss == wanted


# Memory


def check_memory(folder: Path, num_layers: int, hidden: int, ram: str) -> None:
    found = child.call("model_memory", "measure", str(folder), num_layers, hidden, ram, timeout_s=900)
    assert isinstance(found, dict)
    print({name: f"{count / 1e6:.0f} MB" for name, count in found.items()})
    # What torch and the C library keep for themselves is 20 to 50 MB, as much as a small model's budget.
    assert found["made"] < 0.7 * found["model"]
    assert found["loaded"] < 0.7 * found["model"]


def test_a_model_larger_than_the_memory_it_gets_is_loaded_trained_and_exported(tmp_path: Path) -> None:
    check_memory(tmp_path, 60, 320, "28MiB")


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_model_of_a_gigabyte_is_loaded_trained_and_exported(tmp_path: Path) -> None:
    check_memory(tmp_path, 64, 768, "96MiB")


# What is refused


def refused(source: object) -> str:
    with pytest.raises(gs.ConfigError) as caught:
        gs.load_model(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gemma3n_text"}, "other roads"),
        ({"model_type": "zamba2"}, "other roads"),
        ({"model_type": "mllama"}, "does not go through"),
        ({"model_type": "gemma3"}, "more than one stack"),
        ({"model_type": "t5"}, "more than one stack"),
        ({"model_type": "bloom", "n_layer": 2}, "return a tuple"),
        ({"model_type": "bert", "num_hidden_layers": 2}, "not causal"),
        ({"model_type": "opt", "num_hidden_layers": 2, "layerdrop": 0.1}, "layerdrop is 0.1"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "no such type"}, "model_type is 'no such type'"),
        ({"hidden_size": 8}, "model_type is None"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "llama configuration"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ],
    ids=lambda value: value.get("model_type", "none") if isinstance(value, dict) else "",
)
def test_a_configuration_that_cannot_be_trained_is_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    assert reason in refused(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_size", 63), ("num_attention_heads", 0), ("num_attention_heads", 3), ("intermediate_size", 1.5)),
        *(("rms_norm_eps", "abc"), ("num_hidden_layers", "abc"), ("attention_dropout", "abc"), ("dtype", "foo")),
        *(("initializer_range", -1), ("initializer_range", -1.0), ("tie_word_embeddings", "maybe"), ("id2label", "x")),
    ],
)
def test_a_wrong_value_is_one_sentence_in_a_configuration_and_in_a_folder(
    key: str, value: object, tmp_path: Path
) -> None:
    values = {**make_config("llama").to_dict(), key: value}
    refused(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "cannot be" in refused(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "gpt_oss"])
def test_sizes_that_do_not_fit_together_are_found_without_the_memory_for_them(family: str) -> None:
    assert "RuntimeError in model.layers.0.self_attn" in refused(make_config(family, num_key_value_heads=3))


def test_a_model_that_cannot_be_rehearsed_is_not_refused() -> None:
    """OPT looks at the values of its mask before the first layer."""
    from greedysnake.models import rehearsal
    from greedysnake.models.split import build_skeleton

    config = make_config("opt")
    assert rehearsal.rehearse(build_skeleton(config, "sdpa")).error is not None
    gs.load_model(config)


def test_the_small_copy_is_checked_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more, a third of a second becomes many on a machine whose cores are busy. Afterwards all are there again."""
    from greedysnake.models.capture import Layer

    seen: set[int] = set()
    right = Layer.extra_inputs

    def noting(self: Layer, batch: Any) -> Any:
        seen.add(torch.get_num_threads())
        return right(self, batch)

    monkeypatch.setattr(Layer, "extra_inputs", noting)
    with torch_threads(3):
        gs.load_model(make_config("llama"))
        assert seen == {1} and torch.get_num_threads() == 3


def test_a_model_that_blocks_would_not_train_alike_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees it when layers get the arguments of another layer."""
    from greedysnake.models.capture import Layer

    config = make_config("qwen3 window")
    right = Layer.extra_inputs

    def of_the_first(self: Layer, batch: Any) -> Any:
        self.index = 0
        return right(self, batch)

    monkeypatch.setattr(Layer, "extra_inputs", of_the_first)
    assert "differs by" in refused(config)


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert "is no folder" in refused(folder)
    assert "a LlamaForCausalLM was given: give the folder of a model" in refused(make_whole("llama"))
    folder.mkdir()
    assert "has no config.json" in refused(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "new", "auto_map": {"AutoConfig": "new.Config"}}))
    assert "cannot be used" in refused(folder)
    whole = make_whole("llama")
    whole.config.save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "convert them to safetensors" in refused(folder)
    (folder / "model.safetensors").write_bytes(b"12345678901234567890")
    assert "cut short" in refused(folder)
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="20KB")
    shard = next(folder.glob("model-00002-*"))
    shard.write_bytes(shard.read_bytes()[:1000])
    assert "cut short" in refused(folder)
    shard.unlink()
    assert "names model-00002-of" in refused(folder)
    for index in ("[]", '{"weight_map": 3}', '{"weight'):
        (folder / "model.safetensors.index.json").write_text(index)
        assert "is no index of safetensors files" in refused(folder)


@pytest.mark.parametrize(("dtype", "said"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_weights_that_are_quantized_are_refused(dtype: torch.dtype, said: str, tmp_path: Path) -> None:
    """Quantized ones whose config.json does not say so."""
    from safetensors.torch import load_file, save_file

    make_whole("llama").save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    values["model.norm.weight"] = values["model.norm.weight"].to(dtype)
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refused(tmp_path) and f"is {said}, so the model is quantized" in refused(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_whole("llama").save_pretrained(tmp_path, max_shard_size="20KB" if "index" in name else "1GB")
    method = "read_text" if "index" in name else "open"
    original = getattr(Path, method)

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:  # root may read all
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(
        gs.StorageError, match=rf"could not read {tmp_path / name}: Permission denied \(EACCES\): change"
    ):
        gs.load_model(tmp_path)


def test_files_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    whole = make_whole("llama")
    whole.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "intermediate_size": 52}))
    assert "asks for (32, 52)" in refused(tmp_path)
    path.write_text(json.dumps({**values, "num_hidden_layers": 4}))
    assert "has no values for model.layers.3." in refused(tmp_path)
    path.write_text(json.dumps({**values, "tie_word_embeddings": True}))
    assert "set tie_word_embeddings to false" in refused(tmp_path)
    path.write_text(json.dumps({**values, "num_hidden_layers": 2}))
    with pytest.warns(RuntimeWarning, match=r"9 tensors that llama has no place for, such as model.layers.2"):
        gs.load_model(tmp_path)


def test_batches_that_are_not_understood_are_refused() -> None:
    model = gs.load_model(make_config("llama"))
    plain, padded, packed = make_batches(0)
    assert model.num_targets(plain) == 22
    ids = plain["input_ids"]
    for batch, reason in [
        ({"labels": ids}, "has no input_ids"),
        ({"input_ids": ids}, "has no labels"),
        ({**plain, "token_type_ids": ids}, "has token_type_ids"),
        ({**plain, "labels": ids[:, 1:]}, r"labels is of shape \(2, 11\)"),
        ({**packed, "attention_mask": torch.ones_like(ids)}, "position_ids and attention_mask"),
    ]:
        with pytest.raises(gs.ConfigError, match=reason):
            model.num_targets(batch)
    assert model.num_targets(padded) < padded["labels"].numel()
