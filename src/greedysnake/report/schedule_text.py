"""Prints one step of the schedule for a person to follow: by phase and block, one line per link. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from greedysnake.errors import ConfigError
from greedysnake.ops import Cursor, Kind, Op, Plan
from greedysnake.placement import Placement, chunk_homes
from greedysnake.schedule import horizontal, vertical
from greedysnake.shapes import GRANULE, PRECISIONS, Share, block_shape
from greedysnake.verify import Listing, step_device_bytes, step_net_bytes, step_ssd_bytes, verify

LINKS_IN = ("ssd_read", "cpu", "ssd_write", "h2d", "net")
"""What a block needs before it runs, in the order in which it gets there."""
LINKS_OUT = ("compute", "net", "d2h", "ssd_read", "cpu", "ssd_write")
"""Its run, and what comes of it."""

SNAKE = "The order of micro-batches reverses from block to block: the one that ends a block starts the next."

LEGEND = {
    Kind.FORWARD: "forward of a block for one micro-batch",
    Kind.BACKWARD: "recompute and backward of a block for one micro-batch",
    Kind.READ_WEIGHTS: "read a chunk's weights from SSD",
    Kind.UPLOAD: "upload a chunk's weights to the device",
    Kind.GATHER: "in: the other ranks' parts of a block's weights come to the device",
    Kind.REDUCE: "out: all ranks' gradients of a block are added up, each gets its own part",
    Kind.DOWNLOAD: "download a chunk's gradient (for an early update with its weights, but for the last block)",
    Kind.LOAD_STATE: "read a chunk's optimizer state from SSD (late, or in the last block: with its weights)",
    Kind.UPDATE: "update a chunk (Adam)",
    Kind.WRITE: "write a chunk's new weights and state to SSD",
    Kind.PARK: "park a block's input, or its gradient, in RAM",
    Kind.GET: "get it back to the device",
    Kind.ACCUMULATE: "add one micro-batch's gradient to the sum in RAM",
    Kind.SQUARES: "add a chunk's gradient to the norm",
    Kind.LOSS: "bring the loss to the host",
    Kind.VERDICT: "verdict: does the step count (is it finite), and with clipping its norm",
}
OF_MICRO_BATCHES = {Kind.FORWARD, Kind.BACKWARD, Kind.PARK, Kind.GET}


class Section(NamedTuple):
    """The run of a block, under which ops are printed."""

    step: int
    phase: str
    block: int


class Served(NamedTuple):
    """An op, and whether it comes before the run that it serves."""

    op: Op
    comes_in: bool


def schedule_text(
    *,
    blocks: int = 4,
    micro_batches: int = 3,
    alpha: float = 0.25,
    clipping: bool = False,
    kind: str = "vertical",
    chunks: int = 2,
    steps: int = 1,
    ranks: int = 1,
) -> str:
    """One or more steps in the steady state, of a model with everything on SSD and activations in RAM."""
    plan = example_plan(blocks, chunks, alpha, clipping, ranks)
    if kind not in ("vertical", "horizontal"):
        raise ConfigError(f"kind is {kind!r}: give vertical or horizontal")
    for name, value in (("micro_batches", micro_batches), ("steps", steps)):
        if value < 1:
            raise ConfigError(f"{name} is {value}: give at least 1")
    cursor = Cursor(plan)
    make = vertical if kind == "vertical" else horizontal
    listings = [Listing(kind, micro_batches, tuple(make(plan, cursor, micro_batches))) for _ in range(steps + 1)]
    verify(plan, listings)
    shown = [_belonging(before, listing) for before, listing in pairwise(listings)]
    sections: list[tuple[Section, list[Served]]] = []
    for step, ops in enumerate(shown):
        sections += _sections(plan, ops, step, kind)
    lines = [*_head(plan, micro_batches, alpha, kind), *_body(plan, sections, steps)]
    lines += ["", *_bytes(plan, micro_batches, kind), "", *_legend([op for ops in shown for op in ops])]
    return "\n".join(lines) + "\n"


def example_plan(num_blocks: int, num_chunks: int, alpha: float, clipping: bool, num_ranks: int = 1) -> Plan:
    """Embedding, layers and head, of which this rank has as many equal chunks each."""
    for name, value, least in (("blocks", num_blocks, 2), ("chunks", num_chunks, 1), ("ranks", num_ranks, 1)):
        if value < least:
            raise ConfigError(f"{name} is {value}: give at least {least}")
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha is {alpha}: give a fraction between 0 and 1")
    names = ["embedding", *(f"layer {index}" for index in range(1, num_blocks - 1)), "head"]
    pools = ["ends", *["layers"] * (num_blocks - 2), "ends"]
    shapes = [
        block_shape(name, num_ranks * num_chunks * GRANULE, 0, GRANULE, pool, Share(0, num_ranks))
        for name, pool in zip(names, pools, strict=True)
    ]
    homes = chunk_homes(shapes, Placement(), alpha=alpha, clipping=clipping)
    return Plan(tuple(shapes), homes, PRECISIONS["bfloat16"], clipping=clipping)


def _belonging(before: Listing, listing: Listing) -> list[Op]:
    """The ops that do a step's work: what the step before did ahead for it, and its own but what is for the next."""
    return [op for op in before.ops if op.ahead] + [op for op in listing.ops if not op.ahead]


