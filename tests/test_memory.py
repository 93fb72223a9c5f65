"""RAM is a hard budget: a model many times larger trains in it, and its number of layers does not matter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

import child
import greedysnake as gs
from greedysnake.placement import Home
from greedysnake.runtime import memory
from greedysnake.shapes import total_params
from reference import OPTIMIZER, Batch, Embed, Head, Layer, Trained, make_batches, make_parts, num_targets, take_values

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 1 << 20
BUDGET = 16 * MIB
NUM_LAYERS = 12
HIDDEN, WIDTH, VOCAB = 512, 1024, 32
CHUNK_PARAMS = 131072
SLOTS = gs.Slots(staging=4, updates=4)
ALLOWANCE = 20 * MIB
"""On top of what torch and one block's compute take in a process without the engine: threads and their stacks, Python
objects, what malloc keeps. Measured: 8 to 16 MiB."""
GROWTH = 10 * MIB
"""Of RSS with 12 more layers, 144 MiB of state: the ops of two steps as Python objects, 2 MiB, and what malloc keeps in
one run and not in another. Measured: -1 to 5 MiB."""


def batches(step: int, num_micro_batches: int = 2) -> list[Batch]:
    return make_batches(num_micro_batches, step, vocab=VOCAB, length=16, uneven=False)


def model(num_layers: int) -> gs.Sequential:
    """Made block by block: it is never in memory as a whole."""
    layers = [partial(Layer, HIDDEN, WIDTH)] * num_layers
    return gs.Sequential(partial(Embed, VOCAB, HIDDEN), layers, partial(Head, VOCAB, HIDDEN), num_targets=num_targets)


def train(directory: str, num_layers: int, options: dict[str, object]) -> dict[str, int]:
    """Two steps and a checkpoint; returns sizes in bytes."""
    with gs.Engine(
        model(num_layers),
        OPTIMIZER,
        storage=[directory],
        ram=BUDGET,
        chunk_params=CHUNK_PARAMS,
        slots=SLOTS,
        **options,  # type: ignore[arg-type]
    ) as engine:
        for step in range(2):
            engine.step(batches(step))
        engine.save()
        homes = [home for block in engine.plan.homes for home in block]
        slots = engine.plan.slots
        layer = max(block.num_params for block in engine.plan.blocks)
        ends = max(engine.plan.blocks[0].num_params, engine.plan.blocks[-1].num_params)
        return {
            "rss": peak_rss_bytes(),
            "arena": engine.arena.peak_bytes,
            "state": 12 * total_params(engine.plan.blocks),
            "device": layer * (2 * slots.weights + 4 * slots.gradients) + ends * (2 + 4),
            "spilled": sum(home.late and home.gradient is Home.SSD for home in homes),
        }


def compute_alone() -> int:
    """Peak RSS of a process that has torch, the engine's modules and one layer, which it runs as the engine does."""
    import greedysnake.runtime.engine  # noqa: F401

    with torch.device("meta"):
        Embed(VOCAB, HIDDEN)  # the shapes are read so, for which torch loads more of itself
    layer = Layer(HIDDEN, WIDTH).bfloat16()
    for batch in batches(0):
        hidden = torch.zeros(*batch["ids"].shape, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        torch.autograd.grad(layer(hidden), [*layer.parameters(), hidden], torch.zeros_like(hidden))
    return peak_rss_bytes()


def peak_rss_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def test_a_model_of_many_times_the_budget_trains_within_it(tmp_path: Path) -> None:
    """With updates in both passes, and with clipping, for which all gradients must wait; then with twice the layers."""
    baseline = child.call("test_memory", "compute_alone")
    assert isinstance(baseline, int)
    runs = [
        (NUM_LAYERS, {"alpha": 0.25}),
        (NUM_LAYERS, {"max_grad_norm": 0.5}),
        (2 * NUM_LAYERS, {"max_grad_norm": 0.5}),
    ]
    found = [
        child.call("test_memory", "train", str(tmp_path / str(number)), num_layers, options)
        for number, (num_layers, options) in enumerate(runs)
    ]
    for sizes in found:
        assert sizes["state"] >= 8 * BUDGET
        assert sizes["arena"] <= BUDGET
        over = sizes["rss"] - baseline - sizes["device"]
        print(f"state {sizes['state'] / MIB:.0f} MiB, arena {sizes['arena'] / MIB:.1f}, over baseline {over / MIB:.1f}")
        assert over <= BUDGET + ALLOWANCE
    single, double = found[1:]
    assert abs(double["arena"] - single["arena"]) <= MIB // 2  # more gradients wait on SSD, not in RAM
    assert abs(double["rss"] - single["rss"]) <= GROWTH
    assert double["spilled"] > single["spilled"] > 0


# What does not fit is said before anything happens


def refuse(match: str, directory: Path | None, *, ram: object, **options: object) -> None:
    """The engine must not come into being: nothing of it on disk, nothing of it in memory."""
    with pytest.raises(gs.PlanError, match=match):
        gs.Engine(
            make_parts().sequential(),
            OPTIMIZER,
            storage=[directory] if directory else [],
            ram=ram,  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )
    assert directory is None or not directory.exists()


def test_slots_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path) -> None:
    message = (
        r"needs [\d.]+ MiB of RAM before any activation \(update slots .*, staging of weights .*\), "
        r"the budget is 1 MiB: raise ram, lower chunk_params or slots"
    )
    with pytest.raises(gs.PlanError, match=message):
        gs.Engine(model(2), OPTIMIZER, storage=[tmp_path / "store"], ram="1MiB", chunk_params=CHUNK_PARAMS, slots=SLOTS)
    assert not (tmp_path / "store").exists()


