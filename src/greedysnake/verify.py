"""Proves that a schedule trains correctly, without running it and without trusting the maker's bookkeeping.

Three proofs: ops that touch the same thing are ordered across lanes (`check_order`); run in that order, every
buffer holds what its reader expects (contents.py); and the bytes moved equal closed formulas. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from greedysnake.contents import Contents
from greedysnake.errors import VerifyError
from greedysnake.holdings import Listing, chunks_of, show
from greedysnake.ops import Kind, Lane, Op, Plan, Resource
from greedysnake.placement import Home, is_fetched_once

__all__ = [
    "Listing",
    "check_order",
    "dependencies",
    "num_passes",
    "step_device_bytes",
    "step_net_bytes",
    "step_ssd_bytes",
    "verify",
]


def verify(plan: Plan, listings: Sequence[Listing], after: Sequence[Sequence[int]] | None = None) -> None:
    """Raises VerifyError unless the listings, submitted one after the other from the start, train correctly.

    `after` gives for each op of all listings together the indices of the ops it waits for, besides those before
    it on its own lane; `dependencies` unless told.
    """
    ops = [op for listing in listings for op in listing.ops]
    check_order(ops, dependencies(ops) if after is None else after)
    contents = Contents(plan)
    for listing in listings:
        contents.run(listing)
    _check_traffic(plan, listings)


def dependencies(ops: Sequence[Op]) -> list[tuple[int, ...]]:
    """For each op the earlier ops on other lanes that it waits for: it reads what they write, or writes what they
    read or write. The last one of each lane is enough, because lanes finish in order; on its own lane only where ops of
    that overlap."""
    writer: dict[Resource, int] = {}
    readers: dict[Resource, list[int]] = {}
    after = []
    for index, op in enumerate(ops):
        conflicts = [writer[resource] for resource in (*op.reads, *op.writes) if resource in writer]
        for resource in op.writes:
            conflicts += readers.pop(resource, ())
            writer[resource] = index
        for resource in op.reads:
            if resource not in op.writes:
                readers.setdefault(resource, []).append(index)
        last = {ops[other].lane: other for other in sorted(conflicts)}
        if not op.lane.overlaps:
            last.pop(op.lane, None)
        after.append(tuple(sorted(last.values())))
    return after


def check_order(ops: Sequence[Op], after: Sequence[Sequence[int]]) -> None:
    """Raises VerifyError unless the lanes cannot deadlock and every conflicting pair of ops is ordered.

    A vector clock holds, for each lane, the last op that is surely over when this one starts. Dependencies that
    all point backwards cannot deadlock: the first op that is not over can always run.
    """
    clocks: dict[Lane, dict[Lane, int]] = {lane: {} for lane in Lane}
    finished: list[dict[Lane, int]] = []
    touched: dict[tuple[Resource, bool], dict[Lane, int]] = {}
    for index, op in enumerate(ops):
        clock = dict(clocks[op.lane])
        for other in after[index]:
            if not 0 <= other < index:
                raise VerifyError(f"{op} (op {index}) waits for op {other}, which is not before it: lanes can deadlock")
            for lane, time in finished[other].items():
                clock[lane] = max(clock.get(lane, -1), time)
        for resource, writes in [(r, False) for r in op.reads] + [(r, True) for r in op.writes]:
            for others_write in (True, False) if writes else (True,):
                for lane, time in touched.get((resource, others_write), {}).items():
                    if time > clock.get(lane, -1):
                        does = "writes" if others_write else "reads"
                        raise VerifyError(f"{op} does not wait for {ops[time]}, which {does} {show(resource)} before")
        for resource, writes in [(r, False) for r in op.reads] + [(r, True) for r in op.writes]:
            touched.setdefault((resource, writes), {})[op.lane] = index
        over = {**clock, op.lane: index}
        clocks[op.lane] = clock if op.lane.overlaps else over
        finished.append(over)


# Bytes, by formula


def step_ssd_bytes(plan: Plan, num_micro_batches: int, kind: str = "vertical") -> tuple[int, int]:
    """Bytes of parameters, state and gradients that a step in the steady state reads from SSD and writes to it.

    A weight is read once per pass over its block; the read for a late update serves the forward too, and in an
    early update the weight comes down from the device. Only an early update of a block that is fetched once
    reads its weight a second time. All on SSD that is 26 B per trainable parameter (bf16; 28 in fp32) for any
    number of micro-batches and any alpha; with clipping 24 for the last block and the shared parameters.
    Horizontally the 2 weight reads of a block become 2M. A spilled gradient adds 4 B each way, that of a tentative
    update only where it is written. A tentative update is an early one otherwise. A weight that stays on the device
    is never read.
    """
    read = write = 0
    for block, index in chunks_of(plan):
        chunk, home = plan.blocks[block].chunks[index], plan.homes[block][index]
        weight = plan.precision.weight_bytes if home.weight is Home.SSD else 0
        num_reads = num_passes(plan, block, num_micro_batches, kind)
        if chunk.trainable:
            state = plan.precision.state_bytes(chunk.num_params) if home.state is Home.SSD else 0
            spilled = plan.precision.gradient_bytes if home.late and home.gradient is Home.SSD else 0
            waits = home.late and not (plan.tentative and home.tentative)
            num_reads += is_fetched_once(plan.blocks, block) and not waits
            read += state + chunk.num_params * spilled * waits
            write += state + chunk.num_params * (weight + spilled)
        read += chunk.num_params * weight * num_reads
    return read, write


def step_device_bytes(plan: Plan, num_micro_batches: int, kind: str = "vertical") -> tuple[int, int]:
    """Bytes of weights and gradients that a step uploads and downloads; tensors between blocks not counted."""
    up = down = 0
    for block, index in chunks_of(plan):
        chunk, home = plan.blocks[block].chunks[index], plan.homes[block][index]
        num_uploads = num_passes(plan, block, num_micro_batches, kind)
        if plan.keeps_weights(block):
            num_uploads = int(chunk.trainable)
        up += chunk.num_params * plan.precision.weight_bytes * num_uploads
        if chunk.trainable:
            num_downloads = 1 if kind == "vertical" or block == plan.shared else num_micro_batches
            down += chunk.num_params * plan.precision.gradient_bytes * num_downloads
            waits = home.late and not (plan.tentative and home.tentative)
            from_device = plan.keeps_weights(block) or not (waits or is_fetched_once(plan.blocks, block))
            if home.weight is Home.SSD and from_device:
                down += chunk.num_params * plan.precision.weight_bytes
    return up, down


def step_net_bytes(plan: Plan, num_micro_batches: int, kind: str = "vertical") -> tuple[int, int]:
    """Bytes of weights that a step brings to this rank from the others, and of gradients that it gives them: per
    parameter (W - 1) / W of 2 for each pass, and of 4."""
    weights = gradients = 0
    for block, shape in enumerate(plan.blocks):
        missing = shape.num_params - shape.num_own
        num_gathers = num_passes(plan, block, num_micro_batches, kind)
        if plan.keeps_weights(block):
            num_gathers = int(shape.num_trainable > 0)
        weights += missing * plan.precision.weight_bytes * num_gathers
        num_sums = 1 if kind == "vertical" or block == plan.shared else num_micro_batches
        others = shape.num_trainable - shape.num_trainable // plan.num_ranks
        gradients += others * plan.precision.gradient_bytes * num_sums
    return weights, gradients


def num_passes(plan: Plan, block: int, num_micro_batches: int, kind: str) -> int:
    """How often a listing brings a block's weights to the device: those that stay, not at all."""
    if kind in ("flush", "ahead") or plan.keeps_weights(block):
        return 0
    if block == plan.shared:
        return 1
    runs_twice = kind != "evaluation" and plan.lowest <= block < plan.num_compute - 1
    return (2 if runs_twice else 1) * (num_micro_batches if kind == "horizontal" else 1)


