"""A trained model goes out as a folder of Hugging Face, and comes in from one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import greedysnake as gs
from families import FAMILIES, OPTIMIZER, make_batches, make_config
from forked import Forked, run_command
from greedysnake import durable
from greedysnake.models import export

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


def test_bfloat16_is_half_as_large_and_rounds_to_nearest(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = gs.load_model(make_config("llama"), seed=3)
    with make_engine(model, tmp_path) as engine:
        parameters = {model.name_in_model(name): value for name, value in engine.named_parameters()}
        gs.export_model(engine, model, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == parameters.keys()
    for name, value in parameters.items():
        assert torch.equal(found[name], value.bfloat16()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_names_and_index_are_those_that_transformers_writes(tmp_path: Path) -> None:
    """Mixtral's experts are one tensor in memory and many on disk."""
    model = gs.load_model(make_config("mixtral"), seed=3)
    with make_engine(model, tmp_path) as engine:
        gs.export_model(engine, model, tmp_path / "ours", dtype="float32", max_shard_bytes="30KB")
    load_whole(tmp_path / "ours", "sdpa").save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    ours, theirs = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("ours", "theirs")
    )
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert any("block_sparse_moe.experts.0.w1" in name for name in ours["weight_map"])


def test_files_of_the_tokenizer_and_of_generation_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = gs.load_model(make_config("llama"), seed=3)
    with make_engine(model, tmp_path) as engine:
        gs.export_model(engine, model, source)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("template")
    (source / "spiece.model").write_text("vocabulary")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("another")
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    (source / "training notes.txt").write_text("mine")
    again = gs.load_model(source)
    with make_engine(again, tmp_path / "again") as engine:
        gs.export_model(engine, again, tmp_path / "out")
    more = ("additional_chat_templates/tool_use.jinja", "spiece.model")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", *more):
        assert (tmp_path / "out" / name).read_text() == (source / name).read_text()
    assert not (tmp_path / "out" / "training notes.txt").exists()