def test_homes_in_ram_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    everything = gs.Placement(weights_ram=1, optimizer_ram=1)
    refuse("optimizer state that lives in RAM", tmp_path / "store", ram="512KiB", placement=everything)
    refuse("optimizer state that lives in RAM", None, ram="512KiB", placement=everything)


def test_a_step_that_does_not_fit_is_refused_and_the_engine_goes_on(tmp_path: Path) -> None:
    """As if it had not been asked for: same values, no memory lost, nothing left half done."""

    def run(directory: Path, too_large: bool) -> Trained:
        with gs.Engine(
            make_parts().sequential(),
            OPTIMIZER,
            storage=[directory],
            ram="456KiB",
            chunk_params=2048,
            alpha=0.5,
        ) as engine:
            engine.step(make_batches(2, 0))
            used = engine.arena.used_bytes
            if too_large:
                with pytest.raises(gs.PlanError, match=r"needs .* of RAM for \d+ activations"):
                    engine.step(make_batches(100, 1))
                with pytest.raises(gs.PlanError, match=r"needs .* of RAM for \d+ activations"):
                    engine.evaluate(make_batches(2, 1, length=2000))
            for step in range(1, 4):
                engine.step(make_batches(2, step))
            assert engine.arena.used_bytes == used
            engine.step(make_batches(12, 4))  # leaves too little for the gradients, which go to SSD
            spilled = [home.gradient is Home.SSD for homes in engine.plan.homes for home in homes]
            assert any(spilled)
            if too_large:
                with pytest.raises(gs.PlanError, match=r"needs .* of RAM for \d+ activations"):
                    engine.step(make_batches(100, 5))
            engine.step(make_batches(2, 5))
            trained = Trained()
            take_values(engine, trained)
            return trained

    found, expected = run(tmp_path / "found", True), run(tmp_path / "expected", False)
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name], value), name


def test_a_larger_step_gives_the_device_its_memory_back_before_it_takes_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_buffers, before, alive = memory._device_buffers, list[weakref.ref[torch.Tensor]](), list[int]()

    def counted(count: int, nbytes: int, device: torch.device) -> Sequence[torch.Tensor]:
        alive.append(sum(buffer() is not None for buffer in before))
        return device_buffers(count, nbytes, device)

    monkeypatch.setattr(memory, "_device_buffers", counted)
    with gs.Engine(make_parts().sequential(), OPTIMIZER, storage=[tmp_path], ram="64MiB") as engine:
        for length in (8, 16, 24):
            engine.step(make_batches(2, 0, length=length))
            before += [weakref.ref(buffer) for buffer in engine._buffers.step.between]
    assert before and alive and not any(alive)


def test_late_gradients_without_room_or_storage_are_refused() -> None:
    with (
        gs.Engine(
            make_parts().sequential(),
            OPTIMIZER,
            ram="700KiB",
            chunk_params=2048,
            max_grad_norm=1.0,
            placement=gs.Placement(weights_ram=1, optimizer_ram=1),
        ) as engine,
        pytest.raises(gs.PlanError, match=r"gradients of late updates.*or give a storage directory to spill them to"),
    ):
        engine.step(make_batches(2, 0))


def test_horizontal_gradients_without_room_are_refused(tmp_path: Path) -> None:
    with (
        gs.Engine(
            make_parts().sequential(),
            OPTIMIZER,
            storage=[tmp_path],
            ram="320KiB",
            chunk_params=2048,
            schedule="horizontal",
        ) as engine,
        pytest.raises(gs.PlanError, match=r"the horizontal schedule needs .* of RAM for gradients.*use schedule='vert"),
    ):
        engine.step(make_batches(2, 0))


def test_closing_gives_all_memory_back(tmp_path: Path) -> None:
    engine = gs.Engine(make_parts().sequential(), OPTIMIZER, storage=[tmp_path], ram="64MiB")
    engine.step(make_batches(3, 0))
    assert engine.arena.used_bytes > 0
    engine.close()
    assert engine.arena.used_bytes == 0
