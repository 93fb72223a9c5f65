"""The commands around a training as a person meets them: mistakes first, then the whole way to a model that loads."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from greedysnake import agreement, settings
from greedysnake.config import Config, load_config
from greedysnake.data.tokenizers import ByteTokenizer
from greedysnake.preparation import prepare
from training import MODEL, Run, curve, everything_in, lock, metrics_of, values_in, write_config

Values = dict[str, Any]


def change(key: str, value: Any) -> Callable[[Values, Path], None]:
    """A mistake that is a value of one key."""

    def apply(values: Values, _: Path) -> None:
        *sections, name = key.split(".")
        for section in sections:
            values = values.setdefault(section, {})
        values[name] = value

    return apply


def rows(*lines: str) -> Callable[[Values, Path], None]:
    """A mistake that is in the data."""

    def apply(values: Values, directory: Path) -> None:
        (directory / "rows.jsonl").write_text("".join(line + "\n" for line in lines))

    return apply


def put_a_file_in_the_way(values: Values, directory: Path) -> None:
    (directory / "file").write_text("")
    values["engine"]["storage"] = [str(directory / "file" / "ssd")]


def link_to_itself(values: Values, directory: Path) -> None:
    (directory / "run").symlink_to("run")


def a_model_without_configuration(values: Values, directory: Path) -> None:
    (directory / "model").mkdir()
    values["model"] = {"path": str(directory / "model")}


def a_model_folder(values: Values, directory: Path, **changes: object) -> Path:
    """A folder as a download leaves it that ended before the weights came."""
    folder = directory / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    values["model"] = {"path": str(folder), "tokenizer": "bytes"}
    return folder


def a_model_without_weights(values: Values, directory: Path) -> None:
    a_model_folder(values, directory)


def a_model_in_another_format(values: Values, directory: Path) -> None:
    (a_model_folder(values, directory) / "pytorch_model.bin").write_bytes(b"")


def a_model_without_a_shard(values: Values, directory: Path) -> None:
    table = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (a_model_folder(values, directory) / "model.safetensors.index.json").write_text(json.dumps(table))


def a_model_with_wrong_values(values: Values, directory: Path) -> None:
    a_model_folder(values, directory, num_attention_heads=0)


def foreign_metrics(values: Values, directory: Path) -> None:
    (directory / "run").mkdir()
    (directory / "run" / "metrics.jsonl").write_text("not ours\n")


def ask_for_20_terabytes(values: Values, _: Path) -> None:
    values["model"]["config"]["intermediate_size"] = 2**33
    values["engine"] |= {"chunk_params": 2**23, "ram": "2GiB"}


def validation_beyond_the_vocabulary(values: Values, directory: Path) -> None:
    values["model"]["config"]["vocab_size"] = 258
    values["data"] = {"paths": ["rows.jsonl"], "validation_paths": ["talk.jsonl"]}
    (directory / "talk.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')


LLAMA = "model.config."
LONG = "x" * 300
TOO_LONG = f"could not use {LONG}: File name too long (ENAMETOOLONG): give a shorter one"
SIZE, SHARE = "give a whole number of at least 1", "give a number between 0 and 1"
MISTAKES: dict[str, tuple[Callable[[Values, Path], None], str]] = {
    "typo": (change("training.learning_rat", 1), "unknown key training.learning_rat: did you mean learning_rate?"),
    "typo in the model": (
        change(LLAMA + "num_hiden_layers", 2),
        "unknown key model.config.num_hiden_layers: did you mean num_hidden_layers?",
    ),
    "wrong type": (change("training.max_steps", "many"), "training.max_steps is 'many': give a whole number"),
    "no data": (change("data.paths", ["missing.jsonl"]), "data.paths: 'missing.jsonl'"),
    "no model": (change("model", {"path": "missing"}), "model.path is 'missing', which does not exist: give a folder"),
    "no model configuration": (a_model_without_configuration, "which has no config.json: give a model's folder"),
    "no weights": (a_model_without_weights, "model has a config.json and no safetensors: fetch the weights, or put"),
    "weights in another format": (a_model_in_another_format, "has weights in pytorch_model.bin, which is not read"),
    "no shard": (a_model_without_a_shard, "names model-00001-of-00001.safetensors, which is not in the folder"),
    "wrong model in a folder": (
        a_model_with_wrong_values,
        "config.json cannot be used: num_attention_heads is 0: give a whole number of at least 1",
    ),
    "unknown model": (change(LLAMA + "model_type", "lama"), "model.config.model_type is 'lama', which transformers"),
    "text as a size": (change(LLAMA + "hidden_size", "abc"), f"{LLAMA}hidden_size is 'abc': {SIZE}"),
    "text as a switch": (
        change(LLAMA + "tie_word_embeddings", "abc"),
        "model.config: the llama configuration cannot be used: Field 'tie_word_embeddings' expected bool, got str",
    ),
    "indivisible": (change(LLAMA + "hidden_size", 63), "(63) is not a multiple of the number of attention heads (4)"),
    "no heads": (change(LLAMA + "num_attention_heads", 0), f"{LLAMA}num_attention_heads is 0: {SIZE}"),
    "no key heads": (change(LLAMA + "num_key_value_heads", 0), f"{LLAMA}num_key_value_heads is 0: {SIZE}"),
    "no layers": (change(LLAMA + "num_hidden_layers", 0), f"{LLAMA}num_hidden_layers is 0: {SIZE}"),
    "no positions": (change(LLAMA + "max_position_embeddings", 0), f"{LLAMA}max_position_embeddings is 0: {SIZE}"),
    "no vocabulary": (change(LLAMA + "vocab_size", 0), f"{LLAMA}vocab_size is 0: {SIZE}"),
    "no width": (change(LLAMA + "hidden_size", 0), f"{LLAMA}hidden_size is 0: {SIZE}"),
    "negative width": (change(LLAMA + "hidden_size", -32), f"{LLAMA}hidden_size is -32: {SIZE}"),
    "no inner width": (change(LLAMA + "intermediate_size", 0), f"{LLAMA}intermediate_size is 0: {SIZE}"),
    "no width by a name of its own": (
        change("model.config", {"model_type": "gpt2", "n_embd": 0}),
        f"{LLAMA}n_embd is 0: {SIZE}",
    ),
    "unknown activation": (change(LLAMA + "hidden_act", "foo"), f"{LLAMA}hidden_act is 'foo': give one of gelu, "),
    "too much dropout": (change(LLAMA + "attention_dropout", 5), f"{LLAMA}attention_dropout is 5: {SHARE}"),
    "too much dropout by another name": (
        change("model.config", {"model_type": "gpt2", "embd_pdrop": -0.5}),
        f"{LLAMA}embd_pdrop is -0.5: {SHARE}",
    ),
    "padding beyond the vocabulary": (
        change(LLAMA + "pad_token_id", 999),
        f"{LLAMA}pad_token_id is 999: the vocabulary has 264 tokens, give 0 to 263",
    ),
    "one of several ends beyond the vocabulary": (
        change(LLAMA + "eos_token_id", [2, 264]),
        f"{LLAMA}eos_token_id is [2, 264]: the vocabulary has 264 tokens, give 0 to 263",
    ),
    "unknown dtype of the model": (change(LLAMA + "dtype", "foo"), "cannot be used: AttributeError: module 'torch'"),
    "labels": (change(LLAMA + "id2label", "x"), "model.config: the llama configuration cannot be used: "),
    "heads that do not fit": (
        change(LLAMA + "num_key_value_heads", 3),
        "model: the sizes of the llama model do not fit together (RuntimeError in model.layers.0.self_attn: The size",
    ),
    "no tokenizer": (change("model.tokenizer", "nowhere"), "model.tokenizer is 'nowhere', which does not exist"),
    "empty data": (rows(), "data.paths: no rows in"),
    "broken row": (rows('{"text": "a b c"}', '{"text": '), "rows.jsonl line 2: not valid JSON"),
    "no target tokens": (
        rows('{"messages": [{"role": "user", "content": "hello"}]}'),
        "data.paths: none of the 1 rows in",
    ),
    "tokenizer of another model": (change(LLAMA + "vocab_size", 60), "model.tokenizer 'bytes' gives token"),
    "tokens of another model in evaluation": (
        validation_beyond_the_vocabulary,
        "model.tokenizer 'bytes' gives token 260",
    ),
    "too long sequences": (
        change("training.sequence_length", 65),
        "training.sequence_length is 65 and the model has 64 positions (max_position_embeddings): give 64 or less",
    ),
    "too little RAM": (change("engine.ram", "100KiB"), "engine.ram: needs"),
    "too much RAM": (change("engine.ram", "9000TiB"), "engine.ram is 8.79 PiB and the machine has"),
    "too little disk": (ask_for_20_terabytes, "engine.storage: the store needs"),
    "negative rate": (change("training.learning_rate", -1), "training.learning_rate is -1.0: give 0 or more"),
    "unknown schedule": (change("training.lr_scheduler_type", "cosin"), "training.lr_scheduler_type is 'cosin': give"),
    "long warm-up": (change("training.warmup_steps", 9), "training.warmup_steps is 9 and training has 8 steps"),
    "alpha": (change("engine.alpha", 1.5), "engine.alpha is 1.5: give a fraction between 0 and 1"),
    "placement": (
        change("engine.placement", {"activations_device": 0.5, "activations_ram": 0.6}),
        "engine.placement.activations_device + activations_ram is 1.1: together they are at most 1",
    ),
    "kept layers": (
        lambda values, _: values["engine"].update(schedule="horizontal", placement={"weights_device": 0.5}),
        "engine.schedule is horizontal, which keeps no layers: set placement.weights_device",
    ),
    "filled device": (
        lambda values, _: values["engine"].update(schedule="horizontal", vram="1GiB"),
        "engine.schedule is horizontal, which keeps nothing on the device: set vram to null",
    ),
    "storage": (put_a_file_in_the_way, "file is a file: give another directory"),
    "link": (link_to_itself, "run', which is a link that leads nowhere: name a folder"),
    "long output_dir": (change("output_dir", LONG), TOO_LONG),
    "long storage": (change("engine.storage", LONG), f"could not use {LONG}/greedysnake.manifest: File name too long"),
    "long data": (change("data.paths", [LONG]), TOO_LONG),
    "long model": (change("model", {"path": LONG}), TOO_LONG),
    "output_dir of others": (foreign_metrics, "which has a metrics.jsonl but no run.yaml: give another folder"),
    "unknown dtype": (change("engine.dtype", "float8"), "engine.dtype is 'float8': give bfloat16 or float32"),
    "fp16": (change("training.fp16", True), "training.fp16 is true, and float16 needs loss scaling"),
    "no device": (change("engine.device", "cuda"), "engine.device is cuda and torch finds no CUDA device"),
    "evaluation of nothing": (change("data", {"paths": "rows.jsonl"}), "training.eval_steps is 4 and nothing is held"),
    "tracker": (change("training.report_to", ["mlflow"]), "training.report_to names mlflow, which is not installed"),
}


def test_a_key_that_only_the_code_of_a_model_reads_is_no_unknown_one(tmp_path: Path, run: Run) -> None:
    """Qwen3-MoE has a head_dim in its code and none in its configuration."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    values = values_in(tmp_path, max_steps=3)
    values["model"]["config"] |= {"model_type": "qwen3_moe", "head_dim": 8, **experts}
    (tmp_path / "train.yaml").write_text(settings.write_yaml(values))
    code, _, errors = run("train", tmp_path / "train.yaml")
    assert (code, errors) == (0, "")
    assert run("export", tmp_path / "run", tmp_path / "out")[0] == 0
    weights = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 8, 16)
    code, _, errors = run("train", tmp_path / "train.yaml", "model.config.model_type=gpt2", "output_dir=other")
    assert code == 2 and "unknown key model.config." in errors


