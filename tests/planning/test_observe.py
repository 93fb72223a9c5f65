"""What a trace says of a machine: that of a simulated one is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from greedysnake.placement import Placement, Slots
from greedysnake.planning.costs import BlockTimes, Costs, Rates
from greedysnake.planning.observe import BYTES_PER_UPDATE, observe
from greedysnake.planning.simulate import forecast
from schedules import make_plan

RATES = Rates(3e6, 5e7, 4e7, cpu_params_per_s=6e6, cpu_bytes_per_s=8e7)
TIMES = [BlockTimes(0.001, 0.004), BlockTimes(0.02, 0.05), BlockTimes(0.03, 0.07), BlockTimes(0.0, 0.009)]


@pytest.mark.parametrize("clipping", [False, True])
@pytest.mark.parametrize("graphs", [0.0, 1.0])
def test_a_simulated_machine_is_found_again_in_its_trace(clipping: bool, graphs: float) -> None:
    placement = Placement(graphs_device=graphs, activations_ram=0.5)
    plan = make_plan(4, clipping=clipping, placement=placement, slots=Slots(updates=20, staging=20))
    if graphs:
        plan = replace(plan, blocks=tuple(replace(b, pool="kept") if b.pool == "layers" else b for b in plan.blocks))
    costs = Costs(plan, RATES, TIMES, activation_bytes=4096)
    found = observe(forecast(plan, costs, 3).records, plan)
    assert found.rates.h2d_bytes_per_s == pytest.approx(RATES.h2d_bytes_per_s)
    assert found.rates.d2h_bytes_per_s == pytest.approx(RATES.d2h_bytes_per_s)
    assert found.rates.ssd_bytes_per_s == pytest.approx(RATES.ssd_bytes_per_s)
    if clipping:  # the sums of squares share the CPU with updates
        assert found.rates.cpu_bytes_per_s == pytest.approx(RATES.cpu_bytes_per_s)
    else:
        assert found.rates.cpu_params_per_s == pytest.approx(RATES.cpu_params_per_s)
        assert found.rates.cpu_bytes_per_s == pytest.approx(BYTES_PER_UPDATE * RATES.cpu_params_per_s)
    for seen, true in zip(found.times[:-1], TIMES[:-1], strict=True):
        assert (seen.forward_s, seen.backward_s) == pytest.approx((true.forward_s, true.backward_s))
    for seen, true in zip(found.times[1:-1], TIMES[1:-1], strict=True):
        kept_s = pytest.approx(true.backward_s - true.forward_s) if graphs else None
        assert seen.kept_backward_s == kept_s
    assert found.times[-1] == BlockTimes(pytest.approx(0.003), pytest.approx(0.009))  # type: ignore[arg-type]


def test_a_link_that_moved_nothing_is_no_bound() -> None:
    plan = make_plan(3, placement=Placement(weights_ram=1, optimizer_ram=1))
    costs = Costs(plan, RATES, TIMES[:3], activation_bytes=0)
    assert math.isinf(observe(forecast(plan, costs, 2).records, plan).rates.ssd_bytes_per_s)
