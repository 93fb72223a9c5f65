"""Fractions become homes: as many as asked for, first blocks first, and never more than there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedysnake.errors import ConfigError
from greedysnake.placement import (
    Home,
    Placement,
    Slots,
    activation_homes,
    chunk_homes,
    is_fetched_once,
    keep_on_device,
    num_compute_blocks,
    ram_bytes,
)
from greedysnake.shapes import GRANULE, PRECISIONS, BlockShape, block_shape, cut, pad, spread

fractions = st.floats(0, 1)


def make_blocks(num_blocks: int = 6, num_chunks: int = 2, *, shared: bool = False) -> list[BlockShape]:
    names = [f"block {index}" for index in range(num_blocks)]
    blocks = [block_shape(name, num_chunks * GRANULE, 0, GRANULE, "layers") for name in names]
    return [*blocks, block_shape("shared", GRANULE, 0, GRANULE, "shared")] if shared else blocks


@given(st.integers(1, 200), fractions)
def test_spread_marks_the_share_evenly(count: int, share: float) -> None:
    marks = spread(count, share)
    assert len(marks) == count and sum(marks) == round(count * share)
    for length in range(count + 1):
        assert abs(sum(marks[:length]) - length * sum(marks) / count) < 1


@given(st.integers(0, 60), st.integers(1, 9))
def test_chunks_cover_their_range_in_order_and_differ_by_one_granule(num_granules: int, chunk_granules: int) -> None:
    chunks = cut(num_granules * GRANULE, chunk_granules * GRANULE, start=GRANULE)
    end = GRANULE
    for chunk in chunks:
        assert chunk.start == end and 0 < chunk.num_params <= chunk_granules * GRANULE
        end += chunk.num_params
    assert end == GRANULE * (num_granules + 1)
    sizes = {chunk.num_params for chunk in chunks}
    assert not sizes or max(sizes) - min(sizes) <= GRANULE


def test_a_block_is_padded_and_its_trainable_part_comes_first() -> None:
    block = block_shape("layer", 5000, 100, 2 * GRANULE, "layers")
    assert [(chunk.num_params, chunk.trainable) for chunk in block.chunks] == [
        (GRANULE, True),
        (2 * GRANULE, True),
        (GRANULE, False),
    ]
    assert block.num_trainable == pad(5000) == 3 * GRANULE
    assert block.num_params == 4 * GRANULE


@given(fractions, fractions)
def test_ram_takes_the_share_that_was_asked_for_first_blocks_first(weights: float, optimizer: float) -> None:
    blocks = make_blocks()
    homes = chunk_homes(blocks, Placement(weights_ram=weights, optimizer_ram=optimizer), alpha=0, clipping=False)
    for share, in_ram in (
        (weights, [home.weight is Home.RAM for block in homes for home in block]),
        (optimizer, [home.state is Home.RAM for block in homes for home in block]),
    ):
        assert sum(in_ram) == round(12 * share)
        assert all(in_ram[: min(4, sum(in_ram))])


def test_ram_goes_to_shared_parameters_before_the_first_blocks() -> None:
    blocks = make_blocks(shared=True)
    for num_chunks, wanted in ((1, {6: 1}), (2, {6: 1, 0: 1}), (5, {6: 1, 0: 2, 1: 2})):
        homes = chunk_homes(blocks, Placement(weights_ram=num_chunks / 13), alpha=0, clipping=False)
        found = {number: sum(home.weight is Home.RAM for home in block) for number, block in enumerate(homes)}
        assert {number: count for number, count in found.items() if count} == wanted


@given(fractions)
def test_alpha_is_the_share_of_late_updates_but_not_in_blocks_that_are_fetched_once(alpha: float) -> None:
    blocks = make_blocks(shared=True)
    homes = chunk_homes(blocks, Placement(), alpha=alpha, clipping=False)
    assert num_compute_blocks(blocks) == 6
    assert [is_fetched_once(blocks, index) for index in range(7)] == [False] * 5 + [True] * 2
    assert sum(home.late for block in homes[:5] for home in block) == round(10 * alpha)
    assert not any(home.late for block in homes[5:] for home in block)


@pytest.mark.parametrize(
    ("weights_ram", "wanted"),
    [
        (0.0, [[True, True], [False, False], [False, False], [True, False], [False, True]]),
        (5 / 13, [[False, False], [True, False], [True, False], [False, True], [False, True]]),
    ],
)
def test_half_of_the_late_updates_are_what_comes_first_if_its_weights_are_on_ssd(
    weights_ram: float, wanted: list[list[bool]]
) -> None:
    homes = chunk_homes(make_blocks(shared=True), Placement(weights_ram=weights_ram), alpha=0.4, clipping=False)
    assert [[home.late for home in block] for block in homes[:5]] == wanted


def test_with_clipping_every_trainable_chunk_is_late_and_no_frozen_one() -> None:
    blocks = [block_shape(f"block {index}", 2 * GRANULE, GRANULE, GRANULE, "layers") for index in range(3)]
    homes = chunk_homes(blocks, Placement(gradients_ram=0.5), alpha=0, clipping=True)
    assert [[home.late for home in block] for block in homes] == [[True, True, False]] * 3
    gradients = [home.gradient for block in homes for home in block if home.late]
    assert gradients.count(Home.SSD) == 3


@given(fractions, fractions, st.integers(1, 8), st.integers(1, 9))
def test_activations_go_to_device_then_ram_then_ssd(
    on_device: float, share: float, num_blocks: int, num_micro_batches: int
) -> None:
    placement = Placement(activations_device=on_device, activations_ram=(1 - on_device) * share)
    homes = list(activation_homes(range(1, num_blocks), (), num_micro_batches, placement).values())
    count = (num_blocks - 1) * num_micro_batches
    assert len(homes) == count
    assert homes.count(Home.DEVICE) == round(count * on_device)
    assert abs(homes.count(Home.RAM) - count * placement.activations_ram) <= 1


def test_tensors_that_do_not_come_back_pass_through_ram() -> None:
    placement = Placement(activations_device=1.0, activations_ram=0.0)
    homes = activation_homes([1, 2], [3], 2, placement)
    assert [homes[block, 0] for block in (1, 2, 3)] == [Home.DEVICE, Home.DEVICE, Home.RAM]


def test_graphs_are_kept_of_the_last_layers() -> None:
    blocks = keep_on_device(make_blocks(6, 1), Placement(graphs_device=0.5))
    assert [block.pool for block in blocks] == ["layers", "layers", "layers", "kept", "kept", "layers"]


def test_weights_are_kept_where_graphs_are_and_where_asked() -> None:
    blocks = keep_on_device(make_blocks(6, 1), Placement(graphs_device=0.25, weights_device=0.75))
    assert [block.pool for block in blocks] == ["layers", "layers", "kept", "kept", "kept", "layers"]


def test_ram_goes_to_weights_that_stay_on_the_device_last_and_last_of_all_to_frozen_ones() -> None:
    blocks = [block_shape(f"block {index}", GRANULE, GRANULE, GRANULE, "layers") for index in range(6)]
    blocks = keep_on_device(blocks, Placement(weights_device=0.5))
    assert [block.pool for block in blocks] == ["layers", "layers", "layers", "kept", "kept", "layers"]
    found = {}
    for count in (4, 10):
        homes = chunk_homes(blocks, Placement(weights_ram=count / 12), alpha=0, clipping=False)
        found[count] = [[home.weight is Home.RAM for home in block] for block in homes]
        assert sum(map(sum, found[count])) == count
    assert not any(map(any, found[4][3:5]))
    assert found[10][3:5] == [[True, False], [True, False]]


def test_ram_bytes_counts_what_stays() -> None:
    blocks = make_blocks(2, 1)
    placement = Placement(weights_ram=1, optimizer_ram=0.5)
    homes = chunk_homes(blocks, placement, alpha=1, clipping=False)
    assert ram_bytes(blocks, homes, PRECISIONS["bfloat16"]) == {
        "weights": 2 * 2 * GRANULE,
        "optimizer state": 10 * GRANULE,
        "gradients": 4 * GRANULE,
        "tentative weights": 0,
    }


def test_tentative_updates_are_those_that_would_be_early_and_need_the_ssd() -> None:
    blocks = make_blocks(2, 1)
    placement = Placement(weights_ram=1, optimizer_ram=0.5)
    homes = chunk_homes(blocks, placement, alpha=0, clipping=True, tentative=True)
    assert all(home.late for block in homes for home in block)
    assert [[home.tentative for home in block] for block in homes] == [
        [home.state is Home.SSD for home in block] for block in homes
    ]
    number = sum(home.tentative for block in homes for home in block)
    assert ram_bytes(blocks, homes, PRECISIONS["bfloat16"])["tentative weights"] == 2 * number * GRANULE
    assert not any(home.tentative for block in chunk_homes(blocks, placement, alpha=0, clipping=True) for home in block)


def test_without_storage_everything_must_live_in_ram() -> None:
    with pytest.raises(ConfigError, match=r"weights_ram and placement\.optimizer_ram to 1"):
        chunk_homes(make_blocks(), Placement(weights_ram=1), alpha=0, clipping=False, has_ssd=False)
    homes = chunk_homes(make_blocks(), Placement(1, 1, gradients_ram=0), alpha=1, clipping=False, has_ssd=False)
    assert all(home.gradient is Home.RAM for block in homes for home in block)


@pytest.mark.parametrize("field", ["weights_ram", "optimizer_ram", "gradients_device"])
def test_a_fraction_outside_0_to_1_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"placement.{field} is 1.5"):
        Placement(**{field: 1.5})


def test_activations_that_are_not_on_the_device_wait_in_ram_unless_said_otherwise() -> None:
    assert Placement(activations_device=0.75).activations_ram == 0.25
    assert Placement(activations_device=0.75, activations_ram=0).activations_ram == 0


def test_more_activations_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 1"):
        Placement(activations_device=0.5, activations_ram=0.6)


def test_no_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slots.staging is 0"):
        Slots(staging=0)
