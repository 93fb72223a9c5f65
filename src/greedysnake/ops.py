"""The words of the schedule: lanes, ops, and the plan and cursor that a schedule is made from. No torch."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from greedysnake.errors import PlanError
from greedysnake.placement import ChunkHome, Home, Placement, Slots, activation_homes, last_layers, num_compute_blocks
from greedysnake.shapes import BlockShape, Precision

Resource = tuple[str | int, ...]
"""A thing that ops read and write, e.g. ("weights", "layers", 1) is the second device slot for layers."""


SSD_DEPTH = 3
"""Chunks that a lane of the SSD has in flight: the next is queued before one ends."""


class Lane(Enum):
    """Each runs its ops in order. Traffic that may wait for different things has a lane of its own."""

    def __init__(self, text: str) -> None:
        self.link = text.split(".")[0]
        """The resource behind the lane: compute, h2d, d2h, net, ssd_read, ssd_write or cpu."""
        self.overlaps = self.link.startswith("ssd")
        """Whether several of its ops may be under way at once: they start in order, and end in order."""
        self.depth = SSD_DEPTH if self.overlaps else 1
        """How many of its ops may be under way at once."""

    __hash__ = object.__hash__  # that of Enum is code in Python, and lists have a million ops

    COMPUTE = "compute"
    UPLOAD = "h2d.weights"
    RENEW = "h2d.updates"
    GATHER = "net.weights"
    REDUCE = "net.gradients"
    FETCH = "h2d.activations"
    DOWNLOAD = "d2h.gradients"
    TAKE = "d2h.weights"
    PARK = "d2h.activations"
    READ = "ssd_read.weights"
    LOAD = "ssd_read.state"
    RECALL = "ssd_read.activations"
    WRITE = "ssd_write.state"
    SPILL = "ssd_write.activations"
    CPU = "cpu.updates"
    NORM = "cpu.norm"


class Kind(Enum):
    """What an op does; the letter is its printed form."""

    __hash__ = object.__hash__

    FORWARD = "F"
    BACKWARD = "B"
    EVALUATE = "E"
    READ_WEIGHTS = "R"
    UPLOAD = "U"
    RENEW = "V"
    GATHER = "I"
    REDUCE = "O"
    DOWNLOAD = "D"
    TAKE = "T"
    LOAD_STATE = "S"
    UPDATE = "A"
    WRITE = "W"
    PARK = "P"
    GET = "G"
    SPILL = "Y"
    RECALL = "X"
    SPILL_GRADIENT = "H"
    RECALL_GRADIENT = "J"
    ACCUMULATE = "C"
    SQUARES = "Q"
    LOSS = "L"
    VERDICT = "N"


LANES = {
    Kind.FORWARD: Lane.COMPUTE,
    Kind.BACKWARD: Lane.COMPUTE,
    Kind.EVALUATE: Lane.COMPUTE,
    Kind.READ_WEIGHTS: Lane.READ,
    Kind.UPLOAD: Lane.UPLOAD,
    Kind.RENEW: Lane.RENEW,
    Kind.GATHER: Lane.GATHER,
    Kind.REDUCE: Lane.REDUCE,
    Kind.DOWNLOAD: Lane.DOWNLOAD,
    Kind.TAKE: Lane.TAKE,
    Kind.LOAD_STATE: Lane.LOAD,
    Kind.UPDATE: Lane.CPU,
    Kind.WRITE: Lane.WRITE,
    Kind.PARK: Lane.PARK,
    Kind.GET: Lane.FETCH,
    Kind.SPILL: Lane.SPILL,
    Kind.RECALL: Lane.RECALL,
    Kind.SPILL_GRADIENT: Lane.WRITE,
    Kind.RECALL_GRADIENT: Lane.LOAD,
    Kind.ACCUMULATE: Lane.CPU,
    Kind.SQUARES: Lane.NORM,
    Kind.LOSS: Lane.DOWNLOAD,
    Kind.VERDICT: Lane.NORM,
}


_URGENT = frozenset({Kind.READ_WEIGHTS, Kind.RECALL})


@dataclass(frozen=True, slots=True)
class Op:
    """One thing one lane does. `index` is a micro-batch (F, B, E, P, G, Y, X), a chunk, or 0 for what is done once for
    a block (I, O, L, N)."""

    kind: Kind
    block: int
    index: int
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()
    nbytes: int = 0
    first: bool = False
    """B: the first micro-batch of its block in this step, which sets the gradient instead of adding to it."""
    last: bool = False
    """B: the last one, after which the gradient is complete."""
    first_shared: bool = False
    """B: the first op of the step that adds to the gradient of the shared parameters."""
    whole: bool = False
    """S: reads the weight too; D: brings the weight down with the gradient."""
    ahead: bool = False
    """Done at the end of a step for the next one, to which its bytes belong."""
    tentative: bool = False
    """A, W, V: before the norm is known, as if nothing were clipped; counts only when the step is confirmed."""

    @property
    def lane(self) -> Lane:
        return LANES[self.kind]

    @property
    def urgent(self) -> bool:
        """Compute waits for it: the drives serve it before all that is not."""
        return self.kind in _URGENT

    def __str__(self) -> str:
        return f"{self.kind.value}{self.block}.{self.index}"


@dataclass(frozen=True)
class Plan:
    """Everything a schedule depends on but the number of micro-batches."""

    blocks: tuple[BlockShape, ...]
    """In forward order; parameters that several blocks share come as one more block at the end."""
    homes: tuple[tuple[ChunkHome, ...], ...]
    precision: Precision
    placement: Placement = field(default_factory=Placement)
    slots: Slots = field(default_factory=Slots)
    clipping: bool = False
    users_of_shared: frozenset[int] = frozenset()
    """Blocks that use the shared parameters."""
    tentative: bool = False
    """With clipping: the updates of chunks that may be tentative are done in the backward."""
    trainers_of_shared: frozenset[int] | None = None
    """Of the blocks that use shared parameters, those that use a trained one; None is all of them."""

    @cached_property
    def num_compute(self) -> int:
        return num_compute_blocks(self.blocks)

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks share the blocks, each with its own part of the state and its own micro-batches."""
        return self.blocks[0].num_ranks

    @property
    def shared(self) -> int | None:
        return self.num_compute if self.num_compute < len(self.blocks) else None

    @cached_property
    def trains_shared(self) -> bool:
        return self.shared is not None and self.blocks[self.shared].num_trainable > 0

    @cached_property
    def lowest(self) -> int:
        """The first block that has a gradient to compute; the backward ends there."""
        candidates = [index for index in range(self.num_compute) if self.blocks[index].num_trainable]
        if self.trains_shared:
            candidates.append(min(self.users_of_shared if self.trainers_of_shared is None else self.trainers_of_shared))
        if not candidates:
            raise PlanError("every parameter is frozen: there is nothing to train")
        return min(candidates)

    @property
    def has_early_updates(self) -> bool:
        return any(
            chunk.trainable and not home.late
            for block, homes in zip(self.blocks, self.homes, strict=True)
            for chunk, home in zip(block.chunks, homes, strict=True)
        )

    @cached_property
    def may_be_tentative(self) -> bool:
        """Whether there are updates that may be done before the norm is known."""
        return any(home.tentative for homes in self.homes for home in homes)

    def keeps_weights(self, block: int) -> bool:
        """Whether a block's weights stay on the device, in a slot of their own, where each update renews them."""
        return self.blocks[block].pool == "kept"

    def keeps_graph(self, block: int) -> bool:
        """Whether its whole autograd graph stays there from forward to backward."""
        in_backward = self.keeps_weights(block) and block >= self.lowest
        return in_backward and block in last_layers(self.blocks, self.placement.graphs_device)

    def gradient_pool(self, block: int) -> str:
        pool = self.blocks[block].pool
        return "layers" if pool == "kept" else pool

    def comes_back(self, block: int) -> bool:
        """Whether the backward asks for the input of a block again, after its forward."""
        return self.lowest <= block < self.num_compute - 1 and not self.keeps_graph(block)

    def activation_homes(self, num_micro_batches: int) -> dict[tuple[int, int], Home]:
        """Home of the input of every block but the first."""
        inputs = range(1, self.num_compute)
        saved = [block for block in inputs if self.comes_back(block)]
        passing = [block for block in inputs if not self.comes_back(block)]
        return activation_homes(saved, passing, num_micro_batches, self.placement)

    def count_homes(self, num_micro_batches: int) -> dict[Home, int]:
        """How many tensors between blocks have each home. Those that stay on the device until the next block takes
        them, and do not come back, use none."""
        count = dict.fromkeys(Home, 0)
        all_stay = self.num_stay(num_micro_batches) >= num_micro_batches
        for (block, _), home in self.activation_homes(num_micro_batches).items():
            count[home] += self.comes_back(block) or not all_stay
        return count

    def num_between(self, num_micro_batches: int) -> int:
        """Device slots for tensors between blocks: those that stay, those in use, two in flight."""
        return round(self.placement.gradients_device * num_micro_batches) + IN_USE + IN_FLIGHT

    def num_stay(self, num_micro_batches: int) -> int:
        """How many tensors of a pass stay on the device; the one at which the snake turns always does."""
        return self.num_between(num_micro_batches) - IN_USE


