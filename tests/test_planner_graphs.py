"""Which graphs of layers `plan` keeps on a device, on machines that are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from greedysnake import planner
from greedysnake.config import load_config
from greedysnake.errors import OpError
from greedysnake.measuring import Machine
from greedysnake.placement import Home
from greedysnake.planner import Planned, plan_run
from greedysnake.planning.costs import BlockTimes, Rates
from greedysnake.preparation import prepare
from greedysnake.report.plan_text import plan_text
from plans import Values, plan, with_engine
from training import values_in

pytestmark = pytest.mark.usefixtures("known_drive")

GRAPH = 1_000_000
"""Bytes of a layer's graph for one micro-batch, on the machine that is known."""


def graph_machine(
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    *,
    drive: float = 1e12,
    kept_s: float = 2.2,
    fails: Exception | None = None,
) -> list[bool]:
    """A GPU whose layers compute for 1 and 3 seconds, and for `kept_s` where their graph was kept. Returns whether
    graphs were kept, for each trial."""
    tried: list[bool] = []

    def measure(*_: Any, graphs: bool, **__: Any) -> Machine:
        tried.append(graphs)
        if graphs and fails:
            raise fails
        layer = BlockTimes(1.0, 3.0, kept_s if graphs else None)
        sizes = (0, *[GRAPH] * 8, 0) if graphs else None
        times = (BlockTimes(0.0, 0.0), *[layer] * 8, BlockTimes(0.0, 0.0))
        return Machine("cuda", Rates(drive, *[math.inf] * 4), times, 1, room, sizes)

    monkeypatch.setattr(planner, "measure", measure)
    return tried


def eight_layers(directory: Path, **engine: Any) -> Values:
    values = with_engine(values_in(directory), **{"ram": "2MiB", "fill_ram": True, "layers_per_block": 1, **engine})
    values["model"]["config"]["num_hidden_layers"] = 8
    return values


def kept_by(planned: Planned) -> int:
    return round(8 * planned.chosen.config.engine.placement.graphs_device)


@pytest.mark.usefixtures("one_thread")
class TestGraphs:
    @pytest.mark.parametrize("num_graphs", [0, 2, 3, 8])  # one alone gains 2.5 %
    def test_as_many_are_kept_as_the_device_has_room_for(
        self, num_graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = eight_layers(tmp_path)
        tried = graph_machine(monkeypatch, 0)
        without = plan(values).chosen
        assert tried == [False]
        count = without.config.training.gradient_accumulation_steps
        weights = 8 * max(block.num_params for block in without.footprint.plan.blocks) * 4
        room = without.footprint.device_bytes + weights + (num_graphs * GRAPH + GRAPH // 2) * count
        tried = graph_machine(monkeypatch, room)
        planned = plan(values)
        chosen = planned.chosen
        assert tried == [False, True]
        assert kept_by(planned) == num_graphs
        assert chosen.footprint.device_bytes <= room
        assert chosen.forecast.step_s == pytest.approx(count * (8 * 4.0 - kept_by(planned) * 0.8), rel=0.02)
        assert all(option.footprint.device_bytes <= room for option in planned.larger[:1])
        if kept_by(planned):
            kept = chosen.footprint.homes["graphs"]
            assert kept == {Home.DEVICE: kept_by(planned) * GRAPH * count}
            assert "engine.placement.graphs_device" in plan_text(planned)
            path = tmp_path / "planned.yaml"
            path.write_text(chosen.config.as_yaml())
            assert prepare(load_config(path)).footprint.plan == chosen.footprint.plan

    def test_they_take_the_room_that_weights_and_activations_leave(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graph_machine(monkeypatch, 1 << 40)
        placement = plan(eight_layers(tmp_path)).chosen.config.engine.placement
        assert (placement.activations_device, placement.weights_device, placement.graphs_device) == (1.0, 1.0, 1.0)

    @pytest.mark.parametrize("why", ["the drive is the bound", "set by hand", "not vertical", "no room"])
    def test_what_cannot_gain_is_not_measured(self, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine: Values = {
            "the drive is the bound": {"ram": "700KiB"},
            "set by hand": {"placement": {"graphs_device": 0.5}},
            "not vertical": {"schedule": "horizontal", "placement": {"gradients_ram": 1.0}},
        }.get(why, {})
        drive = 1.0 if why == "the drive is the bound" else 1e12
        tried = graph_machine(monkeypatch, 1000 if why == "no room" else 1 << 40, drive=drive)
        planned = plan(eight_layers(tmp_path, **engine))
        assert tried == [False]
        assert kept_by(planned) == (4 if why == "set by hand" else 0)

    def test_what_was_hoped_for_is_measured_before_it_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried = graph_machine(monkeypatch, 1 << 40, kept_s=2.95)
        assert kept_by(plan(eight_layers(tmp_path))) == 0
        assert tried == [False, True]

    def test_a_device_without_room_for_the_trial_keeps_none_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        graph_machine(monkeypatch, 1 << 40, fails=OpError("F1.0: OutOfMemoryError: CUDA out of memory", op="F1.0"))
        assert kept_by(plan_run(load_config(eight_layers(tmp_path)), said.append)) == 0
        assert "the device has no room for graphs of layers" in said
        graph_machine(monkeypatch, 1 << 40, fails=OpError("F1.0: ValueError: no", op="F1.0"))
        with pytest.raises(OpError, match="ValueError"):
            plan(eight_layers(tmp_path))

    @pytest.mark.parametrize("num_graphs", [0, 3, 5])
    def test_no_more_of_the_room_is_taken_than_vram_says(
        self, num_graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graph_machine(monkeypatch, 1 << 40)
        without = plan(eight_layers(tmp_path, vram=0)).chosen
        shares = without.config.engine.placement
        assert (shares.activations_device, shares.weights_device, shares.graphs_device) == (0.0, 0.0, 0.0)
        count = without.config.training.gradient_accumulation_steps
        vram = num_graphs * GRAPH * count + (GRAPH * count // 2 if num_graphs else 0)
        planned = plan(eight_layers(tmp_path, vram=vram))
        assert kept_by(planned) == num_graphs
        for option in (planned.chosen, *planned.larger[:1]):
            buffers = option.footprint.homes["buffers"][Home.DEVICE]
            assert option.footprint.device_bytes - buffers <= vram

    def test_twice_the_micro_batches_keep_half_the_graphs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = eight_layers(tmp_path, ram="700KiB", optimistic=False, alpha=0.5)
        graph_machine(monkeypatch, 1 << 40)
        moved = plan(values).chosen.footprint.step_ssd_bytes
        graph_machine(monkeypatch, 1 << 40, drive=moved / 58.0)  # the device computes for 51 to 64 seconds
        planned = plan(values)
        kept = [round(8 * each.config.engine.placement.graphs_device) for each in (planned.chosen, *planned.larger)]
        assert len(kept) > 1 and kept[1:] == [kept[0] >> time for time in range(1, len(kept))]


@pytest.mark.usefixtures("one_thread")
def test_a_trial_that_keeps_graphs_tells_what_a_backward_takes_without_its_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For real. How large graphs are is known on a GPU alone, where the allocator counts."""
    measure = planner.measure
    monkeypatch.setattr(planner, "measure", lambda *args, **options: measure(*args, **{**options, "graphs": True}))
    machine = plan(values_in(tmp_path)).machine
    embed, *layers, head = machine.times
    assert embed.kept_backward_s is None and head.kept_backward_s is None
    for layer in layers:
        assert layer.kept_backward_s is not None and 0 < layer.kept_backward_s < layer.backward_s
    assert machine.graph_bytes is None