@pytest.mark.parametrize(
    ("single_slot", "moments", "words"),
    [
        (False, "float32", "set single_slot, which halves it, or adam_moments to int8, which takes 49% off and rounds"),
        (True, "bfloat16", "or set adam_moments to int8, which takes 23% off and rounds moments"),
        (True, "int8", "or train a smaller model"),
    ],
)
def test_too_little_disk_is_told_with_what_would_need_less(
    single_slot: bool, moments: str, words: str, tmp_path: Path, run: Run
) -> None:
    values = values_in(tmp_path, adam_moments=moments)
    ask_for_20_terabytes(values, tmp_path)
    values["engine"]["single_slot"] = single_slot
    (tmp_path / "train.yaml").write_text(settings.write_yaml(values))
    code, _, errors = run("train", tmp_path / "train.yaml")
    assert code == 2 and "engine.storage: the store needs" in errors and words in errors


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_that_names_the_key_and_writes_nothing(
    name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "no device" and torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.chdir(tmp_path)
    values = values_in(tmp_path, eval_steps=4)
    mistake, sentence = MISTAKES[name]
    mistake(values, tmp_path)
    (tmp_path / "train.yaml").write_text(settings.write_yaml(values))
    before = everything_in(tmp_path)
    code, _, errors = run("train", "train.yaml")
    assert (code, len(errors.splitlines())) == (2, 1), errors
    assert errors.startswith("greedysnake: ") and sentence in errors
    after = everything_in(tmp_path)
    if name.startswith("token"):  # found by what the tokens are; the tokens stay
        after = {path: data for path, data in after.items() if not path.startswith(str(tmp_path / "run"))}
        assert os.listdir(tmp_path / "run") == ["data"]
    assert after == before


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        ("output_dir: [1", [], "train.yaml, line 1 is not valid YAML"),
        (None, [], "missing.yaml does not exist: greedysnake init missing.yaml writes one"),
        ("output_dir: x", ["training.seed"], "'training.seed' is not an override: write key=value"),
    ],
)
def test_so_is_a_mistake_in_the_file_or_on_the_command_line(
    text: str | None, overrides: list[str], sentence: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("train.yaml").write_text(text)
    code, _, errors = run("train", "missing.yaml" if text is None else "train.yaml", *overrides)
    assert (code, len(errors.splitlines())) == (2, 1) and sentence in errors
    assert os.listdir() == ([] if text is None else ["train.yaml"])


@pytest.mark.parametrize("command", ["train", "verify"])
def test_an_empty_name_of_a_file_is_not_the_default(
    command: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = run(command, "", "training.max_steps=1")
    assert (code, errors) == (2, "greedysnake: '' cannot be read as text (the name is empty): give a YAML file\n")
    assert os.listdir() == []


def test_an_override_may_be_longer_than_a_path(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = run("train", f"output_dir={LONG}")
    assert (code, errors) == (2, f"greedysnake: {TOO_LONG}\n")


@pytest.mark.parametrize("key", ["output_dir", "engine.storage", "data.paths", "model.path"])
def test_a_folder_that_may_not_be_entered_is_named(
    key: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_in(tmp_path)
    if key == "model.path":
        values["model"] = {}
    change(key, str(tmp_path / "locked" / "it"))(values, tmp_path)
    (tmp_path / "train.yaml").write_text(settings.write_yaml(values))
    lock(tmp_path / "locked", monkeypatch)
    code, _, errors = run("train", tmp_path / "train.yaml")
    assert (code, len(errors.splitlines())) == (2, 1)
    assert f"could not use {tmp_path / 'locked' / 'it'}" in errors
    assert "Permission denied (EACCES): change its permissions or those of its folder, or give another" in errors
    assert not (tmp_path / "run").exists()


def test_a_folder_of_data_that_may_not_be_listed_is_named(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "locked").mkdir(parents=True)
    (tmp_path / "data" / "rows.jsonl").write_text('{"text": "abc"}\n')
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    config = write_config(tmp_path)
    monkeypatch.setattr(os, "scandir", refuse)
    code, _, errors = run("train", config, f"data.paths={tmp_path / 'data'}")
    assert (code, len(errors.splitlines())) == (2, 1)
    assert f"could not use {tmp_path / 'data' / 'locked'}: Permission denied (EACCES)" in errors


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("folder", "environment", "code", "told"),
    [
        ("run", ASCII, 0, "next: greedysnake export"),  # the file has letters of its own
        ("läufe", {"PYTHONIOENCODING": "ascii"}, 0, r"l\xe4ufe' OUT"),
        ("läufe", ASCII, 2, r"greedysnake: '\xe4' in a path cannot be written in ascii: set LC_ALL=C.UTF-8"),
    ],
)
def test_files_are_utf8_and_a_poor_terminal_ends_nothing(
    tmp_path: Path, folder: str, environment: dict[str, str], code: int, told: str
) -> None:
    path = write_config(tmp_path, max_steps=2, warmup_steps=0)
    text = path.read_text().replace(str(tmp_path / "run"), str(tmp_path / folder))
    path.write_text(f"# für später\n{text}", encoding="utf-8")
    command = [sys.executable, "-m", "greedysnake", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert (done.returncode, told in done.stdout + done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_mistakes_are_found_in_a_process_of_their_own_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "greedysnake", "train", "training.learning_rate=-1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "greedysnake: training.learning_rate is -1.0: give 0 or more\n")
    assert list(tmp_path.iterdir()) == []


def held_out_loss(model: Path, config: Config) -> float:
    """As transformers alone computes it, on the micro-batches that the training evaluates on."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    batches = prepare(config).validation
    assert batches is not None
    total, count = 0.0, 0
    for batch in batches.micro_batches(0, config.training.max_eval_batches or batches.num_micro_batches_per_epoch):
        targets = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            total += whole(**batch, use_cache=False).loss.item() * targets
        count += targets
    return total / count


def test_the_exported_model_has_the_loss_that_training_reported(
    trained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    moved = tmp_path / "moved"  # a run may be carried elsewhere
    shutil.copytree(trained / "run", moved)
    monkeypatch.chdir(tmp_path)
    code, printed, errors = run("export", "moved", "out", "--dtype", "float32")
    assert (code, errors) == (0, "") and printed == "wrote out: the model of step 8 in float32\n"
    found = held_out_loss(tmp_path / "out", load_config(trained / "train.yaml"))
    assert found == pytest.approx(metrics_of(moved)[-1]["eval_loss"], rel=1e-5)
    assert AutoTokenizer.from_pretrained("out")("5 times 5")["input_ids"] == list(b"5 times 5")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "out"], "nowhere holds no run, there is no run.yaml in it: give the output_dir of a training"),
        (["run", "full"], "OUT is 'full', which exists: name a new or empty folder"),
        (["run", "out", "--dtype", "float8"], "--dtype is 'float8': use bfloat16, float32"),
        (["unsaved", "out"], "RUN is 'unsaved', which has no checkpoint yet"),
        (["run", LONG], TOO_LONG),
        ([LONG, "out"], f"could not use {LONG}/run.yaml: File name too long (ENAMETOOLONG)"),
        (["run", "full/file/a/out"], "could not write full/file/a/out: Not a directory (ENOTDIR): a part of the path"),
    ],
)
def test_an_export_that_cannot_work_is_one_sentence(
    arguments: list[str], sentence: str, trained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "run", "run")
    Path("full").mkdir()
    Path("full/file").touch()
    Path("unsaved").mkdir()
    noted = Path("run/run.yaml").read_text()
    Path("unsaved/run.yaml").write_text(noted.replace("has_checkpoint: true", "has_checkpoint: false"))
    code, _, errors = run("export", *arguments)
    assert (code, len(errors.splitlines())) == (2, 1) and sentence in errors
    assert not Path("out").exists()


def test_an_export_to_where_the_user_may_not_go_is_one_sentence(
    trained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock(tmp_path / "locked", monkeypatch)
    code, _, errors = run("export", trained / "run", tmp_path / "locked" / "out")
    assert (code, len(errors.splitlines())) == (2, 1)
    assert f"could not use {tmp_path / 'locked' / 'out'}: Permission denied (EACCES): change" in errors


def test_the_exported_tokenizer_has_the_chat_template_of_the_training(tmp_path: Path, run: Run) -> None:
    from transformers import AutoTokenizer

    ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
    template = ByteTokenizer.chat_template.replace("<|end|>", "!<|end|>")
    (tmp_path / "own.jinja").write_text(template)
    values = values_in(tmp_path, max_steps=1, warmup_steps=0)
    values["model"]["tokenizer"] = str(tmp_path / "tokenizer")
    values["data"] = {"paths": [str(tmp_path / "talk.jsonl")], "chat_template": str(tmp_path / "own.jinja")}
    (tmp_path / "talk.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    (tmp_path / "train.yaml").write_text(settings.write_yaml(values))
    assert run("train", tmp_path / "train.yaml")[0] == 0
    assert run("export", tmp_path / "run", tmp_path / "out")[0] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == template
    (tmp_path / "own.jinja").unlink()
    code, _, errors = run("export", str(tmp_path / "run"), str(tmp_path / "again"))
    assert code == 2 and "could not read" in errors and "own.jinja" in errors
    assert not (tmp_path / "again").exists()  # nothing is half written


def test_verify_prints_the_agreement(tmp_path: Path, run: Run) -> None:
    code, printed, errors = run("verify", write_config(tmp_path))
    assert (code, errors) == (0, "")
    assert len(re.findall(r"step \d  loss here \d\.\d+  in PyTorch \d\.\d+  difference \d\.\de-\d+", printed)) == 4
    assert "they agree: losses to" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_verify_compares_exact_moments_and_tells_how_far_off_others_are(moments: str, tmp_path: Path, run: Run) -> None:
    code, printed, errors = run("verify", write_config(tmp_path, adam_moments=moments))
    assert (code, errors) == (0, "") and "they agree: losses to" in printed
    (off,) = re.findall(
        rf"with moments in float32; in {moments} the last loss is \d\.\d+, and the weights are off by (\S+) of", printed
    )
    assert 1e-6 < float(off) < 0.2


def test_a_run_with_moments_in_fewer_bytes_is_trained_continued_and_exported(tmp_path: Path, run: Run) -> None:
    path = write_config(tmp_path, adam_moments="int8", save_steps=4)
    code, printed, _ = run("train", path)
    assert code == 0 and "parameters in float32 on cpu, moments in int8, run in" in printed
    whole = curve(tmp_path / "run")
    code, _, errors = run("train", path, "training.max_steps=12", "training.adam_moments=float32")
    assert code == 2 and "training.adam_moments was 'int8' and is 'float32'" in errors
    noted = tmp_path / "run" / "run.yaml"
    text = noted.read_text()
    noted.write_text(text.replace("adam_moments: int8", "adam_moments: bfloat16"))  # by hand
    for command in (
        ["export", tmp_path / "run", tmp_path / "out"],
        ["reshard", tmp_path / "run", tmp_path / "two", "--ranks", "2"],
        ["train", noted],
        ["plan", noted],
    ):
        code, _, errors = run(*command)
        assert code == 2 and "moments is 'bfloat16', the checkpoint has them in 'int8'" in errors
    noted.write_text(text)
    assert run("train", path, "training.max_steps=12")[0] == 0
    assert len(curve(tmp_path / "run")) == 12 and curve(tmp_path / "run")[:8] == whole
    assert run("export", tmp_path / "run", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_verify_notices_a_difference(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    train_plainly = agreement.train_plainly

    def train_without_clipping(config: Any, *arguments: Any) -> agreement.Training:
        return train_plainly(load_config(write_config(tmp_path, max_grad_norm=None)), *arguments)

    path = write_config(tmp_path, max_grad_norm=1e-3, adam_epsilon=1e-3)
    monkeypatch.setattr(agreement, "train_plainly", train_without_clipping)
    code, printed, _ = run("verify", path)
    assert code == 1 and "they do not agree" in printed


def test_init_writes_a_file_that_trains_when_model_and_data_are_named(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    values_in(tmp_path)
    code, printed, _ = run("init", "my.yaml")
    assert code == 0 and "set model.path and data.paths in it, then run greedysnake train my.yaml" in printed
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained("model")
    overrides = ["model.path=model", "model.tokenizer=bytes", "data.paths=rows.jsonl", "training.sequence_length=32"]
    code, printed, errors = run("train", "my.yaml", *overrides, "training.max_steps=1", "engine.ram=512MiB")
    assert (code, errors) == (0, "") and "1 of 1 steps done" in printed
    assert os.path.isdir("runs/my-run/store")
    code, _, errors = run("init", "my.yaml")
    assert code == 2 and errors == "greedysnake: my.yaml exists: give another name, or remove it\n"


def test_the_default_begins_to_learn(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, errors = run("train", "training.max_steps=4", "training.eval_steps=null")
    assert (code, errors) == (0, "") and "4 of 4 steps done" in printed
    lines = metrics_of(tmp_path / "runs" / "default")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


@pytest.mark.slow
def test_the_default_learns_and_comes_out_as_a_model_with_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "greedysnake"]
    subprocess.run([*command, "train"], check=True)
    lines = metrics_of(tmp_path / "runs" / "default")
    assert lines[-1]["loss"] < 0.55 * lines[0]["loss"]
    subprocess.run([*command, "export", "runs/default", "out"], check=True)
    assert held_out_loss(tmp_path / "out", load_config()) == pytest.approx(lines[-1]["eval_loss"], abs=1e-3)
