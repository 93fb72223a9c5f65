"""An exported model begins, pads and ends as the tokenizer that it was trained with."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import greedysnake as gs
from greedysnake import settings
from greedysnake.data.tokenizers import ByteTokenizer
from greedysnake.exporting import export_run
from training import MODEL, values_in

END, PAD = ByteTokenizer.eos_token_id, ByteTokenizer.pad_token_id
NAMES = ("eos_token_id", "bos_token_id", "pad_token_id")


def trained(text: str, directory: Path, *, steps: int = 1, add_eos: bool = True, **model: object) -> Path:
    """The export of a model that was trained on one text, in bytes."""
    values = values_in(directory, max_steps=steps, warmup_steps=0)
    (directory / "rows.jsonl").write_text((json.dumps({"text": text}) + "\n") * 8)
    values["data"] = {"paths": [str(directory / "rows.jsonl")], "add_eos": add_eos}
    values["model"] = {"tokenizer": "bytes", **model}
    (directory / "train.yaml").write_text(settings.write_yaml(values))
    gs.Trainer(gs.load_config(directory / "train.yaml"), console=Console(file=io.StringIO())).train()
    export_run(directory / "run", directory / "out", dtype="float32")
    return directory / "out"


def ids(of: Any) -> tuple[object, ...]:
    return tuple(getattr(of, name) for name in NAMES)


def test_an_exported_model_knows_its_end_token_and_stops(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trained("abcdefgh", tmp_path, steps=60, config=MODEL))
    assert ids(model.config) == ids(model.generation_config) == (END, None, PAD)
    said = model.generate(torch.tensor([list(b"abc")]), max_new_tokens=30, do_sample=False)[0].tolist()
    assert said == [*b"abcdefgh", END]


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ({"eos_token_id": 7, "bos_token_id": 8, "pad_token_id": None}, (7, 8, None)),
        ({"bos_token_id": 8}, (END, 8, PAD)),
        ({"vocab_size": END}, (None, None, PAD)),  # a model could not even be built with a token that it lacks
    ],
)
def test_what_the_configuration_gives_comes_before_what_the_tokenizer_has(
    model: dict[str, Any], wanted: tuple[object, ...], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    out = trained("a b", tmp_path, add_eos="vocab_size" not in model, config=MODEL | model)
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert ids(exported.config) == ids(exported.generation_config) == wanted


@pytest.mark.parametrize(
    ("config", "generation", "wanted_config", "wanted_generation"),
    [
        ((2, 1, None), (2, 1, None), (2, 1, None), ([2, END], 1, None)),
        ((2, 1, None), ([3, END], 1, 0), (2, 1, None), ([3, END], 1, 0)),
        ((None, 1, None), (None, 1, None), (END, 1, None), (END, 1, None)),
        ((2, 1, None), None, (2, 1, None), ([2, END], 1, None)),
    ],
)
def test_generation_of_a_model_from_a_folder_ends_at_the_trained_end_token_as_well(
    config: tuple[Any, ...],
    generation: tuple[Any, ...] | None,
    wanted_config: tuple[object, ...],
    wanted_generation: tuple[object, ...],
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "pretrained"
    LlamaForCausalLM(LlamaConfig(**MODEL | dict(zip(NAMES, config, strict=True)))).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        GenerationConfig(**dict(zip(NAMES, generation, strict=True)), do_sample=True, top_k=7).save_pretrained(folder)
    exported = AutoModelForCausalLM.from_pretrained(trained("a b", tmp_path, path=str(folder)))
    assert ids(exported.config) == wanted_config
    assert ids(exported.generation_config) == wanted_generation
    assert exported.generation_config.top_k == (None if generation is None else 7)


def test_files_of_the_tokenizer_that_was_not_trained_with_stay_behind(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "pretrained"
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("of another")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|pad|>"}')
    (folder / "added_tokens.json").write_text('{"<more>": 262}')
    exported = AutoTokenizer.from_pretrained(trained("a b", tmp_path, path=str(folder)))
    assert exported.chat_template == ByteTokenizer.chat_template
    assert (exported.eos_token_id, len(exported)) == (END, len(ByteTokenizer()))


def test_a_damaged_generation_config_is_found_before_anything_is_written(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "pretrained"
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(gs.ConfigError, match=r"generation_config\.json is no JSON object: correct or remove it"):
        trained("a b", tmp_path, path=str(folder))
    assert not (tmp_path / "out").exists()


def test_a_run_from_before_tokens_were_checked_continues_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end token beyond the vocabulary changes nothing in training, and is refused in new runs only."""
    with monkeypatch.context() as patch:
        patch.setattr("greedysnake.run_model.require_sound", lambda values: None)
        trained("a b", tmp_path, config=MODEL | {"eos_token_id": 999})
    config = gs.load_config(tmp_path / "train.yaml", ["training.max_steps=2"])
    gs.Trainer(config, console=Console(file=io.StringIO())).train()
    assert export_run(tmp_path / "run", tmp_path / "again") == 2
