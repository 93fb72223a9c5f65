"""What a person may write in a configuration, and the sentence for what may not stand there."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedysnake import settings
from greedysnake.config import DEFAULT, Config, difference, load_config
from greedysnake.data.options import DataOptions
from greedysnake.errors import ConfigError
from greedysnake.options import EngineOptions, ModelOptions, SchedulerOptions, TrainingOptions
from greedysnake.placement import Placement, Slots
from greedysnake.report.configuration_text import EXAMPLES, commented_yaml, configuration_page

ROOT = Path(__file__).parent.parent
CLASSES = [Config, ModelOptions, DataOptions, TrainingOptions, SchedulerOptions, EngineOptions, Placement, Slots]


def test_the_page_about_the_configuration_is_made_from_the_code() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_page(), "run docs/write_configuration.py"


@pytest.mark.parametrize("made", CLASSES, ids=lambda made: made.__name__)
def test_every_field_is_documented(made: Any) -> None:
    assert [field.name for field in fields(made) if not settings.documentation(made).get(field.name)] == []


def test_a_new_file_has_every_key_with_its_default() -> None:
    values = settings.read_yaml(commented_yaml(), "a new file")
    config = settings.build(Config, values)
    assert config.training == TrainingOptions() and config.engine == EngineOptions()
    assert (config.output_dir, config.model.path) == (EXAMPLES["output_dir"], EXAMPLES["model.path"])
    keys = {setting.key for setting in settings.describe(Config)}
    assert keys == {setting for setting in _keys(values)}


def _keys(values: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found += [path + key, *(_keys(value, f"{path}{key}.") if isinstance(value, dict) else [])]
    return found


@pytest.mark.parametrize("path", [DEFAULT, *sorted((ROOT / "examples").glob("*.yaml"))], ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert settings.build(Config, settings.read_yaml(path.read_text(), str(path)))


def test_numbers_and_sizes_may_be_written_as_people_write_them() -> None:
    config = load_config(None, ["engine.ram=1.5GiB", "training.learning_rate=1e-4", "training.adam_epsilon=1E-6"])
    assert config.engine.ram == 1.5 * 2**30
    assert (config.training.learning_rate, config.training.adam_epsilon) == (1e-4, 1e-6)
    assert load_config(None, ["training.weight_decay=0"]).training.weight_decay == 0.0
    assert load_config(None, ["training.max_grad_norm=0"]).training.clip_norm is None
    assert load_config(None, ["training.max_grad_norm=null"]).training.clip_norm is None


@pytest.mark.parametrize(
    "written",
    ["2024-01-01", "2024-01-01 10:30:00", "12:30", "0123456", "1:30.5", '"2024"', "'2024'", '"1e-4"', '"1E5"'],
)
def test_a_date_or_a_number_in_quotes_is_text(written: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(load_config(None, [f"data.text_column={written}"]).as_yaml())
    assert load_config(tmp_path / "a.yaml").data.text_column == written.strip("'\"")


@given(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\x85\u2028\u2029\ufeff\n:'\"#-0123456789")),
    st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none(),
)
def test_what_is_written_is_what_is_read(text: str, other: object) -> None:
    values = {"a": {"b": text, text: other}, "c": [text, other]}
    assert settings.read_yaml(settings.write_yaml(values), "a file") == values


def test_sections_may_be_merged_as_yaml_does() -> None:
    few = "few: &few {staging: 3}\n"
    assert settings.read_yaml(few + "more: {<<: *few, updates: 5}", "a file")["more"] == {"staging": 3, "updates": 5}
    with pytest.raises(ConfigError, match="updates stands there twice"):
        settings.read_yaml(few + "more: {<<: *few, updates: 5, updates: 6}", "a file")


def test_overrides_reach_any_depth_and_make_sections_that_are_not_there() -> None:
    config = load_config(None, ["engine.slots.staging=9", "data.paths=a.txt", "engine.storage=[x, y]"])
    assert config.engine.slots.staging == 9
    assert config.data.paths == ("a.txt",) and config.engine.storage == ("x", "y")


def test_overrides_leave_the_mapping_of_the_caller_alone() -> None:
    values: dict[str, Any] = {
        "output_dir": "run",
        "model": {"config": {"model_type": "llama"}, "tokenizer": "bytes"},
        "data": {},
        "training": {"max_steps": 3},
    }
    assert load_config(values, ["training.max_steps=9", "model.config.hidden_size=8"]).training.max_steps == 9
    assert values["training"] == {"max_steps": 3} and values["model"]["config"] == {"model_type": "llama"}
    assert load_config(values).training.max_steps == 3


def test_a_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(None, [f"output_dir={tmp_path}", f"engine.storage={tmp_path / 'ssd'}"])
    (tmp_path / "again.yaml").write_text(config.as_yaml())
    assert load_config(tmp_path / "again.yaml") == config


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tokens").mkdir()
    changes = [
        "output_dir=~/run",
        "engine.storage=[~/ssd]",
        "data.paths=[~/a, standard-library]",
        "model.tokenizer=~/tokens",
    ]
    config = load_config(None, changes)
    assert (config.output_dir, config.storage) == (str(tmp_path / "run"), (tmp_path / "ssd",))
    assert config.data.paths == (str(tmp_path / "a"), "standard-library")
    assert config.tokenizer == str(tmp_path / "tokens")
    assert "~" not in config.as_yaml()


def test_dtype_has_two_names() -> None:
    assert load_config(None, ["engine.dtype=null"]).dtype == "bfloat16"
    assert load_config(None, ["engine.dtype=null", "training.bf16=false"]).dtype == "float32"
    with pytest.raises(ConfigError, match=r"training\.bf16 is true and engine.dtype is float32: give one of them"):
        load_config(None, ["training.bf16=true"])


def test_what_is_trained_may_not_change_between_runs_but_how_may() -> None:
    had = load_config(None)
    changed = load_config(
        None, ["training.learning_rate=1", "training.max_steps=7", "engine.alpha=0", "engine.ram=1GiB"]
    )
    assert difference(had, changed) is None
    other = replace(had, training=replace(had.training, seed=9))
    assert difference(had, other) == "training.seed was 0 and is 9"
    other = replace(had, data=replace(had.data, paths=("/x.txt",)))
    assert difference(had, other) == "data.paths was ['standard-library'] and is ['/x.txt']"
    other = load_config(None, ["engine.dtype=null"])
    assert difference(had, other) == "engine.dtype was 'float32' and is 'bfloat16'"
    other = load_config(None, ["training.adam_moments=int8"])
    assert difference(had, other) == "training.adam_moments was 'float32' and is 'int8'"
    assert difference(had, load_config(None, ["engine.dtype=null", "training.bf16=false"])) is None


@pytest.mark.parametrize(
    ("assignments", "sentence"),
    [
        ("training.learning_rat=1", "unknown key training.learning_rat: did you mean learning_rate?"),
        ("trainning.seed=1", "unknown key trainning: did you mean training?"),
        ("engine.zzz=1", "unknown key engine.zzz: the keys under engine are storage, ram, vram, device"),
        ("training.learning_rate=fast", "training.learning_rate is 'fast': give a number"),
        ("training.max_steps=1.5", "training.max_steps is 1.5: give a whole number"),
        (f"training.learning_rate={'9' * 400}", "training.learning_rate is 999"),
        ("training.max_steps=true", "training.max_steps is True: give a whole number"),
        ("training.max_steps=0", "training.max_steps is 0: give 1 or more, or -1 for what num_train_epochs makes"),
        ("training.sequence_length=1", "training.sequence_length is 1: give 2 or more"),
        ("engine.num_threads=100000", "engine.num_threads is 100000: give 1 to 1024"),
        ("engine.compute_threads=0", "engine.compute_threads is 0: give 1 to 1024"),
        ("training.num_train_epochs=.inf", "training.num_train_epochs is inf: give a number"),
        ("data.packing=1", "data.packing is 1: give true or false"),
        ("data.paths=3", "data.paths[0] is 3: give text, in quotes where it looks like something else"),
        ("output_dir=2024", """something else ("...", in a shell '"..."')"""),
        ("training.max_steps=1:30", "training.max_steps is '1:30': give a whole number"),
        ("training.learning_rate=1:30.5", "training.learning_rate is '1:30.5': give a number"),
        ("training.max_steps=010", "training.max_steps is '010': give a whole number"),
        ("training.run_name=yes", "training.run_name is True: give text, in quotes"),
        ("engine.ram=lots", "engine.ram is 'lots': give a size such as 32GiB"),
        ("engine.ram=-1", "engine.ram is -1: give a size such as 32GiB"),
        ("engine.slots=3", "engine.slots is 3: give keys under it (weights, gradients, staging, updates, ...)"),
        ("engine.slots.staging=0", "engine.slots.staging is 0: at least one buffer of each kind is needed"),
        ("engine.storage=[a, b, a]", "engine.storage names a directory twice: give one directory per drive"),
        ("model.config.model_type=null", "model.config.model_type is missing: name the kind of model"),
        ("model.config.model_type=5", "model.config.model_type is 5: give the kind of model"),
        ("model.config=null", "model.path is missing: give the folder of a model, or model.config"),
        ("model.tokenizer=null", 'model.tokenizer is missing: give the folder of one, or "bytes"'),
        ("output_dir=null", "output_dir is empty: give text"),
        ("output_dir=", "output_dir is empty: give text"),
        ("engine.device=null", "engine.device is empty: give auto, cpu or cuda"),
        ("data.paths=[a, null]", "data.paths[1] is empty: give text"),
        ("training.warmup_steps=3", "training.warmup_steps and training.warmup_ratio are both given"),
        ("training.lr_scheduler_type=constant", "training.lr_scheduler_type is constant, which has no warm-up"),
        ("training.lr_scheduler_kwargs.num_decay_steps=3", "num_decay_steps means nothing to lr_scheduler_type cosine"),
        ("training.adam_beta2=1", "training.adam_beta2 is 1.0: give a number from 0 to below 1"),
        ("data.validation_share=0", "training.eval_steps is 100 and nothing is held out: give data.validation_share"),
        ("a..b=3", "'a..b=3' is not an override: write key=value, as in training.max_steps=100"),
        ("training.seed=[", "the override 'training.seed=[', line 1 is not valid YAML"),
        ("training.seed=0x_", "the override 'training.seed=0x_' is not valid YAML: invalid literal for int()"),
        ("data.packing=!!bool x", "the override 'data.packing=!!bool x' is not valid YAML: 'x'"),
    ],
)
def test_the_sentence_names_the_key_the_value_and_what_is_wanted(assignments: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_config(None, [assignments])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("output_dir: [1", "train.yaml, line 1 is not valid YAML"),
        (
            "training: {seed: 1}\ntraining: {seed: 2}",
            "train.yaml, line 1 is not valid YAML: training stands there twice",
        ),
        ("- a\n- b", "train.yaml holds a list: give keys and values"),
        ("model: {path: x}", "output_dir is missing: give text"),
        ("output_dir: x\nmodel: {path: x}", "data is missing"),
    ],
)
def test_a_file_that_is_no_configuration_is_named_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_config(tmp_path / "train.yaml")
