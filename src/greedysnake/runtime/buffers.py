"""Which memory an op means: from the names in the schedule to tensors. Moves nothing and owns nothing."""

from __future__ import annotations

import torch

from greedysnake.ops import Op, Plan, Resource
from greedysnake.runtime.context import StepContext
from greedysnake.runtime.memory import DeviceMemory, HostMemory, StepMemory, slot_number
from greedysnake.shapes import Chunk


class Buffers:
    """All memory of an engine, by the names that ops read and write."""

    def __init__(self, plan: Plan, device: DeviceMemory, host: HostMemory, dtype: torch.dtype) -> None:
        self.plan = plan
        self.device = device
        self.host = host
        self.dtype = dtype
        """Of weights and of tensors between blocks, on the device."""
        self._step: StepMemory | None = None

    def use(self, plan: Plan, step: StepMemory) -> None:
        """Takes over what changes with the number and size of micro-batches. Nothing may be under way."""
        self.plan = plan
        self._step = step

    def drop_step(self) -> None:
        """Lets go of it: the memory that takes its place must not come on top of it. Nothing may be under way."""
        self._step = None

    @property
    def step(self) -> StepMemory:
        assert self._step is not None
        return self._step

    def chunk(self, op: Op) -> Chunk:
        return self.plan.blocks[op.block].chunks[op.index]

    # On the device, for a whole block

    def weights(self, resource: Resource) -> torch.Tensor:
        """The slot, also of a part of one."""
        return self.device.weights[str(resource[1]), int(resource[2])]

    def gradients(self, resource: Resource) -> torch.Tensor:
        return self.device.gradients[str(resource[1]), slot_number(resource)]

    # On the host, for a chunk, as bytes

    def weight_source(self, resource: Resource, op: Op, context: StepContext) -> torch.Tensor:
        """What a chunk's weights are uploaded from."""
        if resource[0] == "ram":
            key = op.block, op.index
            return context.tentative[key][1] if op.tentative else self.host.weights[key]
        if resource[0] == "staging":
            return self.host.staging[slot_number(resource)]
        return self.update_slot(resource, op)

    def update_slot(self, resource: Resource, op: Op) -> torch.Tensor:
        """Weight and state of a chunk, as they are stored."""
        return self.host.update_slot(slot_number(resource), self.chunk(op).num_params)

    def chunk_gradient(self, resource: Resource, op: Op) -> torch.Tensor:
        if resource[0] == "kept":
            return self.step.kept[op.block, op.index]
        if resource[0] == "spill":
            return self.step.spills[slot_number(resource)]
        return self.host.updates[slot_number(resource)][self.host.gradient_offset :]

    # Tensors between blocks

    def tensor(self, resource: Resource, context: StepContext) -> torch.Tensor:
        """The bytes of a tensor's slot or home."""
        if resource[0] == "between":
            return self.step.between[slot_number(resource)]
        if resource[0] == "transfer":
            return self.step.transfers[slot_number(resource)]
        _, block, index = resource
        return self.step.tensor_home(int(block), int(index), len(context.batches))

    def tensor_bytes(self, block: int, index: int, context: StepContext) -> int:
        return context.shapes[block, index].numel() * self.dtype.itemsize

    def view(self, resource: Resource, block: int, index: int, context: StepContext) -> torch.Tensor:
        """The input of a block for a micro-batch, or its gradient, in its shape."""
        nbytes = self.tensor_bytes(block, index, context)
        return self.tensor(resource, context)[:nbytes].view(self.dtype).view(context.shapes[block, index])
