"""The simulator against what can be said of a step without one: sums, orders, and bounds that nothing can beat."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import greedysnake as gs
from greedysnake import schedule
from greedysnake.ops import Cursor, Kind, Lane, Op, Plan
from greedysnake.placement import Placement, Slots
from greedysnake.planning.costs import BlockTimes, Costs, Rates
from greedysnake.planning.simulate import Simulation, forecast, steps
from greedysnake.trace import Record
from greedysnake.verify import dependencies, step_ssd_bytes
from schedules import make_listings, make_plan, plans

INSTANT = Rates(*[math.inf] * 5)
ACTIVATION_BYTES = 4096


def costs_of(plan: Plan, rates: Rates, forward_s: float = 0.0, backward_s: float = 0.0) -> Costs:
    times = [BlockTimes(forward_s, backward_s)] * plan.num_compute
    return Costs(plan, rates, times, activation_bytes=ACTIVATION_BYTES)


def op(kind: Kind, block: int, index: int = 0, *, reads: str = "", writes: str = "", nbytes: int = 0) -> Op:
    """Resources are letters."""
    return Op(kind, block, index, tuple((letter,) for letter in reads), tuple((letter,) for letter in writes), nbytes)


def ends_of(simulation: Simulation) -> dict[str, float]:
    return {str(record.op): record.end_s for record in simulation.records}


# One lane, two lanes


def test_a_step_that_only_computes_takes_the_sum_of_its_ops() -> None:
    plan = make_plan(5)
    found = forecast(plan, costs_of(plan, INSTANT, forward_s=1.0, backward_s=3.0), 4)
    assert found.step_s == pytest.approx(4 * (4 * 1.0 + 5 * 3.0))  # the last block has no forward of its own
    assert found.least_s["compute"] == pytest.approx(found.step_s)


def test_a_step_that_only_stores_takes_what_its_bytes_need() -> None:
    plan = make_plan(6, slots=Slots(updates=40, staging=40))
    read, write = step_ssd_bytes(plan, 2)
    found = forecast(plan, costs_of(plan, replace(INSTANT, ssd_bytes_per_s=1e6)), 2)
    assert found.step_s == pytest.approx((read + write) / 1e6)
    assert found.least_s["ssd"] == pytest.approx(found.step_s)


def test_a_kept_graph_is_not_computed_again() -> None:
    plans = [make_plan(5, placement=Placement(graphs_device=share)) for share in (0.0, 1.0)]
    step_s = [forecast(plan, costs_of(plan, INSTANT, 1.0, 3.0), 4).step_s for plan in plans]
    assert step_s[0] - step_s[1] == pytest.approx(4 * 3 * 1.0)  # micro-batches, layers, forward


def test_lanes_of_one_link_share_it_evenly() -> None:
    simulation = Simulation(costs_of(make_plan(), replace(INSTANT, h2d_bytes_per_s=100.0)))
    simulation.submit([op(Kind.UPLOAD, 1, nbytes=100), op(Kind.GET, 2)], 0)  # the second moves an activation
    simulation.run()
    assert ends_of(simulation) == pytest.approx({"U1.0": 2.0, "G2.0": (100 + ACTIVATION_BYTES) / 100})


def test_ops_that_touch_the_same_thing_follow_each_other() -> None:
    simulation = Simulation(costs_of(make_plan(), replace(INSTANT, h2d_bytes_per_s=100.0, ssd_bytes_per_s=50.0)))
    simulation.submit([op(Kind.READ_WEIGHTS, 1, writes="s", nbytes=100), op(Kind.UPLOAD, 1, reads="s", nbytes=100)], 0)
    simulation.run()
    assert ends_of(simulation) == pytest.approx({"R1.0": 2.0, "U1.0": 3.0})


# Drives


def test_what_compute_waits_for_goes_before_what_came_first() -> None:
    simulation = Simulation(costs_of(make_plan(), replace(INSTANT, ssd_bytes_per_s=100.0)))
    state = [op(Kind.LOAD_STATE, 1, index, nbytes=100) for index in range(2)]
    late = op(Kind.READ_WEIGHTS, 2, reads="x", nbytes=100)
    first = op(Kind.FORWARD, 0, writes="x")
    simulation.submit([*state, first, late], 0)
    simulation.run()
    assert ends_of(simulation) == pytest.approx({"F0.0": 0.0, "R2.0": 1.0, "S1.0": 2.0, "S1.1": 3.0})


def test_an_urgent_request_interrupts_one_that_is_under_way() -> None:
    rates = replace(INSTANT, ssd_bytes_per_s=100.0)
    plan = make_plan()
    simulation = Simulation(costs_of(plan, rates, forward_s=0.5))
    ops = [op(Kind.LOAD_STATE, 1, nbytes=100), op(Kind.FORWARD, 0, writes="x")]
    simulation.submit([*ops, op(Kind.READ_WEIGHTS, 2, reads="x", nbytes=100)], 0)
    simulation.run()
    assert ends_of(simulation) == pytest.approx({"F0.0": 0.5, "R2.0": 1.5, "S1.0": 2.0})


def test_a_lane_of_the_drives_has_three_ops_under_way_and_they_end_in_order() -> None:
    simulation = Simulation(costs_of(make_plan(), replace(INSTANT, ssd_bytes_per_s=100.0)))
    simulation.submit([op(Kind.LOAD_STATE, 1, index, nbytes=100) for index in range(5)], 0)
    simulation.run()
    starts = {str(record.op): record.start_s for record in simulation.records}
    assert starts == pytest.approx({"S1.0": 0.0, "S1.1": 0.0, "S1.2": 0.0, "S1.3": 1.0, "S1.4": 2.0})
    assert [str(record.op) for record in simulation.records] == [f"S1.{index}" for index in range(5)]


def test_a_lane_that_finds_nothing_to_start_waits_for_its_oldest_op() -> None:
    """As the engine's threads do: the second read could start at 0.5, and its lane sleeps until the first has ended."""
    simulation = Simulation(costs_of(make_plan(), replace(INSTANT, ssd_bytes_per_s=100.0), forward_s=0.5))
    first, later = op(Kind.LOAD_STATE, 1, nbytes=100), op(Kind.LOAD_STATE, 2, reads="x", nbytes=100)
    simulation.submit([first, op(Kind.FORWARD, 0, writes="x"), later], 0)
    simulation.run()
    starts = {str(record.op): record.start_s for record in simulation.records}
    assert starts == pytest.approx({"F0.0": 0.0, "S1.0": 0.0, "S2.0": 1.0})


