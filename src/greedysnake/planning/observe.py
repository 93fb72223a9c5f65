"""What the trace of some steps says about the machine they ran on. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from greedysnake.ops import Kind, Plan
from greedysnake.planning.costs import BlockTimes, Rates, state_bytes
from greedysnake.trace import Record, union_s

BYTES_PER_UPDATE = 30
"""Bytes of RAM that the update of a parameter reads and writes: what adding up is as fast as, where none was seen."""


@dataclass(frozen=True)
class Observed:
    """A machine as a trace shows it."""

    rates: Rates
    """A link that moved nothing is infinitely fast. The drives are as fast as they were while they were busy, which is
    less than they can do if nobody waited for them."""
    times: tuple[BlockTimes, ...]
    """Of each block that runs."""


def observe(records: Sequence[Record], plan: Plan) -> Observed:
    """Of steps of `plan` after the first, which has the start of everything in it."""

    def rate(links: tuple[str, ...], amount: Callable[[Record], float], kinds: frozenset[Kind] | None = None) -> float:
        chosen = [r for r in records if r.lane.link in links and (kinds is None or r.op.kind in kinds)]
        busy_s = union_s((r.start_s, r.end_s) for r in chosen)
        return sum(map(amount, chosen)) / busy_s if busy_s > 0 else math.inf

    def num_params(record: Record) -> int:
        return plan.blocks[record.op.block].chunks[record.op.index].num_params

    updates = rate(("cpu",), num_params, frozenset({Kind.UPDATE}))
    sums = rate(("cpu",), lambda r: num_params(r) * plan.precision.gradient_bytes, _SUMS)
    rates = Rates(
        ssd_bytes_per_s=rate(("ssd_read", "ssd_write"), _nbytes),
        h2d_bytes_per_s=rate(("h2d",), _nbytes),
        d2h_bytes_per_s=rate(("d2h",), _nbytes),
        net_bytes_per_s=rate(("net",), _nbytes),
        cpu_params_per_s=updates,
        cpu_bytes_per_s=updates * BYTES_PER_UPDATE if math.isinf(sums) else sums,
        state_share=_state_share(records, plan),
    )
    return Observed(rates, tuple(_times(records, plan, block) for block in range(plan.num_compute)))


def _state_share(records: Sequence[Record], plan: Plan) -> float:
    """Of the bytes of optimizer state, how many crossed the drives."""
    whole = {number: state_bytes(record.op, plan) for number, record in enumerate(records)}
    spared = sum(record.op.nbytes - record.nbytes for number, record in enumerate(records) if whole[number])
    total = sum(whole.values())
    return 1.0 - spared / total if total else 1.0


def _times(records: Sequence[Record], plan: Plan, block: int) -> BlockTimes:
    def typical_s(kind: Kind) -> float:
        taken = [r.end_s - r.start_s for r in records if r.op.kind is kind and r.op.block == block]
        return median(taken) if taken else 0.0

    forward_s, backward_s = typical_s(Kind.FORWARD), typical_s(Kind.BACKWARD)
    if plan.keeps_graph(block):
        return BlockTimes(forward_s, backward_s + forward_s, backward_s)  # what it would be had it not been kept
    if block == plan.num_compute - 1:
        forward_s = typical_s(Kind.EVALUATE) or backward_s / 3  # a backward is two products for each of the forward
    return BlockTimes(forward_s, backward_s)


def _nbytes(record: Record) -> float:
    return record.nbytes


_SUMS = frozenset({Kind.SQUARES, Kind.ACCUMULATE})