def test_a_folder_in_use_is_left_alone_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gs.load_model(make_config("llama"), seed=3)
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").write_text("mine")
    out = tmp_path / "folder" / "out"
    with make_engine(model, tmp_path) as engine:
        with pytest.raises(gs.StorageError, match="exists and is not empty"):
            gs.export_model(engine, model, used)
        with pytest.raises(gs.ConfigError, match="dtype is 'float16'"):
            gs.export_model(engine, model, out, dtype="float16")
        for call in ("os.fsync", "os.pwrite"):
            with monkeypatch.context() as patch, pytest.raises(gs.StorageError, match="the drive is gone"):
                patch.setattr(call, fail)
                gs.export_model(engine, model, out)
            assert list(out.parent.iterdir()) == []
        out.mkdir()
        assert gs.export_model(engine, model, out) == out
    assert [path.name for path in used.iterdir()] == ["file"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert out.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("kind", ["folder", "link", "link to nowhere", "working directory", "mount point"])
def test_an_empty_folder_stays_the_folder_that_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue("mount")(16) if kind == "mount point" else tmp_path / "place"
    out = place
    if kind == "mount point":
        (place / "lost+found").rmdir()
    elif kind != "link to nowhere":
        place.mkdir(mode=0o700)
    if kind.startswith("link"):
        out = tmp_path / "link"
        out.symlink_to(place)
    elif kind == "working directory":
        monkeypatch.chdir(place)
        out = Path()
    before = place.stat().st_ino if place.exists() else None
    model = gs.load_model(make_config("llama"), seed=3)
    with make_engine(model, tmp_path) as engine:
        with monkeypatch.context() as patch, pytest.raises(gs.StorageError, match="the drive is gone"):
            patch.setattr("os.fsync", fail)
            gs.export_model(engine, model, out)
        assert not place.exists() or not list(place.iterdir())
        assert gs.export_model(engine, model, out) == out
    assert before in (None, place.stat().st_ino) and (place.stat().st_mode & 0o777 == 0o700 or kind[0] in "ml")
    assert sorted(path.name for path in place.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert mean_loss(load_whole(place, "sdpa")) > 0
    assert [path for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("exists", [True, False])
def test_what_a_killed_export_left_is_removed_and_that_of_one_under_way_is_not(exists: bool, tmp_path: Path) -> None:
    out = tmp_path / "all" / "out"
    beside = out if exists else out.parent
    beside.mkdir(parents=True)
    left = beside / ".out.12345678.partial"
    left.mkdir()
    (left / "model.safetensors").write_text("half of it")
    (out.parent / ".other.12345678.partial").mkdir()
    model = gs.load_model(make_config("llama"), seed=3)
    with make_engine(model, tmp_path) as engine:
        folder = os.open(left, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(gs.StorageError, match=r"another export to .*out, which is under way"):
            gs.export_model(engine, model, out)
        os.close(folder)
        gs.export_model(engine, model, out)
    assert not left.exists() and (out / "config.json").is_file()
    assert sorted(path.name for path in out.parent.iterdir()) == [".other.12345678.partial", "out"]


def test_all_of_an_export_is_on_the_drive_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    real = durable.sync

    def noted(path: Path) -> None:
        real(path)
        synced.append((path.name, (tmp_path / "out").exists()))

    monkeypatch.setattr("greedysnake.models.export.sync", noted)
    model = gs.load_model(make_config("llama"), seed=3)
    with make_engine(model, tmp_path) as engine:
        gs.export_model(engine, model, tmp_path / "out")
    before = {name for name, there in synced if not there}
    assert before > {path.name for path in (tmp_path / "out").iterdir()}
    assert [name for name, there in synced if there] == ["out", tmp_path.name]


def export_and_be_signalled(number: int, run: str, out: str) -> None:
    """At the end of an export, when all but its index is there."""
    export._write_index = lambda *_: os.kill(os.getpid(), number)  # type: ignore[assignment]
    run_command(["export", run, out], {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing_of_an_export(number: signal.Signals, trained: Path, tmp_path: Path) -> None:
    printed, outs = tmp_path / "printed", tmp_path / "outs"
    for folder in (printed, outs, outs / "there"):
        folder.mkdir()
    for out in ("new", "there"):
        process = Forked(printed, out, export_and_be_signalled, int(number), str(trained / "run"), str(outs / out))
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 128 + number, errors
        assert "Traceback" not in errors
    assert [path.name for path in outs.rglob("*")] == ["there"]


def fail(file: int, data: bytes = b"", offset: int = 1) -> int:
    if offset:  # not for what is at the beginning, which is written before anything is read
        raise OSError("the drive is gone")
    return len(data)


def test_a_block_is_read_while_the_one_before_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gs.load_model(make_config("llama"), seed=3)
    reads_on = threading.Event()

    def pwrite(file: int, data: bytes, offset: int) -> int:
        assert offset == 0 or reads_on.wait(60), "nothing is read before the write has ended"
        return write(file, data, offset)

    class Reading:
        def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, value) in enumerate(wanted.items()):
                if number and not name.startswith("embed"):
                    reads_on.set()
                yield name, value

    with make_engine(model, tmp_path) as engine:
        wanted = {name: value.clone() for name, value in engine.named_parameters()}
    write = os.pwrite
    monkeypatch.setattr("os.pwrite", pwrite)
    gs.export_model(Reading(), model, tmp_path / "out", dtype="float32")
    found = dict(load_whole(tmp_path / "out", "sdpa").named_parameters())
    assert all(torch.equal(found[model.name_in_model(name)], value) for name, value in wanted.items())


def test_an_engine_of_another_model_is_refused(tmp_path: Path) -> None:
    model = gs.load_model(make_config("llama"))
    with make_engine(model, tmp_path) as engine:
        for num_layers in (2, 4):
            other = gs.load_model(make_config("llama", num_hidden_layers=num_layers))
            with pytest.raises(gs.ConfigError, match="do not belong together"):
                gs.export_model(engine, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
