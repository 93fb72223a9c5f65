"""Every schedule that the maker writes is proved by the verifier; broken ones show that the verifier can be trusted."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.errors import ConfigError, PlanError, VerifyError
from greedysnake.holdings import resources_of
from greedysnake.ops import Cursor, Kind, Lane, Op, Plan, Resource
from greedysnake.placement import Placement, Slots, chunk_homes
from greedysnake.report.schedule_text import example_plan, schedule_text
from greedysnake.schedule import horizontal
from greedysnake.shapes import GRANULE, total_params
from greedysnake.verify import (
    Listing,
    check_order,
    dependencies,
    step_device_bytes,
    step_net_bytes,
    step_ssd_bytes,
    verify,
)
from schedules import fractions, make_listings, make_plan, plans


def kinds(*training: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    names = st.sampled_from([*training, *training, "evaluation", "flush"])
    return st.lists(st.tuples(names, st.integers(1, 9)), min_size=1, max_size=4)


@settings(max_examples=250, deadline=None)
@given(plans(), kinds("vertical", "confirmed", "revoked"))
def test_any_sequence_of_vertical_steps_evaluations_and_flushes_is_correct(
    plan: Plan, listed: list[tuple[str, int]]
) -> None:
    verify(plan, make_listings(plan, [*listed, ("flush", 0)]))


@settings(max_examples=120, deadline=None)
@given(plans(spills=False), kinds("vertical", "horizontal"))
def test_horizontal_steps_are_correct_between_any_others(plan: Plan, listed: list[tuple[str, int]]) -> None:
    verify(plan, make_listings(plan, [*listed, ("flush", 0)]))


def test_a_horizontal_step_refuses_spilled_gradients() -> None:
    plan = make_plan(clipping=True, placement=Placement(gradients_ram=0.5))
    with pytest.raises(PlanError, match="gradients_ram to 1"):
        horizontal(plan, Cursor(plan), 2)


# Order and lanes


def test_dependencies_hold_one_op_per_lane_and_of_their_own_only_where_ops_overlap() -> None:
    plan = make_plan(shared=True, clipping=True)
    ops = [op for listing in make_listings(plan, [("vertical", 3)] * 2) for op in listing.ops]
    for op, after in zip(ops, dependencies(ops), strict=True):
        lanes = [ops[index].lane for index in after]
        assert len(set(lanes)) == len(lanes)
        assert op.lane not in lanes or op.lane.overlaps


def test_two_writes_of_one_gradient_do_not_overlap() -> None:
    """Of a tentative update that is confirmed nothing reads the gradient that was spilled."""
    placement = Placement(weights_ram=1, gradients_ram=0)
    plan = make_plan(3, chunks=(1,), alpha=0.0, clipping=True, tentative=True, placement=placement)
    ops = [op for listing in make_listings(plan, [("confirmed", 1)] * 2) for op in listing.ops]
    after = dependencies(ops)
    check_order(ops, after)
    of_other_lanes = [
        tuple(other for other in waits if ops[other].lane is not op.lane) for op, waits in zip(ops, after, strict=True)
    ]
    with pytest.raises(VerifyError, match=r"H2\.0 does not wait for H2\.0, which writes kept 2 0 before"):
        check_order(ops, of_other_lanes)


def test_a_slot_is_not_reused_before_its_reader_ends() -> None:
    plan = make_plan(slots=Slots(staging=1))
    ops = make_listings(plan, [("vertical", 2)])[0].ops
    after = dependencies(ops)
    uploads = [index for index, op in enumerate(ops) if op.kind is Kind.UPLOAD and op.reads == (("staging", 0),)]
    second_read = next(index for index, op in enumerate(ops) if index > uploads[0] and op.writes == (("staging", 0),))
    assert uploads[0] in after[second_read]
    after[second_read] = ()
    with pytest.raises(
        VerifyError,
        match=r"does not wait for U0\.0, which reads staging 0|does not wait for R0\.0, which writes staging 0",
    ):
        check_order(ops, after)


def test_an_op_that_waits_for_a_later_one_is_a_deadlock() -> None:
    ops = make_listings(make_plan(), [("vertical", 2)])[0].ops
    after = dependencies(ops)
    after[0] = (5,)
    with pytest.raises(VerifyError, match="deadlock"):
        check_order(ops, after)


def test_without_its_dependencies_no_schedule_is_ordered() -> None:
    ops = make_listings(make_plan(), [("vertical", 2)])[0].ops
    with pytest.raises(VerifyError, match="does not wait"):
        check_order(ops, [()] * len(ops))


# Snake


def test_the_micro_batch_at_which_the_snake_turns_is_never_fetched() -> None:
    plan = make_plan(4, placement=Placement(gradients_device=0.0))
    ops = make_listings(plan, [("vertical", 8)])[0].ops
    order = [str(op) for op in ops if op.lane is Lane.COMPUTE]
    assert order[6:10] == ["F0.6", "F0.7", "F1.7", "F1.6"]
    fetched = Counter(str(op) for op in ops if op.kind is Kind.GET)
    # Most inputs of block 1 are fetched for the forward, for the backward, and as the gradient that took their place.
    assert fetched["G1.3"] == 3
    assert fetched["G1.7"] == 2  # the forward of block 1 starts with what block 0 ended with
    assert fetched["G1.0"] == 2  # the backward of block 0 starts with what block 1 ended with


def test_tensors_that_stay_on_the_device_are_not_sent_home_without_need() -> None:
    plan = make_plan(4, placement=Placement(gradients_device=1.0))
    parked = Counter(op.block for op in make_listings(plan, [("vertical", 5)])[0].ops if op.kind is Kind.PARK)
    assert parked == {1: 5, 2: 5}  # the input of the last block is used on the spot, gradients stay


# Bytes


def per_param(plan: Plan, num_bytes: int) -> float:
    return num_bytes / total_params(plan.blocks)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("precision", "total"), [("bfloat16", 26), ("float32", 28)])
def test_a_vertical_step_moves_26_bytes_per_parameter_for_any_batch_and_alpha(
    num_micro_batches: int, alpha: float, precision: str, total: int
) -> None:
    plan = make_plan(5, alpha=alpha, precision=precision)
    verify(plan, make_listings(plan, [("vertical", num_micro_batches)] * 3))
    read, write = step_ssd_bytes(plan, num_micro_batches)
    # fp32 keeps no residual: the last block reads 4 + 12 where the others read 4 + 4 + 8, the same.
    assert per_param(plan, read + write) == total
    assert per_param(plan, write) == 12


def test_clipping_saves_the_last_block_and_the_shared_parameters_one_read_of_their_weights() -> None:
    plain, clipped = (make_plan(4, shared=True, clipping=clipping) for clipping in (False, True))
    fetched_once = plain.blocks[3].num_params + plain.blocks[4].num_params
    assert sum(step_ssd_bytes(plain, 3)) - sum(step_ssd_bytes(clipped, 3)) == 2 * fetched_once


def test_a_tentative_step_moves_as_much_as_one_without_clipping() -> None:
    plan = replace(make_plan(alpha=0.25, clipping=True, tentative=True), tentative=True)
    unclipped = make_plan(alpha=0.25)
    assert step_ssd_bytes(plan, 3) == step_ssd_bytes(unclipped, 3)
    assert step_device_bytes(plan, 3) == step_device_bytes(unclipped, 3)


def test_a_revoked_step_is_done_again_in_the_next_forward() -> None:
    plan = make_plan(alpha=0.25, clipping=True, tentative=True)
    listings = make_listings(plan, [("confirmed", 2), ("revoked", 2), ("vertical", 2), ("flush", 0)])
    verify(plan, listings)
    tried = {(op.block, op.index) for op in listings[2].ops if op.kind is Kind.UPDATE and op.tentative}
    again = {
        (op.block, op.index)
        for listing in listings[3:5]
        for op in listing.ops
        if op.kind is Kind.UPDATE and not op.tentative
    }
    assert tried and tried <= again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confirmed": False}, "has uploads|uploads weight|runs 1 times|needs"),
        ({"ops": Kind.WRITE}, "never written"),
        ({"ops": Kind.SQUARES}, "needs"),
    ],
)
def test_a_tentative_step_that_goes_wrong_is_rejected(change: dict[str, Any], message: str) -> None:
    plan = make_plan(alpha=0.25, clipping=True, tentative=True)
    first, *rest = make_listings(plan, [("confirmed", 2), ("confirmed", 2), ("flush", 0)])
    if "confirmed" in change:  # what follows was written for a step that counts
        broken = replace(first, confirmed=False)
    else:
        left_out = next(
            op for op in first.ops if op.kind is change["ops"] and (op.tentative or op.kind is not Kind.WRITE)
        )
        broken = replace(first, ops=tuple(op for op in first.ops if op is not left_out))
    with pytest.raises(VerifyError, match=message):
        verify(plan, [broken, *rest])


def test_a_spilled_gradient_adds_8_bytes_per_parameter() -> None:
    kept, spilled = (make_plan(4, clipping=True, placement=Placement(gradients_ram=share)) for share in (1.0, 0.0))
    assert per_param(kept, sum(step_ssd_bytes(spilled, 3)) - sum(step_ssd_bytes(kept, 3))) == 8


def test_a_horizontal_step_reads_weights_for_every_micro_batch() -> None:
    plan = make_plan(4, alpha=0.0, chunks=(1,))
    verify(plan, make_listings(plan, [("horizontal", 5)] * 3))
    read, write = step_ssd_bytes(plan, 5, "horizontal")
    # Three blocks read 2 x 5 times, the last one 5 times and once more for its update.
    assert read == GRANULE * (3 * 2 * 10 + 2 * 6 + 4 * 10)
    assert write == GRANULE * 4 * 12


def test_ram_takes_its_share_off_the_ssd() -> None:
    plan = make_plan(4, placement=Placement(weights_ram=1.0, optimizer_ram=0.0))
    verify(plan, make_listings(plan, [("vertical", 3)] * 3))
    read, write = step_ssd_bytes(plan, 3)
    assert (per_param(plan, read), per_param(plan, write)) == (10, 10)


def test_gradients_come_down_once_and_weights_go_up_twice() -> None:
    plan = make_plan(4, alpha=0.0, chunks=(1,))
    up, down = step_device_bytes(plan, 7)
    assert up == GRANULE * 2 * (3 * 2 + 1)
    assert down == GRANULE * (4 * 4 + 3 * 2)  # with the weights of the blocks that are fetched twice


def test_without_enough_slots_nothing_runs_out() -> None:
    plan = make_plan(8, alpha=0.5, slots=Slots(1, 1, 1, 1, 1), placement=Placement(0, 0, 0, 0, 0, 0))
    verify(plan, make_listings(plan, [("vertical", 9), ("evaluation", 4), ("vertical", 1), ("flush", 0)]))


# Several ranks


def test_weights_come_from_other_ranks_twice_and_gradients_go_to_them_once() -> None:
    plan = make_plan(4, alpha=0.5, chunks=(1,), num_ranks=4)
    verify(plan, make_listings(plan, [("vertical", 5)] * 3))
    others = 3 * GRANULE  # of a block, for each of its own
    assert step_net_bytes(plan, 5) == (others * 2 * (3 * 2 + 1), others * 4 * 4)
    assert step_net_bytes(make_plan(4), 5) == (0, 0)


@given(plans(), kinds("vertical"), st.data())
def test_ranks_meet_in_the_same_order_whatever_each_holds_where(
    plan: Plan, listed: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Else they would wait for each other. Homes, late updates and numbers of micro-batches are a rank's own affair."""
    blocks = [replace(block, num_ranks=2) for block in plan.blocks]
    placement = replace(plan.placement, weights_ram=data.draw(fractions), optimizer_ram=data.draw(fractions))
    homes = chunk_homes(blocks, placement, alpha=data.draw(fractions), clipping=plan.clipping)
    slots = replace(plan.slots, staging=data.draw(st.integers(1, 4)), updates=data.draw(st.integers(1, 4)))
    theirs = replace(plan, blocks=tuple(blocks), homes=homes, placement=placement, slots=slots)
    more = [(kind, count and data.draw(st.integers(1, 4))) for kind, count in listed]
    meetings = [
        [str(op) for listing in make_listings(each, order) for op in listing.ops if op.lane.link == "net"]
        for each, order in ((replace(plan, blocks=tuple(blocks)), listed), (theirs, more))
    ]
    assert meetings[0] == meetings[1]


