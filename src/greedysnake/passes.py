"""What compute and tensors between blocks must find in the verifier's buffers: the passes over the blocks. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise

from greedysnake.errors import VerifyError
from greedysnake.holdings import Gradient, Listing, Others, Tensor, Weight
from greedysnake.ledger import Ledger
from greedysnake.ops import Kind, Plan, Resource
from greedysnake.placement import Home


class Passes(Ledger):
    """Forward, backward and evaluation of blocks, and what is carried between them and to its home."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.newest: dict[int, Resource] = {}
        """The device slot that a block's weights were last brought to; older ones are given back."""
        self.fetched: set[Resource] = set()
        """Device slots whose tensor was fetched from its home."""

    def begin_passes(self, listing: Listing) -> None:
        self.homes = self.plan.activation_homes(listing.num_kept)
        self.firsts = check_compute(self.plan, listing)

    def weights(self, block: int) -> None:
        slot = self.next(self.reads, "weights")
        self.require(slot[1] == self.plan.blocks[block].pool, "reads weights of pool", slot[1])
        self.require(slot == self.newest.get(block), "reads", slot, ", weights are in", self.newest.get(block))
        chunks = range(len(self.plan.blocks[block].chunks))
        own = frozenset(Weight(block, index, self.version(block, index)) for index in chunks)
        self.holds(slot, own | self.others(block))

    def others(self, block: int) -> frozenset[Others]:
        """What has to come from other ranks before a block can run."""
        shape = self.plan.blocks[block]
        version = self.step if shape.num_trainable else 0
        return frozenset([Others(block, version)] if shape.num_params > shape.num_own else [])

    def tensor(self, what: str, block: int, *, turns: bool) -> None:
        """Reads a tensor of the op's micro-batch; where the snake turns, it has stayed on the device."""
        slot = self.find(Tensor(what, self.number, block, self.op.index), "between", "activation")
        self.on_device(slot, block)
        is_first = self.listing.kind == "horizontal" or self.firsts[self.op.kind, self.op.block] == self.op.index
        if turns and is_first:
            self.require(
                slot not in self.fetched, "fetches its", what, ", which was on the device when the snake turned"
            )

    def on_device(self, slot: Resource, block: int) -> None:
        """A tensor that lives on the device has a place of its own there, others take turns in slots."""
        place = self.place(block)
        lives = self.home(block) is Home.DEVICE
        self.require(slot == place if lives else slot[0] == "between", "keeps a tensor in", slot)

    def home(self, block: int) -> Home:
        return self.homes[block, int(self.place(block)[-1])]

    def place(self, block: int) -> Resource:
        return ("activation", block, 0 if self.listing.kind == "horizontal" else self.op.index)

    def output(self, what: str, block: int) -> None:
        slot = self.fill(Tensor(what, self.number, block, self.op.index), "between", "activation")
        self.on_device(slot, block)
        self.fetched.discard(slot)

    def inputs(self) -> None:
        block, is_last = self.op.block, self.op.block == self.plan.num_compute - 1
        self.weights(block)
        if self.plan.keeps_graph(block) and self.op.kind is Kind.BACKWARD:
            self.find(Tensor("graph", self.number, block, self.op.index), "graph")
        elif block:
            self.tensor("activation", block, turns=is_last or self.op.kind is not Kind.BACKWARD)
        if self.op.kind is Kind.BACKWARD and not is_last:
            self.tensor("gradient", block + 1, turns=True)
        if block in self.plan.users_of_shared:
            assert self.plan.shared is not None
            self.weights(self.plan.shared)

    def forward(self) -> None:
        self.inputs()
        self.output("activation", self.op.block + 1)
        if self.plan.keeps_graph(self.op.block) and self.listing.trains:
            self.fill(Tensor("graph", self.number, self.op.block, self.op.index), "graph")

    def evaluate(self) -> None:
        self.inputs()
        self.lose()

    def lose(self) -> None:
        old = self.held["losses",]
        assert isinstance(old, frozenset)
        this = {(self.number, self.op.index)}
        self.fill(frozenset(loss for loss in old if loss[1] != self.op.index) | this, "losses")

    def backward(self) -> None:
        op, block = self.op, self.op.block
        self.inputs()
        if self.plan.blocks[block].num_trainable:
            terms = self.add_gradient(block, starts=op.first)
            share = {(block, op.index)} if self.listing.kind == "horizontal" else self.complete(block, self.step)
            self.require(op.last == (terms == share), "has last=", op.last, "after", terms)
        if block > self.plan.lowest:
            self.output("gradient", block)
        if block == self.plan.num_compute - 1:
            self.lose()
        adds_to_shared = self.plan.trains_shared and block in self.plan.users_of_shared
        self.require(adds_to_shared or not op.first_shared, "has first_shared, and nothing to add")
        if adds_to_shared:
            assert self.plan.shared is not None
            self.add_gradient(self.plan.shared, starts=op.first_shared)

    def add_gradient(self, block: int, *, starts: bool) -> frozenset[tuple[int, int]]:
        slot = self.next(self.writes, "gradients")
        self.require(slot[1] == self.plan.gradient_pool(block), "adds to a gradient of pool", slot[1])
        self.held[slot] = self.sum_of(slot, Gradient(block, -1, self.step, self.own_term), starts)
        return self.held[slot].terms  # type: ignore[attr-defined, no-any-return]

    @property
    def own_term(self) -> frozenset[tuple[int, int]]:
        return frozenset([(self.op.block, self.op.index)])

    def sum_of(self, slot: Resource, new: Gradient, starts: bool) -> Gradient:
        """The gradient in a slot plus a new one, or the new one alone."""
        if starts:
            return new
        old = self.held.get(slot)
        self.require(
            isinstance(old, Gradient) and replace(old, terms=new.terms) == new and not old.terms & new.terms,
            "adds",
            new,
            "to",
            old,
        )
        assert isinstance(old, Gradient)
        return replace(new, terms=old.terms | new.terms)

    def loss(self) -> None:
        this = frozenset((self.number, index) for index in range(self.listing.num_micro_batches))
        losses = self.held["losses",]
        assert isinstance(losses, frozenset)
        self.require(this <= losses, "comes before the last micro-batch's loss")
        self.next(self.reads, "losses")
        self.require(self.held.get(("loss",)) != self.number, "comes a second time")
        self.fill(self.number, "loss")

    # Tensors between blocks and their homes

    def park(self) -> None:
        self.to_home(self.carried("between"), "transfer" if self.home(self.op.block) is Home.SSD else "activation")

    def spill(self) -> None:
        self.to_home(self.carried("transfer"), "activation")

    def recall(self) -> None:
        self.to_home(self.carried("activation"), "transfer")

    def get(self) -> None:
        tensor = self.carried("transfer" if self.home(self.op.block) is Home.SSD else "activation")
        self.fetched.add(self.fill(tensor, "between"))

    def carried(self, name: str) -> object:
        """The tensor that the op reads: an activation, or the gradient that took its place."""
        self.require(self.home(self.op.block) is not Home.DEVICE, "moves a tensor that lives on the device")
        slot = self.next(self.reads, name)
        self.require(name != "activation" or slot == self.place(self.op.block), "reads", slot)
        tensor = self.held.get(slot)
        whats = [Tensor(what, self.number, self.op.block, self.op.index) for what in ("activation", "gradient")]
        self.require(tensor in whats, "finds", tensor, "in", slot)
        return tensor

    def to_home(self, tensor: object, name: str) -> None:
        slot = self.fill(tensor, name)
        self.require(name != "activation" or slot == self.place(self.op.block), "writes", slot)


