"""The strokes that a schedule is drawn with: bring a block, run it, finish its gradients. No torch and no addresses."""

from __future__ import annotations

from greedysnake.carrier import Carrier
from greedysnake.ops import Cursor, Kind, Plan, Resource
from greedysnake.placement import Home, is_fetched_once


class Maker(Carrier):
    """Writes down what becomes of blocks: weights, compute, gradients and updates."""

    def __init__(self, plan: Plan, cursor: Cursor, num_micro_batches: int, *, vertical: bool = True) -> None:
        super().__init__(plan, cursor, num_micro_batches, vertical=vertical)
        self.shared_is_fresh = True

    # Weights to the device

    def bring(self, block: int) -> None:
        """Puts a block's weights on the device, as far as they are not there; its pending updates are done on the
        way."""
        chunks, cursor = self.plan.blocks[block].chunks, self.cursor
        if block not in cursor.on_device:
            cursor.on_device[block] = self.take("weights", self.plan.blocks[block].pool)
            cursor.outdated.update((block, index) for index in range(len(chunks)))
            cursor.apart.add(block)
        for index, home in enumerate(self.plan.homes[block]):
            if (block, index) in cursor.pending:
                update = self.late_update(block, index)
                self.upload(block, index, update)
                self.give(update)
            elif (block, index) not in cursor.outdated:
                continue
            elif home.weight is Home.RAM:
                self.upload(block, index)
            else:
                staging = self.take("staging")
                nbytes = chunks[index].num_params * self.plan.precision.weight_bytes
                self.add(Kind.READ_WEIGHTS, block, index, [("ssd", block, index)], [staging], nbytes)
                self.upload(block, index, staging)
                self.give(staging)
        self.gather(block)

    def upload(self, block: int, index: int, source: Resource | None = None) -> None:
        """Brings a chunk's weights to the device, from a slot or from their home in RAM."""
        self.to_device(Kind.UPLOAD, block, index, source)
        self.cursor.outdated.discard((block, index))

    def to_device(self, kind: Kind, block: int, index: int, source: Resource | None, **flags: bool) -> None:
        nbytes = self.plan.blocks[block].chunks[index].num_params * self.plan.precision.weight_bytes
        if self.plan.homes[block][index].weight is Home.RAM:
            source = ("ram", block, index)
        elif source is not None and source[0] == "update":
            source = _part("weight", source)
        assert source is not None
        slot = self.cursor.on_device[block]
        part = [self.part_on_device(block, index)] if self.plan.keeps_weights(block) else []
        self.add(kind, block, index, [source], [slot, *part], nbytes, **flags)

    def part_on_device(self, block: int, index: int) -> Resource:
        """A chunk's place in the slot of a block that stays: who reads it alone need not wait for the others."""
        return ("weights.part", *self.cursor.on_device[block][1:], index)

    def is_on_device(self, block: int, index: int) -> bool:
        """Whether an update can have a chunk's weight from the device, after everything that ran there."""
        return self.plan.keeps_weights(block) and (block, index) not in self.cursor.outdated

    def gather(self, block: int) -> None:
        """The other ranks' parts of a block's weights come to the device, and this rank's goes to theirs."""
        if block not in self.cursor.apart:
            return
        self.cursor.apart.remove(block)
        shape, slot = self.plan.blocks[block], self.cursor.on_device[block]
        nbytes = (shape.num_params - shape.num_own) * self.plan.precision.weight_bytes
        if nbytes:
            self.add(Kind.GATHER, block, 0, [slot], [slot], nbytes)

    def release_weights(self, block: int) -> None:
        """Gives the slot back, unless the block stays in it."""
        if not self.plan.keeps_weights(block):
            self.give(self.cursor.on_device.pop(block))

    def bring_shared(self) -> None:
        if self.plan.shared is not None:
            self.bring(self.plan.shared)
            if self.plan.trains_shared:
                self.shared_gradients = self.take("gradients", "shared")

    def release_shared(self) -> None:
        if self.plan.shared is not None:
            self.release_weights(self.plan.shared)
            if self.plan.trains_shared:
                self.give(self.shared_gradients)

    def prefetch(self) -> None:
        """Starts what the next forward needs first, as far as the device slots reach."""
        self.ahead = True
        blocks = ([] if self.plan.shared is None else [self.plan.shared]) + list(range(self.plan.num_compute))
        for block in blocks:
            if block not in self.cursor.on_device and not self.cursor.free["weights", self.plan.blocks[block].pool]:
                return
            self.bring(block)

    # Compute

    def weights_of(self, block: int) -> list[Resource]:
        weights = [self.cursor.on_device[block]]
        if block in self.plan.users_of_shared:
            assert self.plan.shared is not None
            weights.append(self.cursor.on_device[self.plan.shared])
        return weights

    def forward(self, block: int, index: int, position: int, *, save: bool = True) -> None:
        weights = self.weights_of(block)
        source = self.get(block, index) if block else None
        target = self.output_slot(block + 1, index)
        inputs = [source] if source else []
        graph: list[Resource] = [("graph", block, index)] if save and self.plan.keeps_graph(block) else []
        self.add(Kind.FORWARD, block, index, [weights[0], *inputs, *weights[1:]], [target, *graph])
        if source:
            self.drop(block, index)
        comes_back = save and self.plan.comes_back(block + 1)
        self.settle(block + 1, index, position, target, comes_back=comes_back)

    def evaluate(self, block: int, index: int) -> None:
        weights = self.weights_of(block)
        inputs = [self.get(block, index)] if block else []
        self.add(Kind.EVALUATE, block, index, [weights[0], *inputs, *weights[1:]], [("losses",)])
        if block:
            self.drop(block, index)

    def backward(self, block: int, index: int, position: int, gradients: Resource | None) -> None:
        """Recomputes the forward of a block, then its backward. The last block has no forward of its own. Reads
        (weights, input or kept graph, gradient of the output), writes (gradients, gradient of the input), where they
        exist."""
        weights = self.weights_of(block)
        is_last_block = block == self.plan.num_compute - 1
        reads = [weights[0]]
        writes = [] if gradients is None else [gradients]
        keeps_graph = self.plan.keeps_graph(block)
        if keeps_graph:
            reads.append(("graph", block, index))
        elif block:
            reads.append(self.get(block, index))
        if not is_last_block:
            reads.append(self.get(block + 1, index, gradient=True))
        target = None
        if block > self.plan.lowest:
            target = self.output_slot(block, index)
            writes.append(target)
        if is_last_block:
            writes.append(("losses",))
        adds_to_shared = block in self.plan.users_of_shared and self.plan.trains_shared
        if adds_to_shared:
            writes.append(self.shared_gradients)
        self.add(
            Kind.BACKWARD,
            block,
            index,
            [*reads, *weights[1:]],
            writes,
            first=position == 0,
            last=position == self.num_kept - 1,
            first_shared=adds_to_shared and self.shared_is_fresh,
        )
        self.shared_is_fresh = self.shared_is_fresh and not adds_to_shared
        if block and not keeps_graph:
            self.drop(block, index)
        if not is_last_block:
            self.drop(block + 1, index, gradient=True)
        if target:
            self.settle(block, index, position, target, gradient=True)

    # Gradients and updates

    def gradient_slot(self, block: int) -> Resource | None:
        shape = self.plan.blocks[block]
        return self.take("gradients", self.plan.gradient_pool(block)) if shape.num_trainable else None

    def finish(self, block: int, gradients: Resource | None) -> None:
        """The gradient of a block is complete: updates it now, or keeps the gradient for later."""
        self.reduce(block, gradients)
        for index, chunk in enumerate(self.plan.blocks[block].chunks):
            if chunk.trainable:
                assert gradients is not None
                if self.plan.tentative and self.plan.homes[block][index].tentative:
                    self.tentative_update(block, index, gradients)
                elif self.plan.homes[block][index].late:
                    self.keep_gradient(block, index, gradients)
                else:
                    self.early_update(block, index, gradients)
        if gradients is not None:
            self.give(gradients)
            self.cursor.apart.add(block)
        self.release_weights(block)

    def reduce(self, block: int, gradients: Resource | None) -> None:
        """All ranks' gradients of a block are added up; each gets the sum for its own part."""
        num_ranks, num_trainable = self.plan.num_ranks, self.plan.blocks[block].num_trainable
        if num_ranks > 1 and gradients is not None:
            nbytes = (num_trainable - num_trainable // num_ranks) * self.plan.precision.gradient_bytes
            self.add(Kind.REDUCE, block, 0, [gradients], [gradients], nbytes)

    def finish_shared(self) -> None:
        if self.plan.shared is None:
            return
        if self.plan.trains_shared:
            self.finish(self.plan.shared, self.shared_gradients)
        else:
            self.release_weights(self.plan.shared)

    def accumulate(self, block: int, index: int, gradients: Resource | None, final: bool) -> None:
        """Horizontal: adds a micro-batch's gradient to the sum in RAM; after the last one, updates."""
        self.reduce(block, gradients)
        for chunk_index, chunk in enumerate(self.plan.blocks[block].chunks):
            if not chunk.trainable:
                continue
            assert gradients is not None
            late = self.plan.homes[block][chunk_index].late
            kept: Resource = ("kept", block, chunk_index)
            update = self.take("update")
            if final and not late:
                self.load(block, chunk_index, update, with_weight=is_fetched_once(self.plan.blocks, block))
            weight_to = update if final and not late else None
            self.download(block, chunk_index, gradients, _part("gradient", update), weight_to=weight_to)
            self.add(Kind.ACCUMULATE, block, chunk_index, [_part("gradient", update)], [kept], first=index == 0)
            if final and self.plan.clipping:
                self.add(Kind.SQUARES, block, chunk_index, [kept], [("squares",)])
            if final and late:
                self.cursor.pending.add((block, chunk_index))
            elif final:
                self.update(block, chunk_index, kept, update)
            self.give(update)
        if gradients is not None:
            self.give(gradients)
        self.release_weights(block)

    def keep_gradient(self, block: int, index: int, gradients: Resource) -> None:
        kept: Resource = ("kept", block, index)
        target = kept
        if self.plan.homes[block][index].gradient is Home.SSD:
            target = self.take("spill")
        self.download(block, index, gradients, target)
        if self.plan.clipping:
            self.add(Kind.SQUARES, block, index, [target], [("squares",)])
        if target is not kept:
            nbytes = self.plan.blocks[block].chunks[index].num_params * self.plan.precision.gradient_bytes
            self.add(Kind.SPILL_GRADIENT, block, index, [target], [kept], nbytes)
            self.give(target)
        self.cursor.pending.add((block, index))

    def early_update(self, block: int, index: int, gradients: Resource) -> None:
        update = self.take("update")
        fetched_once = is_fetched_once(self.plan.blocks, block)
        self.load(block, index, update, with_weight=fetched_once)
        self.download(block, index, gradients, _part("gradient", update), weight_to=update)
        self.update(block, index, _part("gradient", update), update)
        self.renew(block, index, update)
        self.give(update)

    def renew(self, block: int, index: int, update: Resource, *, tentative: bool = False) -> None:
        """The new weights of a chunk take the place of those that stay on the device. On a lane of its own: uploads
        that compute waits for soon do not stand behind an update."""
        if self.plan.keeps_weights(block):
            self.to_device(Kind.RENEW, block, index, update, tentative=tentative)

    def tentative_update(self, block: int, index: int, gradients: Resource) -> None:
        """An update before the norm is known. The gradient is kept, in case the step is clipped after all."""
        update = self.take("update")
        kept: Resource = ("kept", block, index)
        is_spilled = self.plan.homes[block][index].gradient is Home.SSD
        gradient = _part("gradient", update) if is_spilled else kept
        self.load(block, index, update, with_weight=is_fetched_once(self.plan.blocks, block))
        self.download(block, index, gradients, gradient, weight_to=update)
        self.add(Kind.SQUARES, block, index, [gradient], [("squares",)])
        if is_spilled:
            nbytes = self.plan.blocks[block].chunks[index].num_params * self.plan.precision.gradient_bytes
            self.add(Kind.SPILL_GRADIENT, block, index, [gradient], [kept], nbytes)
        self.update(block, index, gradient, update, tentative=True)
        self.renew(block, index, update, tentative=True)
        self.give(update)
        self.cursor.tentative.add((block, index))

    def late_update(self, block: int, index: int) -> Resource:
        """Does a pending update; returns its slot, which still holds the new weights."""
        self.cursor.pending.remove((block, index))
        slot = self.cursor.preloaded.pop((block, index), None)
        update: Resource = self.take("update") if slot is None else ("update", slot)
        if slot is None:
            self.load(block, index, update, with_weight=not self.is_on_device(block, index))
        if self.is_on_device(block, index) and self.plan.homes[block][index].weight is Home.SSD:
            nbytes = self.plan.blocks[block].chunks[index].num_params * self.plan.precision.weight_bytes
            self.add(Kind.TAKE, block, index, [self.part_on_device(block, index)], [_part("weight", update)], nbytes)
        gradient: Resource = ("kept", block, index)
        if self.plan.homes[block][index].gradient is Home.SSD:
            nbytes = self.plan.blocks[block].chunks[index].num_params * self.plan.precision.gradient_bytes
            self.add(Kind.RECALL_GRADIENT, block, index, [gradient], [_part("gradient", update)], nbytes)
            gradient = _part("gradient", update)
        self.update(block, index, gradient, update)
        return update

    def preload(self) -> None:
        """With all updates late, the SSD has little to do in the backward: reads ahead what the next forward
        updates first, as far as the update slots reach."""
        if self.plan.has_early_updates or self.plan.tentative:
            return
        free = self.cursor.free["update", ""]
        self.ahead = True
        for block, homes in enumerate(self.plan.homes):
            for index, home in enumerate(homes):
                if len(free) <= 1:
                    break
                with_weight = not self.is_on_device(block, index)
                on_ssd = self.ssd_bytes(block, index, with_weight) > 0
                if home.late and on_ssd and (block, index) not in self.cursor.preloaded:
                    update = self.take("update")
                    self.load(block, index, update, with_weight=with_weight)
                    self.cursor.preloaded[block, index] = int(update[-1])
        self.ahead = False

    def load(self, block: int, index: int, update: Resource, *, with_weight: bool) -> None:
        home = self.plan.homes[block][index]
        nbytes = self.ssd_bytes(block, index, with_weight)
        if nbytes:
            whole = with_weight and home.weight is Home.SSD
            parts = [_part("weight", update)] if whole else []
            if home.state is Home.SSD:
                parts.append(_part("state", update))
            self.add(Kind.LOAD_STATE, block, index, [("ssd", block, index)], parts, nbytes, whole=whole)

    def download(
        self, block: int, index: int, gradients: Resource, target: Resource, *, weight_to: Resource | None = None
    ) -> None:
        """Brings a chunk's gradient to the host; with `weight_to`, an update slot, its weight too if that lives on SSD,
        so that it is not read from there a third time."""
        chunk = self.plan.blocks[block].chunks[index]
        nbytes = chunk.num_params * self.plan.precision.gradient_bytes
        reads = [gradients]
        writes = [target]
        on_ssd = self.plan.homes[block][index].weight is Home.SSD
        from_device = weight_to is not None and on_ssd and not is_fetched_once(self.plan.blocks, block)
        if from_device:
            assert weight_to is not None
            kept = self.plan.keeps_weights(block)
            reads.append(self.part_on_device(block, index) if kept else self.cursor.on_device[block])
            writes.append(_part("weight", weight_to))
            nbytes += chunk.num_params * self.plan.precision.weight_bytes
        self.add(Kind.DOWNLOAD, block, index, reads, writes, nbytes, whole=from_device)

    def update(self, block: int, index: int, gradient: Resource, update: Resource, *, tentative: bool = False) -> None:
        """Reads (gradient, verdict); writes the parts where they live and stores what lives on SSD. A tentative one has
        no verdict to go by, and leaves what lives there as it is: what is new goes beside it."""
        home = self.plan.homes[block][index]
        parts: list[Resource] = []
        if home.weight is Home.SSD:
            parts.append(_part("weight", update))
        if home.state is Home.SSD:
            parts.append(_part("state", update))
        in_ram: list[Resource] = [("ram", block, index)] if len(parts) < 2 else []
        verdict: list[Resource] = [] if tentative else [("verdict",)]
        self.add(Kind.UPDATE, block, index, [gradient, *verdict], [*parts, *in_ram], tentative=tentative)
        if parts:
            nbytes = self.ssd_bytes(block, index, with_weight=True)
            self.add(Kind.WRITE, block, index, parts, [("ssd", block, index)], nbytes, tentative=tentative)

    def ssd_bytes(self, block: int, index: int, with_weight: bool) -> int:
        home, chunk = self.plan.homes[block][index], self.plan.blocks[block].chunks[index]
        nbytes = self.plan.precision.state_bytes(chunk.num_params) if home.state is Home.SSD else 0
        if with_weight and home.weight is Home.SSD:
            nbytes += self.plan.precision.weight_bytes * chunk.num_params
        return nbytes

    # Loss and norm

    def loss(self, *, verdict: bool = True) -> None:
        """Brings the loss to the host. Without clipping it alone decides whether the step counts."""
        last = self.plan.num_compute - 1
        self.add(Kind.LOSS, last, 0, [("losses",)], [("loss",)])
        if verdict and not self.plan.clipping:
            self.add(Kind.VERDICT, last, 0, [("loss",)], [("verdict",)])

    def norm(self) -> None:
        if self.plan.clipping:
            self.add(Kind.VERDICT, self.plan.lowest, 0, [("loss",), ("squares",)], [("verdict",)])


def _part(name: str, update: Resource) -> Resource:
    """An update slot has three parts, which different lanes fill: gradient, weight and state."""
    return (f"update.{name}", *update[1:])
