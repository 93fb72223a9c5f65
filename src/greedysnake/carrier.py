"""Writes ops down, takes slots for them, and carries tensors between blocks. No torch and no addresses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from greedysnake.errors import PlanError
from greedysnake.ops import Cursor, Kind, Op, Plan, Resource
from greedysnake.placement import Home


class Carrier:
    """Ops in program order. A slot is given back as soon as its last user is written down: who takes it next depends
    on that user."""

    def __init__(self, plan: Plan, cursor: Cursor, num_micro_batches: int, *, vertical: bool = True) -> None:
        self.plan = plan
        self.cursor = cursor
        self.num_micro_batches = num_micro_batches
        self.vertical = vertical
        self.ops: list[Op] = []
        # Horizontally a micro-batch is done with its activations before the next one starts: one set is enough.
        self.num_kept = num_micro_batches if vertical else 1
        self.homes = plan.activation_homes(self.num_kept)
        self.between = deque(range(plan.num_between(self.num_kept)))
        self.num_stay = plan.num_stay(self.num_kept)
        self.where: dict[Resource, Resource] = {}
        """Tensors that are in a device slot at this point of the list."""
        self.ahead = False

    # Slots

    def take(self, kind: str, pool: str = "") -> Resource:
        free = self.cursor.free[kind, pool]
        if not free:
            raise PlanError(f"the schedule ran out of {pool} {kind} slots".replace("  ", " "))
        return (kind, pool, free.popleft()) if pool else (kind, free.popleft())

    def give(self, slot: Resource) -> None:
        kind, *middle, number = slot
        assert isinstance(number, int)
        self.cursor.free[str(kind), str(middle[0]) if middle else ""].append(number)

    def add(
        self,
        kind: Kind,
        block: int,
        index: int,
        reads: Sequence[Resource],
        writes: Sequence[Resource],
        nbytes: int = 0,
        **flags: bool,
    ) -> None:
        self.ops.append(Op(kind, block, index, tuple(reads), tuple(writes), nbytes, ahead=self.ahead, **flags))

    # Tensors. A gradient takes the home of the activation it replaces, which is dead by then.

    def tensor(self, block: int, index: int) -> Resource:
        return ("activation", block, index if self.vertical else 0)

    def gradient_of(self, block: int, index: int) -> Resource:
        return ("gradient", block, index if self.vertical else 0)

    def home_of(self, block: int, index: int) -> Home:
        return self.homes[block, index if self.vertical else 0]

    def output_slot(self, block: int, index: int) -> Resource:
        if self.home_of(block, index) is Home.DEVICE:
            return self.tensor(block, index)
        return self.take_between()

    def take_between(self) -> Resource:
        if not self.between:
            raise PlanError("the schedule ran out of device slots for tensors between blocks")
        return ("between", self.between.popleft())

    def get(self, block: int, index: int, *, gradient: bool = False) -> Resource:
        """Where on the device the input of a block is (or its gradient); fetched from its home if need be."""
        home = self.home_of(block, index)
        name = self.gradient_of(block, index) if gradient else self.tensor(block, index)
        stored = self.tensor(block, index)
        if home is Home.DEVICE:
            return stored
        if name in self.where:
            return self.where[name]
        source = stored
        if home is Home.SSD:
            source = self.take("transfer")
            self.add(Kind.RECALL, block, index, [stored], [source])
        slot = self.take_between()
        self.add(Kind.GET, block, index, [source], [slot])
        if home is Home.SSD:
            self.give(source)
        self.where[name] = slot
        return slot

    def drop(self, block: int, index: int, *, gradient: bool = False) -> None:
        name = self.gradient_of(block, index) if gradient else self.tensor(block, index)
        slot = self.where.pop(name, None)
        if slot is not None:
            self.between.append(int(slot[-1]))

    def settle(
        self,
        block: int,
        index: int,
        position: int,
        slot: Resource,
        *,
        gradient: bool = False,
        comes_back: bool = False,
    ) -> None:
        """Keeps a fresh tensor on the device if the next block takes it soon; sends it to its home if not, or if it
        comes back after that."""
        home = self.home_of(block, index)
        if home is Home.DEVICE:
            return
        stays = position >= self.num_kept - self.num_stay
        if not stays or comes_back:
            self.park(block, index, slot, home)
        name = self.gradient_of(block, index) if gradient else self.tensor(block, index)
        if stays:
            self.where[name] = slot
        else:
            self.between.append(int(slot[-1]))

    def park(self, block: int, index: int, slot: Resource, home: Home) -> None:
        stored = self.tensor(block, index)
        if home is Home.RAM:
            self.add(Kind.PARK, block, index, [slot], [stored])
            return
        transfer = self.take("transfer")
        self.add(Kind.PARK, block, index, [slot], [transfer])
        self.add(Kind.SPILL, block, index, [transfer], [stored])
        self.give(transfer)