def test_one_direction_alone_has_a_speed_of_its_own() -> None:
    rates = replace(INSTANT, ssd_bytes_per_s=100.0, ssd_read_bytes_per_s=50.0, ssd_write_bytes_per_s=200.0)
    simulation = Simulation(costs_of(make_plan(), rates))
    simulation.submit([op(Kind.LOAD_STATE, 1, nbytes=100), op(Kind.WRITE, 2, nbytes=100)], 0)
    simulation.run()
    assert ends_of(simulation) == pytest.approx({"S1.0": 1.0, "W2.0": 1.5})  # the write is alone in its time
    simulation.submit([op(Kind.LOAD_STATE, 3, nbytes=100)], 1)
    simulation.run()
    assert ends_of(simulation)["S3.0"] == pytest.approx(3.5)


# Any schedule

rates = st.builds(Rates, *[st.floats(1e5, 1e9)] * 5, *[st.one_of(st.none(), st.floats(1e5, 1e9))] * 2)
kinds = st.lists(
    st.tuples(st.sampled_from(["vertical", "confirmed", "revoked", "evaluation", "flush"]), st.integers(1, 5)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=120, deadline=None)
@given(plans(), kinds, rates, st.floats(0, 1), st.floats(0, 1))
def test_every_op_runs_once_after_all_that_it_waits_for(
    plan: Plan, listed: list[tuple[str, int]], speeds: Rates, forward_s: float, more_s: float
) -> None:
    costs = costs_of(plan, speeds, forward_s, forward_s + more_s)
    simulation = Simulation(costs)
    ops = [op for listing in make_listings(plan, listed) for op in listing.ops]
    simulation.submit(ops, 0)
    simulation.run()
    spans = {id(record.op): (record.start_s, record.end_s) for record in simulation.records}
    assert sorted(map(id, ops)) == sorted(id(record.op) for record in simulation.records)
    for index, waits_for in enumerate(dependencies(ops)):
        for other in waits_for:
            assert spans[id(ops[other])][1] <= spans[id(ops[index])][0] + 1e-9
    for lane in Lane:
        of_lane = [spans[id(op)] for op in ops if op.lane is lane]
        assert of_lane == sorted(of_lane)
    for link in ("compute", "h2d", "d2h", "cpu"):
        assert simulation.now_s >= sum(costs.seconds(op) for op in ops if op.lane.link == link) - 1e-9


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 4))
def test_where_only_compute_takes_time_nothing_is_waited_for(plan: Plan, num_micro_batches: int) -> None:
    costs = costs_of(plan, INSTANT, 1.0, 3.0)
    ops = schedule.vertical(plan, Cursor(plan), num_micro_batches)
    wanted_s = sum(costs.seconds(op) for op in ops if op.lane is Lane.COMPUTE)
    assert forecast(plan, costs, num_micro_batches).step_s == pytest.approx(wanted_s)