# Broken schedules


def mutants(plan: Plan, listing: Listing, index: int) -> Iterator[tuple[str, tuple[Op, ...]]]:
    """Every way that we know to break one op of a list."""
    before, op, after = listing.ops[:index], listing.ops[index], listing.ops[index + 1 :]
    yield "drop", (*before, *after)
    yield "do twice", (*before, op, op, *after)
    for field in ("reads", "writes"):
        resources: tuple[Resource, ...] = getattr(op, field)
        for place, resource in enumerate(resources):
            rest = (*resources[:place], *resources[place + 1 :])
            yield f"forget that it {field} {resource}", (*before, replace(op, **{field: rest}), *after)
            for other in resources_of(plan, listing.num_kept):
                if other[0] == resource[0] and other != resource:
                    moved = (*resources[:place], other, *resources[place + 1 :])
                    yield f"{field} {other} for {resource}", (*before, replace(op, **{field: moved}), *after)
    if after and is_ordered(op, after[0]):
        yield f"swap with {after[0]}", (*before, after[0], op, *after[1:])
    if op.nbytes:
        yield "one byte more", (*before, replace(op, nbytes=op.nbytes + 1), *after)
    for flag in ("first", "last", "first_shared", "whole"):
        yield f"flip {flag}", (*before, replace(op, **{flag: not getattr(op, flag)}), *after)
    if op.kind not in (Kind.LOSS, Kind.VERDICT):  # theirs are names only
        yield "of the next block", (*before, replace(op, block=(op.block + 1) % len(plan.blocks)), *after)
        yield "of the next index", (*before, replace(op, index=op.index + 1), *after)