IN_USE = 3
"""A backward reads an activation and a gradient, and writes a gradient."""
IN_FLIGHT = 2
"""One tensor on its way in while another is on its way out."""


class Cursor:
    """What outlasts a step: which slots are free, what is already on its way, which updates are pending."""

    def __init__(self, plan: Plan) -> None:
        slots = plan.slots
        self.free: dict[tuple[str, str], deque[int]] = {
            ("weights", "layers"): deque(range(slots.weights)),
            ("weights", "ends"): deque(range(1)),
            ("weights", "shared"): deque(range(1)),
            ("weights", "kept"): deque(range(sum(block.pool == "kept" for block in plan.blocks))),
            ("gradients", "layers"): deque(range(slots.gradients)),
            ("gradients", "ends"): deque(range(1)),
            ("gradients", "shared"): deque(range(1)),
            ("staging", ""): deque(range(slots.staging)),
            ("update", ""): deque(range(slots.updates)),
            ("transfer", ""): deque(range(slots.transfers)),
            ("spill", ""): deque(range(slots.transfers)),
        }
        self.on_device: dict[int, Resource] = {}
        """Blocks whose weights are on the device, or on their way."""
        self.outdated: set[tuple[int, int]] = set()
        """Chunks of these that are not there, or not any more as they should be."""
        self.apart: set[int] = set()
        """Those of which the other ranks' parts are not there, or were before their update."""
        self.pending: set[tuple[int, int]] = set()
        """Chunks whose update is still to be done. All are of the last step, whose verdict stays in force until they
        have read it."""
        self.preloaded: dict[tuple[int, int], int] = {}
        """Chunks whose state was read ahead, and into which update slot."""
        self.tentative: set[tuple[int, int]] = set()
        """Chunks whose update in the last step is neither confirmed nor revoked."""

    def confirm(self) -> None:
        """The step was not clipped: its tentative updates are as good as any."""
        self.tentative.clear()

    def revoke(self) -> None:
        """It was: they are still to be done, from the state before them, which the device does not have any more."""
        self.pending |= self.tentative
        self.outdated |= {key for key in self.tentative if key[0] in self.on_device}
        self.tentative.clear()

    def copy(self) -> Cursor:
        """A cursor at the same point, for a list that may not be run after all."""
        other = copy(self)
        other.free = {key: deque(slots) for key, slots in self.free.items()}
        other.on_device = dict(self.on_device)
        other.outdated = set(self.outdated)
        other.apart = set(self.apart)
        other.pending = set(self.pending)
        other.preloaded = dict(self.preloaded)
        other.tentative = set(self.tentative)
        return other