# The engine


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 64)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden: torch.Tensor = self.table(batch["ids"])
        return hidden


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 16)

    def forward(self, hidden: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linear(hidden).flatten(0, 1), batch["ids"].flatten(), reduction="sum")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.0, "schedule": "horizontal"},
        {"max_grad_norm": 1e9, "optimistic": True},
        {"max_grad_norm": 1.0, "placement": Placement(activations_ram=0.0, gradients_ram=0.0)},
        {"placement": Placement(weights_device=0.5, activations_device=0.5, optimizer_ram=0.5)},
    ],
    ids=["plain", "horizontal", "optimistic", "spilling", "placed"],
)
def test_lanes_do_in_the_simulator_what_they_do_in_the_engine(options: dict[str, object], tmp_path: Path) -> None:
    """The same ops on every lane, in the same order, moving the same bytes: step for step."""
    model = gs.Sequential(
        Embed(), [nn.Linear(64, 64) for _ in range(4)], Head(), num_targets=lambda batch: batch["ids"].numel()
    )
    batches = [{"ids": torch.randint(16, (4, 8))} for _ in range(3)]
    options = {"storage": [tmp_path], "ram": "64MiB", "trace": True, "compress_moments": False, **options}
    with gs.Engine(model, gs.AdamW(lr=1e-3), **options) as engine:  # type: ignore[arg-type]
        for _ in range(4):
            engine.step(batches)
        plan = engine.plan
        engine.flush()
        done = engine.records
    kind = str(options.get("schedule", "vertical"))
    simulation = Simulation(
        Costs(plan, INSTANT, [BlockTimes(1.0, 3.0)] * plan.num_compute, activation_bytes=4 * 8 * 64 * 2)
    )
    list(islice(steps(simulation, plan, 3, kind=kind), 4))
    for lane in Lane:
        ran, expected = (
            [(record.step, str(record.op), record.nbytes) for record in records if is_of(record, lane)]
            for records in (done, simulation.records)
        )
        assert ran[: len(expected)] == expected
        assert bool(ran) == bool(expected)


def is_of(record: Record, lane: Lane) -> bool:
    """The loss, a number, is left out: the simulator does not count its bytes."""
    return record.lane is lane and record.op.kind is not Kind.LOSS