def is_ordered(first: Op, second: Op) -> bool:
    """Whether two ops must not change places; two uploads into one slot, or two terms of a sum, may."""
    return bool(set(first.writes) & set(second.reads) or set(first.reads) & set(second.writes))


BROKEN = {
    "plain": (make_plan(4), "vertical", 3),
    "mixed homes": (
        make_plan(
            4,
            shared=True,
            alpha=0.5,
            precision="float32",
            placement=Placement(0.3, 0.5, 0.2, 0.4, 0.2, 0.5),
            slots=Slots(2, 1, 2, 2, 2),
        ),
        "vertical",
        7,
    ),
    "clipping": (
        make_plan(
            4, chunks=(1,), shared=True, clipping=True, placement=Placement(0.3, 0.3, 0.1, 0.4, 0, 0.5), slots=Slots(2)
        ),
        "vertical",
        4,
    ),
    "horizontal": (make_plan(3, alpha=0.5, placement=Placement(0.2, 0.2, 0.2, 0.4)), "horizontal", 2),
    "kept": (
        make_plan(5, alpha=0.5, placement=Placement(0.3, 0.2, weights_device=1, graphs_device=0.4)),
        "vertical",
        3,
    ),
    "kept, state in RAM": (
        make_plan(4, chunks=(1, 1), alpha=0.5, placement=Placement(optimizer_ram=1, weights_device=1)),
        "vertical",
        2,
    ),
    "kept and clipped": (
        make_plan(4, clipping=True, placement=Placement(0.3, weights_device=1), slots=Slots(2), num_ranks=2),
        "vertical",
        3,
    ),
    "kept and tentative": (
        make_plan(4, alpha=0.2, clipping=True, tentative=True, placement=Placement(0.3, weights_device=1)),
        "confirmed",
        2,
    ),
    "ranks": (
        make_plan(4, shared=True, alpha=0.5, placement=Placement(0.3, 0.5, 0.2, 0.4, 0.2, 0.5), num_ranks=2),
        "vertical",
        3,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_rejected(name: str) -> None:
    plan, kind, num_micro_batches = BROKEN[name]
    order = [(kind, num_micro_batches), (kind, num_micro_batches), ("evaluation", 2)]
    listings = make_listings(plan, [*order, *order])
    verify(plan, listings)
    dice = random.Random(name)
    seen: Counter[Kind] = Counter()
    for _ in range(110):
        target = dice.choice([1, 2])
        listing = listings[target]
        rarest = min(seen[op.kind] for op in listing.ops)
        index = dice.choice([index for index, op in enumerate(listing.ops) if seen[op.kind] == rarest])
        seen[listing.ops[index].kind] += 1
        change, ops = dice.choice(list(mutants(plan, listing, index)))
        broken = [*listings[:target], replace(listing, ops=ops), *listings[target + 1 :]]
        try:
            verify(plan, broken)
        except VerifyError:
            continue
        pytest.fail(f"{listing.ops[index]} (op {index} of listing {target}) passes with: {change}")


def test_an_update_before_the_norm_of_its_step_is_rejected() -> None:
    plan = make_plan(clipping=True)
    listings = make_listings(plan, [("vertical", 2)] * 2)
    ops = list(listings[0].ops)
    norm = next(op for op in ops if op.kind is Kind.VERDICT)
    first_update = next(index for index, op in enumerate(ops) if op.kind is Kind.UPDATE)
    ops.remove(norm)
    ops.insert(first_update, norm)
    with pytest.raises(VerifyError, match=r"A0\.0 finds nothing in verdict"):
        verify(plan, [replace(listings[0], ops=tuple(ops)), listings[1]])


def test_a_stale_weight_is_named_in_the_message() -> None:
    plan = make_plan(alpha=0.0)
    listings = make_listings(plan, [("vertical", 2)] * 2)
    ops = tuple(op for op in listings[0].ops if str(op) != "A1.0")
    with pytest.raises(VerifyError, match=r"W1\.0|U1\.0|A1\.0"):
        verify(plan, [replace(listings[0], ops=ops), listings[1]])


def writes_come_first(ops: list[Op]) -> list[Op]:
    """Each W of block 1 before the update whose weight it should write."""
    for update in [op for op in ops if op.kind is Kind.UPDATE and op.block == 1]:
        write = next(op for op in ops if op.kind is Kind.WRITE and (op.block, op.index) == (1, update.index))
        ops.remove(write)
        ops.insert(ops.index(update), write)
    return ops


def no_writes(ops: list[Op]) -> list[Op]:
    return [op for op in ops if op.kind is not Kind.WRITE or op.block not in (1, 2)]


@pytest.mark.parametrize("change", [writes_come_first, no_writes])
@pytest.mark.parametrize("target", [0, 2])
def test_the_home_of_a_weight_that_stays_on_the_device_is_renewed_too(
    change: Callable[[list[Op]], list[Op]], target: int
) -> None:
    plan = make_plan(4, chunks=(1, 1), alpha=0.5, placement=Placement(optimizer_ram=1, weights_device=1))
    listings = make_listings(plan, [("vertical", 2), ("evaluation", 2), ("vertical", 2), ("flush", 0)])
    verify(plan, listings)
    listings[target] = replace(listings[target], ops=tuple(change(list(listings[target].ops))))
    with pytest.raises(VerifyError):
        verify(plan, listings)


def test_weights_that_stay_on_the_device_are_renewed_by_the_last_listing_too() -> None:
    """With one slot a flush has late updates to do of layers that stay: no step is there yet that would miss one."""
    placement = Placement(weights_device=0.5)
    plan = make_plan(8, chunks=(1,), alpha=1.0, slots=Slots(1), placement=placement)
    for listed in ([("vertical", 2), ("flush", 0)], [("vertical", 2), ("flush", 0), ("vertical", 2), ("flush", 0)]):
        *before, last = make_listings(plan, listed)
        verify(plan, [*before, last])
        renewals = [index for index, op in enumerate(last.ops) if op.kind is Kind.UPLOAD]
        assert len(renewals) > 2
        for index in renewals:
            without = replace(last, ops=last.ops[:index] + last.ops[index + 1 :])
            with pytest.raises(VerifyError, match=r"has not weight"):
                verify(plan, [*before, without])


def test_what_a_revoked_update_left_in_a_slot_is_nobodys_weight() -> None:
    placement = Placement(0.7, weights_device=1)
    plan = make_plan(4, chunks=(1, 1), alpha=0.2, clipping=True, tentative=True, placement=placement)
    listings = make_listings(plan, [("revoked", 2), ("revoked", 2), ("vertical", 2), ("flush", 0)])
    tried = 0
    for target, listing in enumerate(listings):
        for index, op in enumerate(listing.ops):
            if op.kind not in (Kind.UPLOAD, Kind.WRITE) or op.tentative:
                continue
            for slot in (read for read in op.reads if read[0] == "update.weight"):
                for other in (("update.weight", number) for number in range(plan.slots.updates)):
                    if other == slot:
                        continue
                    reads = tuple(other if read == slot else read for read in op.reads)
                    ops = (*listing.ops[:index], replace(op, reads=reads), *listing.ops[index + 1 :])
                    with pytest.raises(VerifyError):
                        verify(plan, [*listings[:target], replace(listing, ops=ops), *listings[target + 1 :]])
                    tried += 1
    assert tried > 20


# The printed schedule


def test_the_sample_in_the_docs_is_what_the_command_prints() -> None:
    page = (Path(__file__).parents[1] / "docs" / "schedule.md").read_text()
    assert f"```text\n{schedule_text(blocks=4, micro_batches=3, alpha=0.25)}```" in page


@pytest.mark.parametrize("kind", ["vertical", "horizontal"])
@pytest.mark.parametrize("clipping", [False, True])
def test_every_op_of_a_step_is_printed_once_and_explained(kind: str, clipping: bool) -> None:
    text = schedule_text(blocks=5, micro_batches=4, alpha=0.5, clipping=clipping, kind=kind, chunks=3, ranks=2)
    plan = example_plan(5, 3, 0.5, clipping, 2)
    ops = make_listings(plan, [(kind, 4)] * 2)[1].ops
    body, legend = text.split("LEGEND")
    printed = Counter(re.findall(r"\b[A-Z]\d+\.\d+", body))
    # In the steady state a step does as much ahead for the next as was done ahead for it.
    assert printed == Counter(map(str, ops))
    for op in ops:
        assert f"\n    {op.kind.value}  " in legend


def test_a_horizontal_step_prints_one_phase_per_micro_batch() -> None:
    text = schedule_text(blocks=3, micro_batches=2, kind="horizontal", steps=2)
    assert text.count("BACKWARD OF MICRO-BATCH 1") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 1}, "blocks is 1"),
        ({"alpha": 2.0}, "alpha is 2.0"),
        ({"kind": "diagonal"}, "give vertical or horizontal"),
        ({"micro_batches": 0}, "micro_batches is 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_the_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule_text(**options)
