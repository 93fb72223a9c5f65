"""What stays in RAM when a budget is to be used."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import greedysnake as gs
from greedysnake.errors import PlanError
from greedysnake.placement import Home
from greedysnake.runtime.filling import largest_share
from greedysnake.runtime.footprint import Footprint, device_bytes, foresee, outline
from greedysnake.shapes import PRECISIONS
from reference import OPTIMIZER, make_batches, make_parts, train_engine

ROWS, LENGTH, HIDDEN = 4, 32, 64
ACTIVATION_BYTES = ROWS * LENGTH * HIDDEN * 2


def plan(ram: int, **options: object) -> Footprint:
    model = make_parts(hidden=HIDDEN, width=256, num_layers=6, vocab=200).sequential()
    values: dict[str, object] = {
        "precision": PRECISIONS["bfloat16"],
        "ram": ram,
        "num_directories": 1,
        "alpha": 0.25,
        "clipping": True,
        "placement": gs.Placement(),
        "slots": gs.Slots(),
        "single_slot": False,
        "vertical": True,
        "num_micro_batches": 8,
        "activation_bytes": ACTIVATION_BYTES,
        "fill": True,
        **options,
    }
    blocks = outline(model, precision=values["precision"], ram=ram, chunk_params=4096)  # type: ignore[arg-type]
    return foresee(blocks, **values)  # type: ignore[arg-type]


def shares(footprint: Footprint) -> tuple[float, float, float]:
    placement = footprint.plan.placement
    return placement.weights_ram, placement.activations_ram, placement.optimizer_ram


def test_with_enough_ram_everything_stays_there() -> None:
    found = plan(1 << 30)
    assert shares(found) == (1.0, 1.0, 1.0)
    assert sum(row.get(Home.SSD, 0) for row in found.homes.values()) == 0
    assert (found.plan.slots.updates, found.plan.slots.staging) == (48, 16)


def test_what_is_on_the_device_needs_no_ram() -> None:
    found = plan(1 << 30, placement=gs.Placement(activations_device=0.75))
    assert shares(found) == (1.0, 0.25, 1.0)
    tight = min(ram for ram in range(1 << 18, 1 << 22, 1 << 15) if fits(ram))
    for ram in range(tight, 2 << 20, 1 << 16):
        assert plan(ram, placement=gs.Placement(activations_device=0.75)).plan.placement.activations_ram <= 0.25


def test_more_ram_never_means_less_in_it_and_no_plan_passes_the_budget() -> None:
    smallest = next(ram for ram in range(1 << 18, 1 << 22, 1 << 15) if fits(ram))
    previous = (0.0, 0.0, 0.0)
    seen = set()
    for ram in range(smallest, 6 << 20, 1 << 17):
        found = plan(ram)
        assert found.ram_bytes <= ram
        assert all(share >= before - 0.1 for share, before in zip(shares(found), previous, strict=True))
        if shares(found)[1] > 0.02:  # less of them may fit where no chunk of weights does
            assert shares(found)[0] == 1.0  # weights first
        if shares(found)[2] > 0:
            assert shares(found)[:2] == (1.0, 1.0)  # the optimizer state last
            assert found.homes["gradients"].get(Home.SSD, 0) == 0
        previous = shares(found)
        seen.add(tuple(0 < share < 1 for share in previous))
    assert len(seen) >= 3  # each of them was in between somewhere


def fits(ram: int) -> bool:
    try:
        plan(ram)
    except PlanError:
        return False
    return True


def test_what_fits_without_filling_fits_with_it() -> None:
    for ram in range(1 << 19, 4 << 20, 1 << 17):
        try:
            plan(ram, fill=False)
        except PlanError:
            continue
        assert fits(ram)


@pytest.mark.parametrize("clipping", [True, False])
def test_gradients_that_are_to_be_spilled_have_their_buffers(clipping: bool) -> None:
    for ram in range(1 << 20, 3 << 20, 1 << 18):
        found = plan(ram, clipping=clipping, placement=gs.Placement(gradients_ram=0.0))
        assert found.ram_bytes <= ram


def test_more_slots_do_not_take_the_room_of_shares_that_were_set() -> None:
    given: dict[str, object] = {
        "placement": gs.Placement(weights_ram=0.5, activations_ram=0.99, optimizer_ram=0.5),
        "activation_bytes": 1 << 19,
        "clipping": False,
        "alpha": 0.0,
    }
    ram = plan(1 << 30, fill=False, **given).ram_bytes
    assert plan(ram, **given).ram_bytes <= ram
    slots = plan(1 << 28, **given).plan.slots
    assert slots.updates > gs.Slots().updates


def test_shares_that_were_set_stay() -> None:
    assert shares(plan(1 << 30, placement=gs.Placement(weights_ram=0.25)))[0] == 0.25
    given = gs.Placement(activations_device=0.5, activations_ram=0.25, optimizer_ram=0.5)
    assert shares(plan(1 << 30, placement=given)) == (1.0, 0.25, 0.5)
    assert shares(plan(1 << 30, placement=gs.Placement(activations_device=1, activations_ram=0)))[1] == 0.0


@pytest.mark.parametrize("ram", [1_200_000, 2 << 20, 4 << 20])
def test_the_engine_runs_what_was_planned_within_the_budget(ram: int, tmp_path: Path) -> None:
    parts = {"hidden": HIDDEN, "width": 256, "num_layers": 6, "vocab": 200}
    found = plan(ram, num_micro_batches=3, activation_bytes=4 * 12 * HIDDEN * 2)
    trained = [
        train_engine(
            make_parts(**parts).sequential(),
            lambda step: make_batches(3, step, vocab=200),
            3,
            optimizer=OPTIMIZER,
            storage=[tmp_path / name],
            chunk_params=4096,
            max_grad_norm=1.0,
            **options,
        )
        for name, options in (
            ("filled", {"ram": ram, "placement": found.plan.placement, "slots": found.plan.slots}),
            ("plain", {}),
        )
    ]
    assert trained[0].losses == trained[1].losses


# The device


def on_device(found: Footprint) -> tuple[float, float]:
    return found.plan.placement.activations_device, found.plan.placement.weights_device


def test_the_device_is_filled_with_activations_first_and_never_beyond_its_budget() -> None:
    without = plan(4 << 20)
    assert on_device(without) == (0.0, 0.0)
    previous = (0.0, 0.0)
    seen = set()
    for vram in range(0, 2 << 20, 1 << 16):
        found = plan(4 << 20, vram=vram)
        assert found.device_bytes - without.device_bytes <= vram
        assert all(share >= before for share, before in zip(on_device(found), previous, strict=True))
        if on_device(found)[1] > 0:
            assert on_device(found)[0] > 0.99  # to one part in 256
        previous = on_device(found)
        seen.add(tuple(0 < share < 1 for share in previous))
    assert on_device(plan(4 << 20, vram=1 << 30)) == (1.0, 1.0)
    assert len(seen) == 3  # each of the two was in between somewhere


def test_what_is_on_the_device_leaves_its_ram_to_state() -> None:
    ram = 3 << 20
    before, after = plan(ram), plan(ram, vram=1 << 30)
    assert after.homes["activations"].get(Home.RAM, 0) == 0 < before.homes["activations"][Home.RAM]
    assert after.homes["optimizer state"][Home.RAM] > before.homes["optimizer state"].get(Home.RAM, 0)
    assert after.step_ssd_bytes < before.step_ssd_bytes


def test_weights_that_stay_on_the_device_get_ram_last() -> None:
    given = gs.Placement(weights_device=0.5)
    seen = set()
    for ram in range(1 << 20, 6 << 20, 1 << 17):
        found = plan(ram, placement=given).plan
        kept, fetched = (
            {home.weight for b, homes in enumerate(found.homes) for home in homes if found.keeps_weights(b) == keeps}
            for keeps in (True, False)
        )
        if Home.RAM in kept:
            assert fetched == {Home.RAM}
            counts = [len(block.chunks) for block in found.blocks]
            num_fetched = sum(n for number, n in enumerate(counts) if not found.keeps_weights(number))
            without = plan(ram, placement=replace(given, weights_ram=num_fetched / sum(counts))).plan
            assert found.placement.optimizer_ram == without.placement.optimizer_ram
        seen.add((Home.RAM in kept, found.placement.optimizer_ram))
    assert {(False, 0.0), (True, 1.0)} < seen


def test_shares_on_the_device_that_were_set_stay() -> None:
    given = gs.Placement(activations_device=0.25, weights_device=0.5)
    assert on_device(plan(4 << 20, vram=1 << 30, placement=given)) == (0.25, 0.5)
    rest = plan(4 << 20, vram=1 << 30, placement=gs.Placement(activations_ram=0.25)).plan.placement
    assert (rest.activations_device, rest.activations_ram) == (0.75, 0.25)


@pytest.mark.parametrize("vram", [0, 1 << 17, 1 << 30])
def test_what_a_plan_holds_on_the_device_is_counted_once(vram: int) -> None:
    found = plan(4 << 20, vram=vram)
    assert device_bytes(found.plan, 8, ACTIVATION_BYTES) == found.device_bytes


@given(st.lists(st.sampled_from([0, 0, 1, 5, 1000, 10**6]), min_size=2, max_size=257), st.integers(0, 10**8))
def test_the_largest_share_that_fits_is_found_however_what_it_needs_grows(steps: list[int], most: int) -> None:
    needs, num_parts, tries = list(accumulate(steps)), len(steps) - 1, 0

    def needed(share: float) -> int:
        nonlocal tries
        tries += 1
        return needs[round(share * num_parts)]

    fitting = [part for part, nbytes in enumerate(needs) if nbytes <= most % (needs[-1] + 2)]
    assert largest_share(needed, most % (needs[-1] + 2), num_parts) == max(fitting, default=0) / num_parts
    assert tries <= 2 + 3 * num_parts.bit_length()


def test_what_grows_in_proportion_takes_few_tries() -> None:
    tried: list[float] = []
    assert largest_share(lambda share: tried.append(share) or round(1e9 * share), 700_000_000, 256) == 179 / 256
    assert len(tried) <= 4
