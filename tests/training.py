"""A training small enough for tests: a Llama of a few thousand parameters on a few kilobytes of text."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import greedysnake as gs
from greedysnake import settings
from greedysnake.report.progress import Summary

Run = Callable[..., tuple[int, str, str]]
"""Runs a command; returns its exit code, and what it printed to both ends."""

MODEL = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def write_rows(path: Path, num_rows: int = 200) -> None:
    rows = [{"text": f"{number} times {number} is {number * number}."} for number in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def values_in(directory: Path, **training: Any) -> dict[str, Any]:
    """The configuration of a run in `directory`/run, on rows that are written beside it."""
    rows = directory / "rows.jsonl"
    if not rows.exists():
        write_rows(rows)
    return {
        "output_dir": str(directory / "run"),
        "model": {"tokenizer": "bytes", "config": dict(MODEL)},
        "data": {"paths": [str(rows)], "validation_share": 0.1},
        "training": {
            "sequence_length": 32,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 8,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "logging_steps": 1,
            "report_to": [],
            "seed": 1,
            **training,
        },
        "engine": {
            "ram": "64MiB",
            "dtype": "float32",
            "device": "cpu",
            "chunk_params": 4096,
            "compute_threads": 1,
            "fill_ram": False,
        },
    }


def write_config(directory: Path, **training: Any) -> Path:
    path = directory / "train.yaml"
    path.write_text(settings.write_yaml(values_in(directory, **training)))
    return path


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(run: Path) -> list[tuple[int, float, float, float]]:
    """What must be the same to the bit in two runs of one configuration."""
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in metrics_of(run)]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def train(values: dict[str, Any], console: Console | None = None) -> Summary:
    return gs.Trainer(values, console=console or quiet()).train()


def train_for(num_steps: int, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps of a run, which a signal then ends."""
    step = gs.Engine.step

    def stopping(engine: gs.Engine, *batches: Any, **options: Any) -> gs.StepResult:
        if engine.num_steps == num_steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(engine, *batches, **options)

    with monkeypatch.context() as patched:
        patched.setattr(gs.Engine, "step", stopping)
        assert train(values).stopped_by == "SIGTERM"


def everything_in(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(directory.rglob("*"))}


def lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a folder is that the user may not enter; root may enter all."""
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if folder in path.absolute().parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
