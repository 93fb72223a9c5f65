"""What every buffer holds while a schedule runs: the verifier's model of training, one value per slot and home.

A value says what it is (weight 3.1 after 4 updates; the gradient of block 2, step 4, of these micro-batches), and
every op finds the value it needs or is rejected. Trusts nothing but the plan; knows no torch and no schedule maker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from greedysnake.errors import VerifyError
from greedysnake.holdings import Gradient, Listing, Others, State, Weight, chunks_of, resources_of, show
from greedysnake.ops import Kind, Op, Plan, Resource
from greedysnake.passes import Passes
from greedysnake.placement import Home


class Contents(Passes):
    """Runs listings in program order; the order across lanes is proved elsewhere. An op reads, then writes."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.unread: dict[Resource, Op] = {}
        """What was written and not yet read, with the op that wrote it."""
        self.updates: Counter[tuple[int, int]] = Counter()
        """How many updates every chunk has seen."""
        self.tentative: dict[tuple[int, int], bool] = {}
        """Chunks with an update in this listing that does not count yet, and whether it was written."""

    def run(self, listing: Listing) -> None:
        self.listing = listing
        self.number += 1
        if listing.trains:
            self.micro_batches.append(listing.num_micro_batches)
        self.begin_passes(listing)
        existing = resources_of(self.plan, listing.num_kept)
        for op in listing.ops:
            self.op = op
            self.reads, self.writes = list(op.reads), list(op.writes)
            self.check_op(existing)
            _ACTIONS[op.kind](self)
            self.require(not self.reads, "reads", self.reads, ", which it does not need")
            self.require(not self.writes, "writes", self.writes, ", which it does not fill")
        self.settle()
        self.end()

    def check_op(self, existing: set[Resource]) -> None:
        """What holds for every op: its slots exist, its flags mean something, and it overwrites nothing unread."""
        op = self.op
        for resource in (*op.reads, *op.writes):
            self.require(resource in existing, "uses", resource, ", which does not exist")
        used = {resource[1] for resource in (*op.reads, *op.writes) if str(resource[0]).startswith("update.")}
        self.require(len(used) <= 1, "mixes update slots", used)
        if op.kind in _OF_MICRO_BATCHES:
            self.require(op.block < self.plan.num_compute, "is of a block that does not run")
            self.require(op.index < self.listing.num_micro_batches, "has no such micro-batch")
        else:
            self.require(op.index < len(self.plan.blocks[op.block].chunks), "has no such chunk")
        set_flags = {name for name in _ALL_FLAGS if getattr(op, name)}
        self.require(set_flags <= _FLAGS.get(op.kind, set()), "has flags", set_flags)
        for resource in op.reads:
            self.unread.pop(resource, None)
        for resource in op.writes:
            wasted = None if self.adds_to(resource) else self.unread.get(resource)
            self.require(wasted is None, "overwrites", resource, ", which nothing has read since", wasted)
            self.unread[resource] = op

    def adds_to(self, resource: Resource) -> bool:
        """Whether the op changes what is there, or what only a checkpoint reads, rather than replacing it."""
        match self.op.kind:
            case Kind.UPLOAD | Kind.RENEW | Kind.GATHER | Kind.REDUCE | Kind.UPDATE | Kind.SQUARES:
                return True
            case Kind.BACKWARD if resource[0] == "gradients":
                return not (self.op.first_shared if resource[1] == "shared" else self.op.first)
            case Kind.ACCUMULATE:
                return not self.op.first
            case Kind.WRITE if self.plan.keeps_weights(self.op.block):
                return self.plan.homes[self.op.block][self.op.index].state is Home.RAM
        return resource in (("losses",), ("loss",))

    def end(self) -> None:
        """The listing is over: what it sent home was fetched, and only updates of the step just ended may be open."""
        if self.listing.kind == "ahead" and not all(op.ahead for op in self.listing.ops):
            raise VerifyError("what is done ahead has ops that are not")
        for resource, op in self.unread.items():
            if resource[0] == "activation":
                raise VerifyError(f"{op} writes {show(resource)}, and nothing reads it ({self.listing.kind})")
        if self.listing.runs and self.held.get(("loss",)) != self.number:
            raise VerifyError(f"L{self.plan.num_compute - 1}.0 is missing in listing {self.number}")
        self.step += self.listing.trains
        for block, index in chunks_of(self.plan):
            done = self.updates[block, index]
            wanted = [self.step if self.plan.blocks[block].chunks[index].trainable else 0]
            if (self.listing.trains or self.listing.kind == "ahead") and self.plan.homes[block][index].late:
                wanted.append(self.step - 1)
            if done not in wanted:
                raise VerifyError(f"A{block}.{index} ran {done} times in {self.step} steps ({self.listing.kind})")
            for home, where in ((Home.SSD, "ssd"), (Home.RAM, "ram")):
                found, newest = self.held[where, block, index], self.parts(block, index, home, done)
                if found != newest:
                    raise VerifyError(
                        f"{show(found)} lies in {where} {block} {index}, which needs {show(newest)} "
                        f"({self.listing.kind})"
                    )
            self._check_kept(block, index, done)

    def _check_kept(self, block: int, index: int, done: int) -> None:
        """Weights that stay on the device are those of the last update, also where nothing runs there before the next
        listing. Those of a revoked one go when its late update comes."""
        slot = self.newest.get(block)
        if slot is None or not self.plan.keeps_weights(block):
            return
        held = self.held[slot]
        assert isinstance(held, frozenset)
        is_revoked = done < self.step and Weight(block, index, -1) in held
        if not is_revoked and Weight(block, index, done) not in held:
            raise VerifyError(
                f"{show(slot)} has not weight {block}.{index} as it is after {done} updates ({self.listing.kind})"
            )

    def settle(self) -> None:
        """The norm is known: tentative updates count, or everything is as it was before them but for the gradients."""
        for (block, index), was_written in self.tentative.items():
            if not was_written:
                raise VerifyError(f"A{block}.{index} is tentative and never written")
            if self.listing.confirmed:
                self.updates[block, index] += 1
                done = self.updates[block, index]
                self.held["ssd", block, index] = self.parts(block, index, Home.SSD, done)
                self.held["ram", block, index] = self.parts(block, index, Home.RAM, done)
                self.unread.pop(("kept", block, index), None)
            else:
                self.unread.pop(("ram", block, index), None)
                self.spoil(block, index)
        if self.tentative:  # it is what settled them
            self.unread.pop(("verdict",), None)
        self.tentative.clear()

    def spoil(self, block: int, index: int) -> None:
        """What an update that does not count left in slots and on the device is nobody's weight."""
        for name, part in (("update.weight", Weight), ("update.state", State)):
            revoked = part(block, index, self.updates[block, index] + 1)
            for number in range(self.plan.slots.updates):
                if self.held.get((name, number)) == revoked:
                    self.held[name, number] = None
        slot = self.newest.get(block)
        if slot is not None and self.plan.keeps_weights(block):
            tried = Weight(block, index, self.updates[block, index] + 1)
            held = self.held[slot]
            assert isinstance(held, frozenset)
            self.held[slot] = frozenset(Weight(block, index, -1) if each == tried else each for each in held)

    # Weights on their way to the device

    def read_weights(self) -> None:
        self.moves(self.plan.precision.weight_bytes)
        self.fill(self.part(self.own(self.reads, "ssd"), Weight), "staging")

    def upload(self) -> None:
        """From its home in RAM, or from the slot that its reading or its update left it in. Filling starts anew
        with another block, or when a chunk comes again."""
        block, index = self.op.block, self.op.index
        self.moves(self.plan.precision.weight_bytes)
        source = self.next(self.reads, "ram", "staging", "update.weight")
        if source[0] == "ram":
            self.require(source[1:] == (block, index), "reads", source, ", which is not its own")
            weight = self.part(source, Weight)
        else:
            weight = self.held.get(source)
        if source[0] == "staging":
            self.held[source] = None  # Read for one upload: another one may not live on what is left in the slot.
        self.require(weight == Weight(block, index, self.updates[block, index]), "uploads", weight)
        slot = self.next(self.writes, "weights")
        self.require(slot[1] == self.plan.blocks[block].pool, "fills a slot of pool", slot[1])
        old = self.held.get(slot, frozenset())
        assert isinstance(old, frozenset)
        if self.plan.keeps_weights(block):
            self.require(
                self.newest.get(block, slot) == slot, "fills", slot, ", weights are in", self.newest.get(block)
            )
            self.require(weight not in old, "brings", weight, ", which is there")
            self.change_part(slot, weight)
        else:
            goes_on = all(other.block == block and other.chunk != index for other in old)
            self.held[slot] = (old if goes_on else frozenset()) | {weight}
        self.newest[block] = slot

    def change_part(self, slot: Resource, weight: object) -> None:
        """A chunk's place in the slot of a block that stays there; the rest of it is as it was."""
        part = self.next(self.writes, "weights.part")
        self.require(part[1:] == (*slot[1:], self.op.index), "fills", part, ", which is not its own")
        old = self.held.get(slot, frozenset())
        assert isinstance(old, frozenset)
        self.require(all(other.block == self.op.block for other in old), "fills", slot, ", which another block has")
        self.held[slot] = frozenset(other for other in old if other.chunk != self.op.index) | {weight}

    def renew(self) -> None:
        """What an update made of a chunk's weight takes the place of the one before it, which is on the device."""
        block, index = self.op.block, self.op.index
        self.require(self.plan.keeps_weights(block), "renews weights that do not stay on the device")
        self.moves(self.plan.precision.weight_bytes)
        done = self.updates[block, index] + self.op.tentative
        self.require(not self.op.tentative or (block, index) in self.tentative, "is tentative, and its update is not")
        source = self.next(self.reads, "ram", "update.weight")
        if source[0] == "ram":
            self.require(source[1:] == (block, index), "reads", source, ", which is not its own")
            self.require(self.plan.homes[block][index].weight is Home.RAM, "reads", source, ", where no weight lives")
        else:
            self.holds(source, Weight(block, index, done))
        slot = self.next(self.writes, "weights")
        self.require(slot == self.newest.get(block), "fills", slot, ", weights are in", self.newest.get(block))
        held = self.held[slot]
        assert isinstance(held, frozenset)
        self.require(Weight(block, index, done - 1) in held, "renews", held)
        self.change_part(slot, Weight(block, index, done))

    def take(self) -> None:
        """Brings a chunk's weight from the device, where it has seen all updates before the one that needs it."""
        self.moves(self.plan.precision.weight_bytes)
        self.fill(self.weight_on_device(self.updates[self.op.block, self.op.index]), "update.weight")

    def weight_on_device(self, version: int) -> Weight:
        """The weight of the op's chunk, where it reads it alone."""
        block, index = self.op.block, self.op.index
        part, slot = self.next(self.reads, "weights.part"), self.newest.get(block, ("nothing",))
        self.require(part[1:] == (*slot[1:], index), "reads", part, ", weights are in", slot)
        weight, held = Weight(block, index, version), self.held.get(slot, frozenset())
        assert isinstance(held, frozenset)
        self.require(weight in held, "finds", held, "in", part, ", needs", weight)
        return weight

    def gather(self) -> None:
        """All of this rank's part is there, in its last version, and goes to the others as theirs come here."""
        block, shape = self.op.block, self.plan.blocks[self.op.block]
        missing = (shape.num_params - shape.num_own) * self.plan.precision.weight_bytes
        self.require(self.op.index == 0, "is done once for a block")
        self.require(self.op.nbytes == missing > 0, "moves", self.op.nbytes, "bytes of", missing)
        versions = [self.updates[block, index] for index in range(len(shape.chunks))]
        newest = frozenset(Weight(block, index, version) for index, version in enumerate(versions))
        slot = self.next(self.reads, "weights")
        held = self.held.get(slot, frozenset())
        assert isinstance(held, frozenset)
        theirs = frozenset(each for each in held if isinstance(each, Others))
        self.require(held - theirs == newest, "finds", held, "in", slot, ", needs", newest)
        self.require(slot == self.newest.get(block), "gathers", slot, ", weights are in", self.newest.get(block))
        others = Others(block, max(versions))
        self.require(others not in theirs, "gathers", others, ", which are there")
        self.require(self.fill(newest | {others}, "weights") == slot, "gathers into another slot")

    def reduce(self) -> None:
        """The gradients of all ranks are complete, or of the micro-batch that this is the sum of, and are added up."""
        num_trainable = self.plan.blocks[self.op.block].num_trainable
        moved = (num_trainable - num_trainable // self.plan.num_ranks) * self.plan.precision.gradient_bytes
        self.require(self.op.index == 0, "is done once for a block")
        self.require(self.op.nbytes == moved > 0, "moves", self.op.nbytes, "bytes of", moved)
        slot, gradient = self.whole_gradient("adds up", reduced=False)
        into = self.fill(replace(gradient, reduced=True), "gradients")
        self.require(into == slot, "adds up into another slot than", slot)

    # Gradients and updates

    def load_state(self) -> None:
        """Brings to an update slot what lives on SSD: the state, and the weight where `whole` says so."""
        home = self.plan.homes[self.op.block][self.op.index]
        has_state = home.state is Home.SSD
        source = self.own(self.reads, "ssd")
        self.moves(self.op.whole * self.plan.precision.weight_bytes, state=has_state)
        if self.op.whole:
            self.fill(self.part(source, Weight), "update.weight")
        if has_state:
            self.fill(self.part(source, State), "update.state")

    def download(self) -> None:
        """Brings a complete gradient to the host; with `whole`, the weight that it belongs to."""
        block, index, precision = self.op.block, self.op.index, self.plan.precision
        _, gradient = self.whole_gradient("brings", reduced=self.plan.num_ranks > 1)
        self.moves(precision.gradient_bytes + self.op.whole * precision.weight_bytes)
        if self.op.whole and self.plan.keeps_weights(block):
            self.weight_on_device(self.step)
        elif self.op.whole:
            self.weights(block)
        target = self.fill(replace(gradient, chunk=index, reduced=False), "update.gradient", "kept", "spill")
        if target[0] == "kept":
            self.require(target[1:] == (block, index), "writes", target, ", which is not its own")
            self.require(not self.is_spilled(), "skips the spill slot on the way to SSD")
        if self.op.whole:
            self.fill(Weight(block, index, self.step), "update.weight")

    def whole_gradient(self, verb: str, *, reduced: bool) -> tuple[Resource, Gradient]:
        """The gradient of the op's block that it reads: complete, and of all ranks if it is `reduced`."""
        slot = self.next(self.reads, "gradients")
        gradient = self.held.get(slot)
        self.require(
            isinstance(gradient, Gradient)
            and gradient.belongs(self.op.block, -1, self.step)
            and self.is_whole(gradient)
            and gradient.reduced == reduced,
            *(verb, gradient, "from", slot, "before it is complete, or of another block or step"),
        )
        assert isinstance(gradient, Gradient)
        return slot, gradient

    def is_whole(self, gradient: Gradient) -> bool:
        """No backward op will add to it: horizontally each micro-batch's gradient goes to RAM by itself."""
        if self.listing.kind == "horizontal" and gradient.block != self.plan.shared:
            return len(gradient.terms) == 1
        return gradient.terms == self.complete(gradient.block, gradient.step)

    def is_spilled(self) -> bool:
        home = self.plan.homes[self.op.block][self.op.index]
        return home.late and home.gradient is Home.SSD

    def own_gradient(self, step: int) -> Gradient:
        """The gradient of the op's chunk in a step, complete."""
        return Gradient(self.op.block, self.op.index, step, self.complete(self.op.block, step))

    def accumulate(self) -> None:
        slot = self.next(self.reads, "update.gradient")
        new = self.held.get(slot)
        self.require(isinstance(new, Gradient) and new.belongs(self.op.block, self.op.index, self.step), "adds", new)
        assert isinstance(new, Gradient)
        self.require(not self.is_spilled(), "adds in RAM to a gradient that lives on SSD")
        kept = self.own(self.writes, "kept")
        self.held[kept] = self.sum_of(kept, new, self.op.first)

    def squares(self) -> None:
        gradient = self.own_gradient(self.step)
        self.find(gradient, "kept", "spill", "update.gradient")
        old = self.held["squares",]
        assert isinstance(old, frozenset)
        self.require(gradient not in old, "adds the same gradient to the norm twice")
        self.fill(old | {gradient}, "squares")

    def spill_gradient(self) -> None:
        self.moves(self.plan.precision.gradient_bytes)
        self.require(self.is_spilled(), "spills a gradient that lives in RAM")
        gradient = self.own_gradient(self.step)
        self.find(gradient, "spill", "update.gradient")
        self.held[self.own(self.writes, "kept")] = gradient

    def recall_gradient(self) -> None:
        self.moves(self.plan.precision.gradient_bytes)
        self.require(self.is_spilled(), "recalls a gradient that lives in RAM")
        self.fill(self.held.get(self.own(self.reads, "kept")), "update.gradient")

    def update(self) -> None:
        """The n-th update of a chunk takes the n-th step's gradient and verdict to parts that saw n before."""
        block, index = self.op.block, self.op.index
        done = self.updates[block, index]
        self.require(self.chunk.trainable, "updates a frozen chunk")
        self.require(done < len(self.micro_batches), "has no step left to belong to")
        source = self.find(self.own_gradient(done), "update.gradient", "kept")
        self.require(source[0] != "kept" or not self.is_spilled(), "reads a spilled gradient as if it were in RAM")
        home = self.plan.homes[block][index]
        if self.op.tentative:
            self.require(home.tentative and done == self.step, "is tentative, and may not be")
            self.require((block, index) not in self.tentative, "is tentative a second time")
            self.require(
                self.held.get(("kept", block, index)) == self.own_gradient(done), "keeps no gradient to do it again"
            )
        else:
            self.find(done, "verdict")
        for name, place, part in (("weight", home.weight, Weight), ("state", home.state, State)):
            if place is Home.SSD:
                slot = self.next(self.writes, f"update.{name}")
                self.holds(slot, part(block, index, done))
                self.held[slot] = part(block, index, done + 1)
        in_ram = self.parts(block, index, Home.RAM, done)
        if self.op.tentative:
            self.tentative[block, index] = False
            if in_ram:
                self.holds(self.own(self.writes, "ram"), in_ram)
            return
        if in_ram:
            slot = self.own(self.writes, "ram")
            self.holds(slot, in_ram)
            self.held[slot] = self.parts(block, index, Home.RAM, done + 1)
        self.updates[block, index] += 1

    def write(self) -> None:
        """Stores all that lives on SSD, as it is after the last update."""
        home = self.plan.homes[self.op.block][self.op.index]
        weight_bytes = (home.weight is Home.SSD) * self.plan.precision.weight_bytes
        self.moves(weight_bytes, state=home.state is Home.SSD)
        key = (self.op.block, self.op.index)
        newest = self.updates[key]
        if self.op.tentative:
            self.require(key in self.tentative, "is tentative, and its update is not")
            newest += 1
        for name, place, part in (("weight", home.weight, Weight), ("state", home.state, State)):
            if place is Home.SSD:
                self.find(part(self.op.block, self.op.index, newest), f"update.{name}")
        slot = self.own(self.writes, "ssd")
        if self.op.tentative:
            self.tentative[key] = True
        else:
            self.held[slot] = self.parts(*key, Home.SSD, newest)

    def verdict(self) -> None:
        """Says whether the step counts. With clipping it knows the norm, over all chunks, and starts a new sum."""
        self.require(self.listing.trains, "judges a listing that does not train")
        self.require(self.held.get(("verdict",)) != self.step, "comes a second time")
        self.find(self.number, "loss")
        if self.plan.clipping:
            trained = [(b, c) for b, c in chunks_of(self.plan) if self.plan.blocks[b].chunks[c].trainable]
            norm = frozenset(Gradient(b, c, self.step, self.complete(b, self.step)) for b, c in trained)
            self.find(norm, "squares")
            self.held["squares",] = frozenset()
        self.fill(self.step, "verdict")


_OF_MICRO_BATCHES = {
    *(Kind.FORWARD, Kind.BACKWARD, Kind.EVALUATE),
    *(Kind.PARK, Kind.GET, Kind.SPILL, Kind.RECALL),
}
_DONE_AHEAD = {
    *(Kind.READ_WEIGHTS, Kind.UPLOAD, Kind.GATHER, Kind.TAKE),
    *(Kind.LOAD_STATE, Kind.RECALL_GRADIENT, Kind.UPDATE, Kind.WRITE),
}
_ALL_FLAGS = ("first", "last", "first_shared", "whole", "ahead", "tentative")
_FLAGS = {kind: {"ahead"} for kind in _DONE_AHEAD} | {
    Kind.UPDATE: {"ahead", "tentative"},
    Kind.WRITE: {"ahead", "tentative"},
    Kind.RENEW: {"tentative"},
    Kind.LOAD_STATE: {"ahead", "whole"},
    Kind.DOWNLOAD: {"whole"},
    Kind.BACKWARD: {"first", "last", "first_shared"},
    Kind.ACCUMULATE: {"first"},
}
_ACTIONS = {kind: getattr(Contents, kind.name.lower()) for kind in Kind}
