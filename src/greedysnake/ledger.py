"""What every buffer holds, and what an op may touch: the ground under contents.py and passes.py. No torch."""

from __future__ import annotations

from greedysnake.errors import VerifyError
from greedysnake.holdings import Listing, State, Weight, chunks_of, show
from greedysnake.ops import Op, Plan, Resource
from greedysnake.placement import Home
from greedysnake.shapes import Chunk


class Ledger:
    """One value per slot and home. The op at hand takes its reads and writes in order, and is rejected if it finds
    something else than it needs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.held: dict[Resource, object] = {("squares",): frozenset(), ("losses",): frozenset()}
        self.micro_batches: list[int] = []
        """How many micro-batches every training step had, the one at hand included."""
        self.number = -1
        self.step = 0
        """Training steps before the listing at hand."""
        self.listing: Listing
        self.op: Op
        self.reads: list[Resource]
        """What the op at hand reads and has not been asked for yet; writes likewise."""
        self.writes: list[Resource]
        for block, index in chunks_of(plan):
            for home, where in ((Home.SSD, "ssd"), (Home.RAM, "ram")):
                self.held[where, block, index] = self.parts(block, index, home, 0)

    def require(self, holds: bool, *reason: object) -> None:
        """Rejects the op unless the rule holds; the reason is words and values, put together only when needed."""
        if not holds:
            words = " ".join(map(show, reason)).replace(" ,", ",")
            raise VerifyError(f"{self.op} {words} (listing {self.number}, {self.listing.kind})")

    def next(self, resources: list[Resource], *names: str) -> Resource:
        """The next thing that the op reads or writes: its kind says what comes in which order."""
        found = resources.pop(0) if resources else ("nothing",)
        self.require(found[0] in names, "has", found, "in the place of", " or ".join(names))
        return found

    def find(self, wanted: object, *names: str) -> Resource:
        """The next thing that the op reads, which must hold what is wanted."""
        slot = self.next(self.reads, *names)
        self.holds(slot, wanted)
        return slot

    def holds(self, slot: Resource, wanted: object) -> None:
        held = self.held.get(slot)
        self.require(held == wanted, "finds", held, "in", slot, ", needs", wanted)

    def own(self, resources: list[Resource], *names: str) -> Resource:
        """The next thing that the op reads or writes, which must belong to its chunk."""
        found = self.next(resources, *names)
        self.require(found[1:] == (self.op.block, self.op.index), "touches", found, ", which is not its own")
        return found

    def part(self, slot: Resource, part: type[Weight] | type[State]) -> object:
        """The weight or the state of a chunk in its home."""
        held = self.held[slot]
        assert isinstance(held, frozenset)
        for value in held:
            if isinstance(value, part):
                return value
        self.require(False, "finds", held, "in", slot, ", needs a", part.__name__.lower())
        return None

    def fill(self, value: object, *names: str) -> Resource:
        """The next thing that the op writes holds this value from now on."""
        slot = self.next(self.writes, *names)
        self.held[slot] = value
        return slot

    @property
    def chunk(self) -> Chunk:
        return self.plan.blocks[self.op.block].chunks[self.op.index]

    def moves(self, bytes_per_param: int, *, state: bool = False) -> None:
        """So many bytes for each parameter of the chunk; with `state`, its optimizer state besides."""
        wanted = self.chunk.num_params * bytes_per_param
        if state:
            wanted += self.plan.precision.state_bytes(self.chunk.num_params)
        self.require(self.op.nbytes == wanted, "moves", self.op.nbytes, "bytes of", wanted)

    def parts(self, block: int, index: int, where: Home, version: int) -> frozenset[object]:
        """The parts of a chunk that live in one place."""
        home = self.plan.homes[block][index]
        weight = [Weight(block, index, version)] if home.weight is where else []
        state = [State(block, index, version)] if home.state is where else []
        return frozenset([*weight, *state])

    def version(self, block: int, index: int) -> int:
        """Of the weight that training must see in this listing: every step before it, and no other."""
        return self.step if self.plan.blocks[block].chunks[index].trainable else 0

    def complete(self, block: int, step: int) -> frozenset[tuple[int, int]]:
        """The backward ops whose gradients a block's gradient is the sum of."""
        sources = self.plan.users_of_shared if block == self.plan.shared else {block}
        trained = [source for source in sources if source >= self.plan.lowest]
        return frozenset((source, index) for source in trained for index in range(self.micro_batches[step]))