def _sections(plan: Plan, ops: Sequence[Op], step: int, kind: str) -> list[tuple[Section, list[Served]]]:
    """Gives every op to the run of the block that it serves: fetches to the one that follows, results to the one
    before."""
    compute = [op for op in ops if op.kind in (Kind.FORWARD, Kind.BACKWARD)]
    turns = {id(op): _section(plan, op, step, kind) for op in compute}
    order = list(dict.fromkeys(turns.values()))
    found: dict[Section, list[Served]] = {section: [] for section in order}
    firsts = {section.block: section for section in reversed(order)}
    position = 0
    here = order[0]
    for op in ops:
        if id(op) in turns:
            position += 1
            here = turns[id(op)]
            found[here].append(Served(op, comes_in=False))
        elif op.ahead:
            found[firsts[op.block]].append(Served(op, comes_in=True))
        elif position == 0 or (_serves_next(op, here) and position < len(compute)):
            found[turns[id(compute[position])]].append(Served(op, comes_in=True))
        else:
            found[here].append(Served(op, comes_in=False))
    return list(found.items())


def _section(plan: Plan, op: Op, step: int, kind: str) -> Section:
    forward = op.kind is Kind.FORWARD
    phase = "forward" if forward else "backward"
    return Section(step, phase if kind == "vertical" else f"{phase} of micro-batch {op.index}", op.block)


def _serves_next(op: Op, here: Section) -> bool:
    if op.kind in (Kind.READ_WEIGHTS, Kind.UPLOAD, Kind.GATHER, Kind.GET):
        return True
    return op.kind in (Kind.LOAD_STATE, Kind.UPDATE, Kind.WRITE) and op.block != here.block


def _head(plan: Plan, micro_batches: int, alpha: float, kind: str) -> list[str]:
    late = [home.late for homes in plan.homes for home in homes]
    when = f"{sum(late)} of {len(late)} chunks are updated late: in the next step's forward"
    if plan.clipping:
        when = "all updates are late: with clipping they wait for the norm"
    chunks = len(plan.blocks[0].chunks)
    return [
        f"A {kind} step{_of_ranks(plan)}: {len(plan.blocks)} blocks of {_count(chunks, 'chunk')}, "
        f"{_count(micro_batches, 'micro-batch', 'es')}, alpha {alpha:g}{', clipping' if plan.clipping else ''}.",
        f"Weights and optimizer state live on SSD, activations in RAM; {when}.",
        "Every line is one link. Links work at the same time, each in the order shown, as soon as what an op needs is",
        "there: fetches run ahead of compute, updates behind it. * was done ahead, before this step began.",
        *([SNAKE] if kind == "vertical" else []),
    ]


def _of_ranks(plan: Plan) -> str:
    return "" if plan.num_ranks == 1 else f" of one of {plan.num_ranks} ranks"


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number != 1 else ''}"


def _body(plan: Plan, sections: list[tuple[Section, list[Served]]], steps: int) -> list[str]:
    lines = []
    for (step, phase), group in groupby(sections, key=lambda item: (item[0].step, item[0].phase)):
        title = phase.upper() if steps == 1 else f"STEP {step + 1}: {phase.upper()}"
        lines += ["", title]
        for section, ops in group:
            lines.append(f"  block {section.block}, {plan.blocks[section.block].name}")
            for links, comes_in in ((LINKS_IN, True), (LINKS_OUT, False)):
                for link in links:
                    words = [_word(op) for op, before in ops if before == comes_in and op.lane.link == link]
                    lines += [f"    {link.replace('_', ' '):<10} {' '.join(words)}"] if words else []
    return lines


def _word(op: Op) -> str:
    return f"{op}*" if op.ahead else str(op)


def _bytes(plan: Plan, micro_batches: int, kind: str) -> list[str]:
    """The formulas; verify() has shown that the ops move just that."""
    params = sum(block.num_own for block in plan.blocks)
    read, write = (total / params for total in step_ssd_bytes(plan, micro_batches, kind))
    up, down = (total / params for total in step_device_bytes(plan, micro_batches, kind))
    taken, given = (total / params for total in step_net_bytes(plan, micro_batches, kind))
    net = f"   net {taken + given:.4g} (in {taken:.4g}, out {given:.4g})" if plan.num_ranks > 1 else ""
    of = " THAT A RANK HOLDS" if plan.num_ranks > 1 else ""
    return [
        f"BYTES PER PARAMETER{of} AND STEP (activations not counted)",
        f"  ssd {read + write:.4g} (read {read:.4g}, write {write:.4g})   h2d {up:.4g}   d2h {down:.4g}{net}",
    ]


def _legend(ops: Sequence[Op]) -> list[str]:
    used = {op.kind for op in ops}
    lines = ["LEGEND (F1.0 is block 1, micro-batch 0; R1.0 is block 1, chunk 0)"]
    for title, of_micro_batches in (("block.micro-batch", True), ("block.chunk", False)):
        kinds = [kind for kind in LEGEND if kind in used and (kind in OF_MICRO_BATCHES) == of_micro_batches]
        lines += [f"  {title}", *(f"    {kind.value}  {LEGEND[kind]}" for kind in kinds)]
    return lines