def _check_traffic(plan: Plan, listings: Sequence[Listing]) -> None:
    """What a listing did ahead belongs to the next one that runs blocks. Uploads are counted in every listing, but for
    blocks that stay on the device, of which no chunk is brought that is there (contents.py);
    bytes in those that train right after another that trained: the steady state."""
    ahead: list[Op] = []
    previous = Listing("start", 0, ())
    for listing in listings:
        own = [op for op in listing.ops if not op.ahead]
        if listing.kind == "ahead":
            ahead += listing.ops
            continue
        before, previous = previous, listing
        if listing.kind == "flush":
            if any(op.kind is Kind.UPLOAD and not plan.keeps_weights(op.block) for op in listing.ops):
                raise VerifyError("flush uploads weights, which nothing in it uses")
            ahead += [op for op in listing.ops if op.ahead]
            continue
        ops, ahead = ahead + own, [op for op in listing.ops if op.ahead]
        uploads = Counter((op.block, op.index) for op in ops if op.kind is Kind.UPLOAD)
        for block, index in chunks_of(plan):
            if plan.keeps_weights(block):
                continue
            wanted = num_passes(plan, block, listing.num_micro_batches, listing.kind)
            if uploads[block, index] != wanted:
                raise VerifyError(f"U{block}.{index} runs {uploads[block, index]} times, once per pass is {wanted}")
        if not (before.trains and listing.trains and before.confirmed):
            continue
        tentative = [any(op.tentative for op in each.ops) for each in (before, listing)]
        if tentative[0] != tentative[1]:
            continue
        moved: Counter[Lane] = Counter()
        for op in ops:
            moved[op.lane] += op.nbytes
        found = (
            *(moved[Lane.READ] + moved[Lane.LOAD], moved[Lane.WRITE]),
            *(moved[Lane.UPLOAD] + moved[Lane.RENEW], moved[Lane.DOWNLOAD] + moved[Lane.TAKE]),
            *(moved[Lane.GATHER], moved[Lane.REDUCE]),
        )
        as_run = replace(plan, tentative=tentative[0])
        formula = (
            *step_ssd_bytes(as_run, listing.num_micro_batches, listing.kind),
            *step_device_bytes(as_run, listing.num_micro_batches, listing.kind),
            *step_net_bytes(as_run, listing.num_micro_batches, listing.kind),
        )
        if found != formula:
            links = "ssd read, ssd write, h2d, d2h, weights and gradients of other ranks"
            raise VerifyError(f"a step moves {found} bytes ({links}), the formula says {formula}")
