"""What the verifier's buffers can hold, what buffers there are, and how both read in a message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from greedysnake.ops import Op, Plan, Resource


@dataclass(frozen=True)
class Listing:
    """One list of ops, and what it should be."""

    kind: str
    """vertical, horizontal, evaluation, flush or ahead."""
    num_micro_batches: int
    """0 for a flush and for what is done ahead."""
    ops: tuple[Op, ...]
    confirmed: bool = True
    """Whether its tentative updates, if it has any, count."""

    @property
    def trains(self) -> bool:
        return self.kind in ("vertical", "horizontal")

    @property
    def runs(self) -> bool:
        """Whether it takes micro-batches through the blocks."""
        return self.kind not in ("flush", "ahead")

    @property
    def num_kept(self) -> int:
        """How many micro-batches have tensors between blocks at once."""
        return 1 if self.kind == "horizontal" else self.num_micro_batches


@dataclass(frozen=True)
class Weight:
    block: int
    chunk: int
    version: int
    """How many updates it has seen."""


@dataclass(frozen=True)
class State:
    block: int
    chunk: int
    version: int


@dataclass(frozen=True)
class Gradient:
    block: int
    chunk: int
    """-1: all chunks of the block."""
    step: int
    terms: frozenset[tuple[int, int]]
    """The backward ops that are summed in it, as (block, micro-batch)."""
    reduced: bool = False
    """On the device, where there are several ranks: it is the sum of all of theirs, in this rank's part."""

    def belongs(self, block: int, chunk: int, step: int) -> bool:
        return (self.block, self.chunk, self.step) == (block, chunk, step)


@dataclass(frozen=True)
class Others:
    """The weights of a block that other ranks hold."""

    block: int
    version: int
    """How many updates they have seen."""
    chunk: int = -1


@dataclass(frozen=True)
class Tensor:
    what: str
    """activation, gradient or graph."""
    listing: int
    block: int
    micro_batch: int


def chunks_of(plan: Plan) -> Iterator[tuple[int, int]]:
    """(block, chunk) of every chunk."""
    return ((block, index) for block, shape in enumerate(plan.blocks) for index in range(len(shape.chunks)))


def resources_of(plan: Plan, num_kept: int) -> set[Resource]:
    """Everything that ops may touch: as many slots as the plan has paid for, and a home for every chunk and tensor."""
    slots = plan.slots
    counts: dict[Resource, int] = {
        ("weights", "layers"): slots.weights,
        ("gradients", "layers"): slots.gradients,
        ("staging",): slots.staging,
        ("update.gradient",): slots.updates,
        ("update.weight",): slots.updates,
        ("update.state",): slots.updates,
        ("transfer",): slots.transfers,
        ("spill",): slots.transfers,
        ("between",): plan.num_between(num_kept),
    }
    counts["weights", "kept"] = sum(block.pool == "kept" for block in plan.blocks)
    counts |= {("graph", block): num_kept for block in range(plan.num_compute) if plan.keeps_graph(block)}
    counts |= {(name, pool): 1 for name in ("weights", "gradients") for pool in ("ends", "shared")}
    counts |= {("activation", block): num_kept for block in range(1, plan.num_compute)}
    existing: set[Resource] = {(*name, number) for name, count in counts.items() for number in range(count)}
    existing |= {(name, *chunk) for name in ("ssd", "ram", "kept") for chunk in chunks_of(plan)}
    num_parts = max((len(block.chunks) for block in plan.blocks if block.pool == "kept"), default=0)
    parts = ((slot, part) for slot in range(counts["weights", "kept"]) for part in range(num_parts))
    existing |= {("weights.part", "kept", *numbers) for numbers in parts}
    return existing | {("verdict",), ("squares",), ("losses",), ("loss",)}


def show(value: object) -> str:
    """Contents and resources as words."""
    match value:
        case None:
            return "nothing"
        case Weight(block, chunk, version):
            return f"weight {block}.{chunk} after {version} updates"
        case State(block, chunk, version):
            return f"state {block}.{chunk} after {version} updates"
        case Others(block, version):
            return f"the other ranks' weights of {block} after {version} updates"
        case Gradient(block, chunk, step, terms, reduced):
            chunks = "" if chunk < 0 else f".{chunk}"
            return f"gradient {block}{chunks} of step {step} from {show(terms)}{' of all ranks' if reduced else ''}"
        case Tensor(what, listing, block, micro_batch):
            return f"{what} {block}.{micro_batch} of listing {listing}"
        case frozenset():
            return "[" + ", ".join(sorted(map(show, value))) + "]"
        case tuple():
            return " ".join(map(str, value))
        case list() | set():
            return ", ".join(map(show, value))
    return str(value)
