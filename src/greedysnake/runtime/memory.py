"""Every buffer the engine has: device slots, host slots and homes in RAM. Sizes follow from the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from greedysnake.ops import Plan, Resource
from greedysnake.placement import Home
from greedysnake.runtime.arena import Arena

PAGE = 4096


class DeviceMemory:
    """Slots for weights and gradients, taken by the blocks of a pool in turn."""

    def __init__(self, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
        num_kept = sum(block.pool == "kept" for block in plan.blocks)
        slots = {
            "layers": (plan.slots.weights, plan.slots.gradients),
            "ends": (1, 1),
            "shared": (1, 1),
            "kept": (num_kept, 0),
        }
        self.weights: dict[tuple[str, int], torch.Tensor] = {}
        self.gradients: dict[tuple[str, int], torch.Tensor] = {}
        self.largest = torch.zeros(len(plan.blocks), dtype=torch.float32, device=device)
        """Of each block, the largest absolute value of its gradient, or in a horizontal step the sum of those of its
        micro-batches: not finite when any of it is not."""
        for pool, (num_weights, num_gradients) in slots.items():
            members = [block for block in plan.blocks if block.pool == pool]
            num_params = max((block.num_params for block in members), default=0)
            num_trainable = max(
                (block.num_trainable for number, block in enumerate(plan.blocks) if plan.gradient_pool(number) == pool),
                default=0,
            )
            for slot in range(num_weights):  # of no size where the blocks own no parameter: they still run
                self.weights[pool, slot] = torch.zeros(num_params, dtype=dtype, device=device)
            for slot in range(num_gradients if num_trainable else 0):
                self.gradients[pool, slot] = torch.zeros(num_trainable, dtype=torch.float32, device=device)
        self.losses = torch.zeros((), dtype=torch.float64, device=device)
        self.largest_of_all = torch.zeros_like(self.largest) if plan.num_ranks > 1 else self.largest
        """The sum of all ranks'."""


class HostMemory:
    """What a step's chunks pass through, and the homes of chunks that live in RAM. All from the arena."""

    def __init__(self, arena: Arena, plan: Plan) -> None:
        precision, blocks, homes = plan.precision, plan.blocks, plan.homes
        num_staging, num_updates = plan.slots.staging, plan.slots.updates
        largest = max(chunk.num_params for block in blocks for chunk in block.chunks)
        self._boundary = largest * precision.weight_bytes
        self._weight_bytes = precision.weight_bytes
        self.gradient_offset = precision.chunk_bytes(largest)
        slot_bytes = precision.update_bytes(largest)
        staging = arena.allocate(num_staging * largest * precision.weight_bytes, "staging of weights")
        updates = arena.allocate(num_updates * slot_bytes, "update slots")
        self.staging: list[torch.Tensor] = list(staging.split(largest * precision.weight_bytes))
        self.updates: list[torch.Tensor] = list(updates.split(slot_bytes))
        self.weights: dict[tuple[int, int], torch.Tensor] = {}
        self.state: dict[tuple[int, int], torch.Tensor] = {}
        weight_bytes: dict[tuple[int, int], int] = {}
        state_bytes: dict[tuple[int, int], int] = {}
        for number, (block, block_homes) in enumerate(zip(blocks, homes, strict=True)):
            for index, (chunk, home) in enumerate(zip(block.chunks, block_homes, strict=True)):
                if home.weight is Home.RAM:
                    weight_bytes[number, index] = chunk.num_params * precision.weight_bytes
                size = precision.state_bytes(chunk.num_params, trainable=chunk.trainable)
                if home.state is Home.RAM and size:
                    state_bytes[number, index] = size
        self.weights = _carve(arena, weight_bytes, "weights that live in RAM")
        tentative = {key: size for key, size in weight_bytes.items() if homes[key[0]][key[1]].tentative}
        self.tentative = _carve(arena, tentative, "weights of tentative updates")
        """New weights beside those that live in RAM, until it is known which of them count."""
        self.state = _carve(arena, state_bytes, "optimizer state that lives in RAM")

    def tentative_weights(self) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
        """Where weights are now, and where those after a tentative update go."""
        return {key: (self.weights[key], tensor) for key, tensor in self.tentative.items()}

    def confirm(self) -> None:
        """The weights of tentative updates count, and those before them do not any more."""
        for key, tensor in self.tentative.items():
            self.weights[key], self.tentative[key] = tensor, self.weights[key]

    def update_slot(self, slot: int, num_params: int) -> torch.Tensor:
        """Where a chunk lies in an update slot: weight and state together, as they are stored, meeting at the same
        byte for every size of chunk. So the weight of one chunk never reaches into the state of another, which
        other lanes may still be busy with."""
        return self.updates[slot][self._boundary - num_params * self._weight_bytes :]


