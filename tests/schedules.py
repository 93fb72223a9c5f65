"""Plans and lists of ops that tests of the schedule, the verifier and the simulator are tried on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from greedysnake.ops import Cursor, Plan
from greedysnake.placement import Placement, Slots, chunk_homes, keep_on_device
from greedysnake.schedule import ahead, evaluation, flush, horizontal, vertical
from greedysnake.shapes import GRANULE, MOMENTS, PRECISIONS, BlockShape, Chunk, precision_of
from greedysnake.verify import Listing

SCHEDULES = {"vertical": vertical, "horizontal": horizontal, "evaluation": evaluation}


def make_listings(plan: Plan, kinds: Sequence[tuple[str, int]]) -> list[Listing]:
    cursor = Cursor(plan)
    listings = []
    for kind, num_micro_batches in kinds:
        if kind == "flush":
            listings.append(Listing(kind, 0, tuple(flush(plan, cursor))))
        elif kind in ("confirmed", "revoked"):
            ops = vertical(replace(plan, tentative=plan.may_be_tentative), cursor, num_micro_batches)
            listings.append(Listing("vertical", num_micro_batches, tuple(ops), confirmed=kind == "confirmed"))
            cursor.confirm() if kind == "confirmed" else cursor.revoke()
            if plan.may_be_tentative:
                listings.append(Listing("ahead", 0, tuple(ahead(plan, cursor))))
        else:
            ops = SCHEDULES[kind](plan, cursor, num_micro_batches)
            listings.append(Listing(kind, num_micro_batches, tuple(ops)))
    return listings


def make_block(name: str, trainable: Sequence[int], frozen: Sequence[int], pool: str) -> BlockShape:
    """A block with chunks of these many granules."""
    chunks, start = [], 0
    for size, is_trainable in [(size, True) for size in trainable] + [(size, False) for size in frozen]:
        chunks.append(Chunk(start, size * GRANULE, is_trainable))
        start += size * GRANULE
    return BlockShape(name, tuple(chunks), pool)


def make_plan(
    num_blocks: int = 4,
    *,
    chunks: Sequence[int] = (2, 1),
    shared: bool = False,
    alpha: float = 0.25,
    clipping: bool = False,
    precision: str = "bfloat16",
    placement: Placement | None = None,
    slots: Slots | None = None,
    tentative: bool = False,
    num_ranks: int = 1,
) -> Plan:
    """Embedding, layers and head of equal shape, all trainable, everything on SSD."""
    pools = ["ends", *["layers"] * (num_blocks - 2), "ends"][:num_blocks] if num_blocks > 1 else ["layers"]
    blocks = [make_block(f"block {index}", chunks, (), pool) for index, pool in enumerate(pools)]
    if shared:
        blocks.append(make_block("shared", (1,), (), "shared"))
    placement = placement or Placement()
    blocks = [replace(block, num_ranks=num_ranks) for block in keep_on_device(blocks, placement)]
    return Plan(
        tuple(blocks),
        chunk_homes(blocks, placement, alpha=alpha, clipping=clipping, tentative=tentative),
        PRECISIONS[precision],
        placement,
        slots or Slots(),
        clipping,
        frozenset({0, num_blocks - 1}) if shared else frozenset(),
    )


sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
fractions = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


@st.composite
def plans(draw: st.DrawFn, *, spills: bool = True) -> Plan:
    num_blocks = draw(st.integers(1, 8))
    ends = draw(st.booleans())
    blocks = []
    for index in range(num_blocks):
        trainable, frozen = draw(sizes), draw(sizes)
        kept = draw(st.sampled_from(["trainable", "trainable", "both", "frozen"]))
        pool = "ends" if ends and index in (0, num_blocks - 1) else "layers"
        blocks.append(
            make_block(
                f"block {index}", trainable if kept != "frozen" else (), frozen if kept != "trainable" else (), pool
            )
        )
    users: frozenset[int] = frozenset()
    if num_blocks > 1 and draw(st.booleans()):
        users = frozenset(draw(st.sets(st.integers(0, num_blocks - 1), min_size=2)))
        kept = draw(st.sampled_from(["trainable", "both", "frozen"]))
        blocks.append(
            make_block("shared", draw(sizes) if kept != "frozen" else (), () if kept == "trainable" else (1,), "shared")
        )
    if not any(block.num_trainable for block in blocks):
        blocks[0] = make_block("block 0", (1, 2), (), blocks[0].pool)
    on_device = draw(fractions)
    placement = Placement(
        weights_ram=draw(fractions),
        optimizer_ram=draw(fractions),
        activations_device=on_device,
        activations_ram=draw(fractions) * (1 - on_device),
        gradients_device=draw(fractions),
        gradients_ram=draw(fractions) if spills else 1.0,
        graphs_device=draw(fractions) if spills else 0.0,
        weights_device=draw(fractions) if spills else 0.0,
    )
    num_ranks = draw(st.sampled_from([1, 1, 2, 3]))
    blocks = [replace(block, num_ranks=num_ranks) for block in keep_on_device(blocks, placement)]
    slots = Slots(*(draw(st.integers(1, 4)) for _ in range(5)))
    clipping = draw(st.booleans())
    tentative = clipping and draw(st.booleans())
    homes = chunk_homes(blocks, placement, alpha=draw(fractions), clipping=clipping, tentative=tentative)
    precision = precision_of(draw(st.sampled_from(sorted(PRECISIONS))), draw(st.sampled_from(sorted(MOMENTS))))
    return Plan(tuple(blocks), homes, precision, placement, slots, clipping, users)
