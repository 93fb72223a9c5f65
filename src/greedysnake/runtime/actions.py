"""What each op does: one method per kind. Runs on the lanes' threads; returns the bytes moved, or a Wait.

Here are the ops that move something, between SSD, RAM and device. What the device computes is in compute.py, what the
CPU does with gradients in updates.py. Ordering is the schedule's business: when a method runs, everything it reads is
there and nobody else touches what it writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from greedysnake.ops import Kind, Op, Resource
from greedysnake.placement import Home
from greedysnake.runtime.buffers import Buffers
from greedysnake.runtime.compute import Compute
from greedysnake.runtime.context import StepContext
from greedysnake.runtime.lanes import Wait
from greedysnake.runtime.memory import page_aligned, slot_number
from greedysnake.runtime.ranks import Ranks
from greedysnake.runtime.state import STATE, WEIGHT, extent_numbers
from greedysnake.runtime.store import Store, StoreTicket
from greedysnake.runtime.updates import Updates


class Actions:
    """Runs ops on real memory. Holds no threads and decides no order."""

    def __init__(
        self,
        buffers: Buffers,
        store: Store | None,
        compute: Compute,
        updates: Updates,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._buffers = buffers
        self._store = store
        self._ranks = ranks
        self._updates = updates
        self._on_cuda = device.type == "cuda"
        self._extent = extent_numbers(buffers.plan.blocks)
        self._run: dict[Kind, Callable[[Op, StepContext], int | Wait]] = {
            Kind.FORWARD: compute.forward,
            Kind.BACKWARD: compute.backward,
            Kind.EVALUATE: compute.evaluate,
            Kind.READ_WEIGHTS: self.read_weights,
            Kind.UPLOAD: self.upload,
            Kind.RENEW: self.upload,
            Kind.GATHER: self.gather,
            Kind.REDUCE: self.reduce,
            Kind.DOWNLOAD: self.download,
            Kind.TAKE: self.take,
            Kind.LOAD_STATE: self.load_state,
            Kind.UPDATE: updates.update,
            Kind.WRITE: self.write,
            Kind.PARK: self.move,
            Kind.GET: self.move,
            Kind.SPILL: self.spill,
            Kind.RECALL: self.recall,
            Kind.SPILL_GRADIENT: self.spill_gradient,
            Kind.RECALL_GRADIENT: self.recall_gradient,
            Kind.ACCUMULATE: updates.accumulate,
            Kind.SQUARES: updates.squares,
            Kind.LOSS: self.loss,
            Kind.VERDICT: updates.decide,
        }

    def run(self, op: Op, context: StepContext) -> int | Wait:
        return self._run[op.kind](op, context)

    # Tensors between blocks

    def move(self, op: Op, context: StepContext) -> int:
        """P: from a device slot to its home, or to a buffer on the way to SSD. G: the way back."""
        nbytes = self._buffers.tensor_bytes(op.block, op.index, context)
        context.count(op, nbytes)
        target, source = self._buffers.tensor(op.writes[0], context), self._buffers.tensor(op.reads[0], context)
        return self._copy(target, source, nbytes)

    def spill(self, op: Op, context: StepContext) -> Wait:
        assert self._store is not None
        number, nbytes = self._scratch(op, context)
        buffer = self._buffers.tensor(op.reads[0], context)
        return self._storing(self._store.write_scratch(number, buffer.data_ptr(), nbytes))

    def recall(self, op: Op, context: StepContext) -> Wait:
        assert self._store is not None
        number, nbytes = self._scratch(op, context)
        buffer = self._buffers.tensor(op.writes[0], context)
        return self._storing(self._store.read_scratch(number, buffer.data_ptr(), nbytes, urgent=op.urgent))

    def _scratch(self, op: Op, context: StepContext) -> tuple[int, int]:
        _, number = self._buffers.step.home(op.block, op.index, len(context.batches))
        shape, itemsize = context.shapes[op.block, op.index], self._buffers.dtype.itemsize
        nbytes = page_aligned(max(1, shape.numel()) * itemsize)
        context.count(op, nbytes)
        return number, nbytes

    # Weights

    def read_weights(self, op: Op, context: StepContext) -> Wait:
        assert self._store is not None
        address = self._buffers.host.staging[slot_number(op.writes[0])].data_ptr()
        ticket = self._store.read(
            self._extent[op.block, op.index], address, slice(WEIGHT, WEIGHT + 1), urgent=op.urgent
        )
        return self._storing(ticket)

    def upload(self, op: Op, context: StepContext) -> int:
        chunk = self._buffers.chunk(op)
        target = self._buffers.weights(op.writes[0])[chunk.start : chunk.start + chunk.num_params]
        source = self._buffers.weight_source(op.reads[0], op, context)
        return self._copy(target.view(torch.uint8), source, op.nbytes)

    def take(self, op: Op, context: StepContext) -> int:
        return self._weight_to_host(op, op.reads[0], op.writes[0])

    def _weight_to_host(self, op: Op, source: Resource, target: Resource) -> int:
        """From the device to where an update needs it."""
        chunk = self._buffers.chunk(op)
        weight = self._buffers.weights(source)[chunk.start : chunk.start + chunk.num_params]
        nbytes = chunk.num_params * self._buffers.plan.precision.weight_bytes
        return self._copy(self._buffers.update_slot(target, op), weight.view(torch.uint8), nbytes)

    def gather(self, op: Op, context: StepContext) -> int:
        """Of the trainable and of the frozen part of a block every rank holds a range."""
        shape, weights = self._buffers.plan.blocks[op.block], self._buffers.weights(op.writes[0])
        self._ranks.gather(weights[: shape.num_trainable])
        self._ranks.gather(weights[shape.num_trainable : shape.num_params])
        return op.nbytes

    # Gradients

    def reduce(self, op: Op, context: StepContext) -> int:
        plan, device = self._buffers.plan, self._buffers.device
        gradients = self._buffers.gradients(op.writes[0])[: plan.blocks[op.block].num_trainable]
        largest = None
        if not plan.clipping:
            largest = device.largest_of_all[op.block].copy_(device.largest[op.block])
        self._ranks.reduce(gradients, largest)
        return op.nbytes

    def download(self, op: Op, context: StepContext) -> int:
        chunk, plan = self._buffers.chunk(op), self._buffers.plan
        part = slice(chunk.start, chunk.start + chunk.num_params)
        gradient = self._buffers.gradients(op.reads[0])[part]
        nbytes = chunk.num_params * plan.precision.gradient_bytes
        self._copy(self._buffers.chunk_gradient(op.writes[0], op), gradient.view(torch.uint8), nbytes)
        if op.index == 0 and not plan.clipping:
            self._updates.take_largest(op.block)
        if op.whole:
            self._weight_to_host(op, op.reads[1], op.writes[1])
        return op.nbytes

    def spill_gradient(self, op: Op, context: StepContext) -> Wait:
        assert self._store is not None
        number = self._buffers.step.scratch_of_gradient(op.block, op.index)
        buffer = self._buffers.chunk_gradient(op.reads[0], op)
        return self._storing(self._store.write_scratch(number, buffer.data_ptr(), op.nbytes))

    def recall_gradient(self, op: Op, context: StepContext) -> Wait:
        assert self._store is not None
        number = self._buffers.step.scratch_of_gradient(op.block, op.index)
        buffer = self._buffers.chunk_gradient(op.writes[0], op)
        return self._storing(self._store.read_scratch(number, buffer.data_ptr(), op.nbytes))

    def loss(self, op: Op, context: StepContext) -> int:
        return self._updates.take_loss()

    # State

    def load_state(self, op: Op, context: StepContext) -> Wait:
        """What an update needs from SSD; with `whole` the weight too."""
        assert self._store is not None
        home = self._buffers.plan.homes[op.block][op.index]
        first = WEIGHT if op.whole else STATE
        last = STATE if home.state is Home.SSD else WEIGHT
        address = self._address(op, self._buffers.update_slot(op.writes[0], op), first)
        ticket = self._store.read(self._extent[op.block, op.index], address, slice(first, last + 1))
        return self._storing(ticket, partial(context.spared.count, op))

    def write(self, op: Op, context: StepContext) -> Wait:
        assert self._store is not None
        home = self._buffers.plan.homes[op.block][op.index]
        first = WEIGHT if home.weight is Home.SSD else STATE
        last = STATE if home.state is Home.SSD else WEIGHT
        address = self._address(op, self._buffers.update_slot(op.reads[0], op), first)
        extent, run = self._extent[op.block, op.index], slice(first, last + 1)
        ticket = self._store.write(extent, address, run, attempt=context.attempt if op.tentative else None)
        return self._storing(ticket, partial(context.spared.count, op))

    def _address(self, op: Op, slot: torch.Tensor, part: int) -> int:
        """Where a part of a chunk begins in its update slot."""
        weight_bytes = self._buffers.chunk(op).num_params * self._buffers.plan.precision.weight_bytes
        return slot.data_ptr() + (weight_bytes if part == STATE else 0)

    # Both ways of moving

    def _storing(self, ticket: StoreTicket, count: Callable[[int], None] | None = None) -> Wait:
        """`count` is told how many bytes it was."""
        store = self._store
        assert store is not None

        def wait() -> int:
            store.wait(ticket)
            if count is not None:
                count(ticket.nbytes)
            return ticket.nbytes

        return wait

    def _copy(self, target: torch.Tensor, source: torch.Tensor, nbytes: int) -> int:
        """Copies bytes between host and device on the current stream; between two host buffers at once."""
        if self._on_cuda:
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)
        else:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
        return nbytes