class StepMemory:
    """What depends on the number and size of micro-batches: tensors between blocks, gradients kept for later."""

    def __init__(
        self,
        arena: Arena,
        plan: Plan,
        device: torch.device,
        *,
        num_micro_batches: int,
        activation_bytes: int,
        kept: Sequence[tuple[int, int]],
        vertical: bool,
    ) -> None:
        """`kept` names the chunks whose gradient waits in RAM."""
        self._arena = arena
        self._plan = plan
        self._vertical = vertical
        self.num_micro_batches = num_micro_batches
        self.activation_bytes = activation_bytes
        size = page_aligned(activation_bytes)
        counts = plan.count_homes(num_micro_batches if vertical else 1)
        self.between = _device_buffers(plan.num_between(num_micro_batches if vertical else 1), size, device)
        self._on_device = _device_buffers(counts[Home.DEVICE], size, device)
        self._allocated: list[torch.Tensor] = []
        try:
            self._allocate(counts, size, kept)
        except BaseException:
            self.release()
            raise
        self._ordinals: dict[int, dict[tuple[int, int], tuple[Home, int]]] = {}

    def _allocate(self, counts: Mapping[Home, int], size: int, kept: Sequence[tuple[int, int]]) -> None:
        arena, plan, precision = self._arena, self._plan, self._plan.precision
        self._in_ram: Sequence[torch.Tensor] = ()
        if counts[Home.RAM]:
            self._allocated.append(arena.allocate(counts[Home.RAM] * size, "activations"))
            self._in_ram = self._allocated[0].split(size)
        self.num_on_ssd = counts[Home.SSD]
        self.transfers: Sequence[torch.Tensor] = ()
        if self.num_on_ssd:
            transfers = arena.allocate(plan.slots.transfers * size, "transfer of activations")
            self._allocated.append(transfers)
            self.transfers = transfers.split(size)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}
        sizes = {key: self._chunk_params(key) * precision.gradient_bytes for key in kept}
        if sizes:
            self.kept = _carve(arena, sizes, "gradients kept for late updates")
            self._allocated.append(next(iter(self.kept.values())))
        self.spilled = [key for key in _late_chunks(plan) if key not in sizes]
        self.spills: Sequence[torch.Tensor] = ()
        if self.spilled:
            spill_bytes = max(self._chunk_params(key) for key in self.spilled) * precision.gradient_bytes
            spills = arena.allocate(plan.slots.transfers * spill_bytes, "transfer of gradients")
            self._allocated.append(spills)
            self.spills = spills.split(spill_bytes)
        self._scratch_of = {key: self.num_on_ssd + number for number, key in enumerate(self.spilled)}

    def fits(self, num_micro_batches: int, activation_bytes: int) -> bool:
        return num_micro_batches <= self.num_micro_batches and activation_bytes <= self.activation_bytes

    def home(self, block: int, index: int, num_micro_batches: int) -> tuple[Home, int]:
        """Home of a tensor and its number among those with the same home, for a step of so many micro-batches."""
        if not self._vertical:
            num_micro_batches, index = 1, 0
        if num_micro_batches not in self._ordinals:
            count = dict.fromkeys(Home, 0)
            ordinals = {}
            for place, home in self._plan.activation_homes(num_micro_batches).items():
                ordinals[place] = (home, count[home])
                count[home] += 1
            self._ordinals[num_micro_batches] = ordinals
        return self._ordinals[num_micro_batches][block, index]

    def tensor_home(self, block: int, index: int, num_micro_batches: int) -> torch.Tensor:
        """The buffer of a tensor that lives on the device or in RAM."""
        home, number = self.home(block, index, num_micro_batches)
        return self._on_device[number] if home is Home.DEVICE else self._in_ram[number]

    def scratch_of_gradient(self, block: int, index: int) -> int:
        """Scratch range of a spilled gradient."""
        return self._scratch_of[block, index]

    def scratch_sizes(self) -> list[int]:
        """Ranges of the scratch file: first the activations that live on SSD, then the spilled gradients."""
        gradients = [self._chunk_params(key) * self._plan.precision.gradient_bytes for key in self.spilled]
        return [page_aligned(self.activation_bytes)] * self.num_on_ssd + gradients

    def release(self) -> None:
        for tensor in self._allocated:
            self._arena.free(tensor)
        self._allocated.clear()

    def _chunk_params(self, key: tuple[int, int]) -> int:
        return self._plan.blocks[key[0]].chunks[key[1]].num_params


def page_aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def slot_number(resource: Resource) -> int:
    number = resource[-1]
    assert isinstance(number, int)
    return number


def _late_chunks(plan: Plan) -> list[tuple[int, int]]:
    return [(block, index) for block, homes in enumerate(plan.homes) for index, home in enumerate(homes) if home.late]


def _carve(arena: Arena, sizes: dict[tuple[int, int], int], name: str) -> dict[tuple[int, int], torch.Tensor]:
    """One allocation cut into a tensor for each key; sizes are multiples of a page."""
    if not sizes:
        return {}
    whole = arena.allocate(sum(sizes.values()), name)
    return dict(zip(sizes, whole.split(list(sizes.values())), strict=True))


def _device_buffers(count: int, nbytes: int, device: torch.device) -> Sequence[torch.Tensor]:
    """One allocation, cut into tensors that each have a storage of their own. As views they would share the version
    counter that autograd checks, so that a write to one slot looked like a write to another; and code compiled for
    several lengths has variants for tensors that begin where their storage does and for those that do not."""
    if not count:
        return ()
    storage = torch.zeros(count * nbytes, dtype=torch.uint8, device=device).untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return [torch.empty_like(empty).set_(storage[start : start + nbytes]) for start in range(0, count * nbytes, nbytes)]
