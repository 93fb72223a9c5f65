"""What a run that is continued may not have changed, and what discards one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import greedysnake as gs
from greedysnake.exporting import export_run
from training import MODEL, metrics_of, quiet, train, values_in, write_rows


def test_data_that_changed_since_the_checkpoint_are_noticed(tmp_path: Path) -> None:
    values = values_in(tmp_path, max_steps=2)
    train(values)
    write_rows(tmp_path / "rows.jsonl", 300)
    before = (tmp_path / "run" / "run.yaml").read_text()
    with pytest.raises(gs.ConfigError, match=r"data\.paths: the data are not those of the checkpoint of step 2"):
        train(values_in(tmp_path, max_steps=4))
    assert (tmp_path / "run" / "run.yaml").read_text() == before


def test_overwriting_starts_anew(tmp_path: Path) -> None:
    train(values_in(tmp_path, max_steps=3))
    values = values_in(tmp_path, max_steps=2, seed=5)
    summary = train({**values, "overwrite_output_dir": True})
    assert (summary.num_steps, len(metrics_of(tmp_path / "run"))) == (2, 2)


def test_a_run_that_overwrote_another_is_not_discarded_by_its_own_configuration(tmp_path: Path) -> None:
    train({**values_in(tmp_path, max_steps=2), "overwrite_output_dir": True})
    trainer = gs.Trainer(str(tmp_path / "run" / "run.yaml"), console=quiet())
    assert trainer.train().num_steps == 2 and trainer.prepared.resume


def test_held_out_data_that_changed_are_noticed(tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    write_rows(held_out, 20)

    def values(**training: Any) -> dict[str, Any]:
        found = values_in(tmp_path, **training)
        found["data"] = {"paths": found["data"]["paths"], "validation_paths": [str(held_out)]}
        return found

    train(values(max_steps=2, eval_steps=1))
    train(values(max_steps=3))  # does not evaluate, and remembers all the same
    write_rows(held_out, 30)
    with pytest.raises(gs.ConfigError, match=r"data\.validation_paths: the data are not those of the checkpoint"):
        train(values(max_steps=4, eval_steps=1))
    write_rows(held_out, 20)
    assert train(values(max_steps=4, eval_steps=1)).num_steps == 4


def test_a_model_that_changed_its_computation_but_not_its_shapes_is_noticed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    config = transformers.LlamaConfig(**{key: value for key, value in MODEL.items() if key != "model_type"})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)

    def values(**training: Any) -> dict[str, Any]:
        return {**values_in(tmp_path, **training), "model": {"tokenizer": "bytes", "path": str(folder)}}

    train(values(max_steps=2))
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "rms_norm_eps": 0.5}))
    with pytest.raises(gs.ConfigError, match=r"model: rms_norm_eps is 0\.5 and was 1e-06 at the checkpoint of step 2"):
        train(values(max_steps=3))
    with pytest.raises(gs.ConfigError, match=r"model: rms_norm_eps is 0\.5 and was 1e-06 at the checkpoint of step 2"):
        export_run(tmp_path / "run", tmp_path / "out")
    (folder / "config.json").write_text(json.dumps({**stored, "use_cache": False}))  # nothing to do with training
    assert train(values(max_steps=3)).num_steps == 3


def test_a_signal_ends_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, calls = gs.Engine.evaluate, []

    def interrupted(self: gs.Engine, batches: Any) -> float:
        calls.append(self)
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, batches)

    monkeypatch.setattr(gs.Engine, "evaluate", interrupted)
    summary = train(values_in(tmp_path, max_steps=8, eval_steps=2))
    assert (summary.num_steps, summary.stopped_by, summary.eval_loss, len(calls)) == (2, "SIGTERM", None, 1)
    assert "eval_loss" not in metrics_of(tmp_path / "run")[-1]


def test_an_evaluation_at_the_end_that_a_signal_ended_is_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, evaluate = values_in(tmp_path, max_steps=2, eval_steps=2), gs.Engine.evaluate
    wanted = train({**values, "output_dir": str(tmp_path / "straight")})

    def interrupted(self: gs.Engine, batches: Any) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, batches)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(gs.Engine, "evaluate", interrupted)
            summary = train(values)
        assert (summary.num_steps, summary.stopped_by, summary.eval_loss) == (2, "SIGTERM", None)
    assert train(values).eval_loss == wanted.eval_loss
    lines, straight = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "straight")
    assert [line.get("eval_loss") for line in lines] == [line.get("eval_loss") for line in straight]
    assert [line["loss"] for line in lines] == [line["loss"] for line in straight]
    monkeypatch.setattr(gs.Engine, "evaluate", None)
    assert train(values).num_steps == 2, "once is enough"


@pytest.mark.parametrize("what", ["held-out data", "storage"])
def test_what_is_missing_or_taken_is_said_before_data_are_tokenised(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_in(tmp_path)
    if what == "storage":
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "photo.jpg").touch()
        values["engine"]["storage"] = [str(tmp_path / "taken")]
        error: type[Exception] = gs.StorageError
    else:
        values["data"] = {"paths": values["data"]["paths"], "validation_paths": ["missing.jsonl"]}
        error = gs.ConfigError
    with pytest.raises(error, match=r"photo\.jpg|validation_paths: 'missing\.jsonl' does not exist"):
        gs.Trainer(values, console=quiet())
    assert not (tmp_path / "run" / "data").exists()
