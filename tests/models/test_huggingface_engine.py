"""Blocks of Hugging Face under everything that the engine does with blocks."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import greedysnake as gs
from families import FAMILIES, OPTIMIZER, make_batches, make_config, train_whole, whole_loss, whole_model
from greedysnake.models import capture
from reference import Batch, Trained

NUM_STEPS = 3


def train(config: Any, folder: Path, **options: Any) -> Trained:
    engine_options = {"ram": "64MiB", "dtype": "float32", "max_grad_norm": 1.0, "chunk_params": 4096, **options}
    trained = Trained()
    with gs.Engine(gs.load_model(config, seed=1), OPTIMIZER, storage=[folder], **engine_options) as engine:
        for step in range(NUM_STEPS):
            trained.losses.append(engine.step(make_batches(step)).loss)
        trained.parameters = dict(engine.named_parameters())
    return trained


def assert_close(found: Trained, wanted: Trained, tolerance: float = 1e-5) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    for name, value in wanted.parameters.items():
        assert float((found.parameters[name] - value).abs().max()) <= tolerance, name


@pytest.mark.parametrize("family", ["qwen3 window", "mixtral balanced", "gpt2"])
def test_kept_graphs_and_the_horizontal_schedule_give_the_same(family: str, tmp_path: Path) -> None:
    config = make_config(family)
    wanted = train(config, tmp_path / "plain")
    kept = train(config, tmp_path / "kept", placement=gs.Placement(graphs_device=0.7))
    assert_close(kept, wanted)
    assert_close(train(config, tmp_path / "horizontal", schedule="horizontal"), wanted)


def test_rotary_embeddings_that_are_exchanged_for_longer_sequences_are_no_state_to_refuse(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = make_config("llama", rope_scaling=rope, max_position_embeddings=8)
    with gs.Engine(gs.load_model(config, seed=1), OPTIMIZER, storage=[tmp_path], ram="64MiB") as engine:
        module = engine._blocks[0].module
        assert module is not None
        before = dict(module.named_buffers())
        engine.step(make_batches(0))  # of 12 tokens
        after = dict(module.named_buffers())
    assert any("inv_freq" in name and after[name] is not value for name, value in before.items())


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_dropout_is_the_same_in_the_recompute(family: str, tmp_path: Path) -> None:
    """A kept graph has the masks of the forward; a recompute must draw the same."""
    name = {"gpt2": "resid_pdrop", "opt": "dropout", "llama": "attention_dropout"}[family]
    config = make_config(family, **{name: 0.3})
    wanted = train(config, tmp_path / "kept", placement=gs.Placement(graphs_device=1.0))
    assert_close(train(config, tmp_path / "recomputed"), wanted)
    without = train(make_config(family), tmp_path / "without")
    assert abs(without.losses[0] - wanted.losses[0]) > 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "qwen3 window"])
def test_compiled_layers_train_alike(family: str, tmp_path: Path) -> None:
    """Without a break in the graph, and compiled once for each kind of layer, not for each layer."""
    torch._dynamo.reset()
    config = make_config(family)

    def losses(folder: str, **options: Any) -> list[float]:
        model = gs.load_model(config, seed=1)
        with gs.Engine(
            model, OPTIMIZER, storage=[tmp_path / folder], ram="64MiB", dtype="float32", **options
        ) as engine:
            return [engine.step([make_batches(step)[2]]).loss for step in range(NUM_STEPS)]

    wanted = losses("plain")
    counters = torch._dynamo.utils.counters
    counters.clear()
    assert losses("compiled", compile=True) == pytest.approx(wanted, rel=1e-5)
    assert not counters["graph_break"], dict(counters["graph_break"])
    num_kinds = 1 if family == "llama" else 2
    assert counters["stats"]["unique_graphs"] <= 2 * num_kinds  # the forward and the recompute


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_alike_when_compiled(family: str, device: str, tmp_path: Path) -> None:
    """Plain, padded and packed rows, then shorter ones: the same code serves all lengths."""
    torch._dynamo.reset()
    config = make_config(family)

    def losses(folder: str, **options: Any) -> list[float]:
        with gs.Engine(
            gs.load_model(config, seed=1),
            OPTIMIZER,
            storage=[tmp_path / folder],
            ram="64MiB",
            dtype="float32",
            device=device,
            **options,
        ) as engine:
            found = [engine.step(make_batches(step)).loss for step in range(2)]
            return found + [engine.step([shortened(make_batches(step)[0], 10 - step)]).loss for step in range(3)]

    wanted = losses("plain")
    assert losses("compiled", compile=True) == pytest.approx(wanted, rel=1e-4)


def shortened(batch: Batch, length: int) -> Batch:
    return {name: value[:, :length].contiguous() for name, value in batch.items()}


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    config = make_config("gemma3")
    wanted, found = train(config, tmp_path / "float"), train(config, tmp_path / "bfloat", dtype="bfloat16")
    assert found.losses == pytest.approx(wanted.losses, rel=1e-2)  # eight bits of mantissa


def test_the_loss_of_an_evaluation_is_that_of_the_whole_model(tmp_path: Path) -> None:
    """With the balancing loss, each micro-batch counts by its number of targets."""
    config = make_config("mixtral balanced", router_jitter_noise=0.0)
    model = gs.load_model(config, seed=1)
    batches = make_batches(0)
    with gs.Engine(model, OPTIMIZER, storage=[tmp_path], ram="64MiB", dtype="float32") as engine:
        whole = whole_model(model, dict(engine.named_parameters())).eval()
        found = engine.evaluate(batches)
    with torch.no_grad():
        losses = [whole_loss(whole, batch, apart=False) for batch in batches]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    assert found == pytest.approx(float(sum(losses)) / total, rel=1e-6)


def test_masks_are_shared_by_layers_and_end_with_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[tuple[int, set[int], weakref.ref[Any]]] = []
    right = capture.note_calls

    def watch(batch: Any, calls: list[capture.Call]) -> None:
        masks = [call.options["attention_mask"] for call in calls]
        notes.append((len(calls), {id(mask) for mask in masks}, weakref.ref(masks[0])))
        right(batch, calls)

    monkeypatch.setattr(capture, "note_calls", watch)
    packed = make_batches(0)[2]
    with gs.Engine(gs.load_model(make_config("qwen3 window")), OPTIMIZER, storage=[tmp_path], ram="64MiB") as engine:
        notes.clear()
        for _ in range(3):
            engine.step([packed, packed])
        # The embedding's forward and backward of each micro-batch; once more to find the size of its output.
        assert len(notes) <= 3 * 2 * 2 + 1
        for num_calls, masks, _ in notes:
            assert (num_calls, len(masks)) == (3, 2)
        gc.collect()
        alive = [mask for _, _, mask in notes if mask() is not None]
        assert len(alive) <= 4, "only those of the last step may be left"
    assert set(packed) == {"input_ids", "labels", "position_ids"}


def test_three_steps_with_one_plain_micro_batch_are_those_of_the_model_itself(tmp_path: Path) -> None:
    """No division by hand: the loss that Hugging Face returns, as anyone would train it."""

    def batches(step: int) -> list[Batch]:
        return make_batches(step)[:1]

    model = gs.load_model(make_config("mixtral balanced"), seed=1)
    with gs.Engine(model, OPTIMIZER, storage=[tmp_path], ram="64MiB", dtype="float32", max_grad_norm=1.0) as engine:
        whole = whole_model(model, dict(engine.named_parameters()))
        losses = [engine.step(batches(step)).loss for step in range(NUM_STEPS)]
    assert losses == pytest.approx(train_whole(whole, batches, NUM_STEPS, apart=False).losses, rel=1e-5)