def check_compute(plan: Plan, listing: Listing) -> dict[tuple[Kind, int], int]:
    """Every block runs once per micro-batch; vertically in one go, in the reverse order of the block before it.
    Returns the micro-batch that each (kind, block) starts with."""
    ops = [op for op in listing.ops if op.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.EVALUATE)]
    last = plan.num_compute - 1
    passes: list[tuple[Kind, int]] = []
    if listing.runs:
        passes = [(Kind.FORWARD, block) for block in range(last)]
        trained = [(Kind.BACKWARD, block) for block in range(last, plan.lowest - 1, -1)]
        passes += trained if listing.trains else [(Kind.EVALUATE, last)]
    counted = Counter((op.kind, op.block, op.index) for op in ops)
    wanted = Counter((*each, index) for each in passes for index in range(listing.num_micro_batches))
    for kind, block, index in (counted - wanted) | (wanted - counted):
        key = (kind, block, index)
        raise VerifyError(f"{kind.value}{block}.{index} runs {counted[key]} times in a listing, not {wanted[key]}")
    if listing.kind != "horizontal":
        runs = [(key, list(run)) for key, run in groupby(ops, key=lambda op: (op.kind, op.block))]
        if [key for key, _ in runs] != passes:
            raise VerifyError(f"blocks run as {[f'{kind.value}{block}' for (kind, block), _ in runs]}")
        for (_, before), (_, run) in pairwise(runs):
            for op, turned in zip(run, reversed(before), strict=True):
                if op.index != turned.index:
                    raise VerifyError(f"{op} runs where the snake has micro-batch {turned.index}")
    return {(op.kind, op.block): op.index for op in reversed(ops)}
