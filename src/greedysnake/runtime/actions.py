"""What each op does: one method per kind. Runs on the lanes' threads; returns the bytes moved, or a Wait.

Ordering is the schedule's business: when a method runs, everything it reads is there and nobody else touches what
it writes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from greedysnake import _native
from greedysnake.errors import ConfigError
from greedysnake.ops import Kind, Op, Plan, Resource
from greedysnake.placement import Home
from greedysnake.runtime.flat import FlatBlock
from greedysnake.runtime.lanes import Wait
from greedysnake.runtime.memory import DeviceMemory, HostMemory, StepMemory, page_aligned, slot_number
from greedysnake.runtime.optimizer import AdamW, Fp32Chunk, Gradient, SplitChunk, update_fp32, update_split
from greedysnake.runtime.recompute import Recompute
from greedysnake.runtime.state import STATE, WEIGHT, extent_numbers
from greedysnake.runtime.store import Store, StoreTicket
from greedysnake.shapes import GRANULE, Chunk

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""What a block returns: the hidden state or the loss, and for some layers a second tensor that the loss depends on."""


@dataclass
class StepContext:
    """One call of step() or evaluate(): what its ops need to know."""

    step: int
    batches: Sequence[Mapping[str, torch.Tensor]]
    num_targets: int
    lr: float
    training: bool = True
    loss_started: bool = False
    shapes: dict[tuple[int, int], torch.Size] = field(default_factory=dict)
    """Shape of the input of each block, by block and micro-batch."""
    graphs: dict[tuple[int, int], tuple[Outputs, torch.Tensor]] = field(default_factory=dict)
    """Outputs and input of the layers whose graph is kept, by block and micro-batch."""
    grad_norm: float | None = None
    skipped: bool = False
    nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes of tensors between blocks, by lane, each on its own thread; the ops know the rest."""

    def count(self, op: Op, nbytes: int) -> None:
        lane = op.lane.value
        self.nbytes[lane] = self.nbytes.get(lane, 0) + nbytes


@dataclass(frozen=True)
class Verdict:
    """What the updates of a step go by."""

    optimizer: AdamW
    num_updates: int
    scale: float
    skip: bool


def block_seed(seed: int, step: int, block: int, micro_batch: int) -> int:
    """What the random numbers of one block for one micro-batch of one step start from."""
    return (((step * 1_000_003 + block) * 1_000_003 + micro_batch) * 1_000_003 + seed) & 0x7FFF_FFFF_FFFF_FFFF


class Actions:
    """Runs ops on real memory. Holds no threads and decides no order."""

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[FlatBlock],
        device_memory: DeviceMemory,
        host: HostMemory,
        store: Store | None,
        pool: _native.ThreadPool,
        optimizer: AdamW,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_grad_norm: float | None,
        seed: int,
        vertical: bool,
        compile: bool,
    ) -> None:
        self.plan = plan
        self.blocks = blocks
        self.device_memory = device_memory
        self.host = host
        self.store = store
        self.pool = pool
        self.optimizer = optimizer
        self.device = device
        self.dtype = dtype
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        self.vertical = vertical
        self.step_memory: StepMemory | None = None
        self.verdict: Verdict | None = None
        self.num_updates = 0
        modules = [block.module for block in blocks if block.module is not None]
        last = len(modules) - 1
        # Layers of one structure share their compiled code; embedding and head run once per step and micro-batch.
        self._forward = [
            torch.compile(module) if compile and 0 < number < last else module for number, module in enumerate(modules)
        ]
        self._recompute = {
            number: torch.compile(Recompute(module))
            for number, module in enumerate(modules)
            if compile and 0 < number < last
        }
        self._bound: dict[int, int] = {}
        self._extent = extent_numbers(plan.blocks)
        self._squares = [np.zeros(block.num_trainable // GRANULE) for block in plan.blocks]
        pinned = device.type == "cuda"
        self._loss = torch.zeros((), dtype=torch.float64, device="cpu", pin_memory=pinned)
        self._largest = torch.zeros(len(plan.blocks), dtype=torch.float32, device="cpu", pin_memory=pinned)
        """Of each block, the largest absolute gradient of its last backward."""
        self._run: dict[Kind, Callable[[Op, StepContext], int | Wait]] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.EVALUATE: self.evaluate,
            Kind.READ_WEIGHTS: self.read_weights,
            Kind.UPLOAD: self.upload,
            Kind.DOWNLOAD: self.download,
            Kind.LOAD_STATE: self.load_state,
            Kind.UPDATE: self.update,
            Kind.WRITE: self.write,
            Kind.PARK: self.park,
            Kind.GET: self.get,
            Kind.SPILL: self.spill,
            Kind.RECALL: self.recall,
            Kind.SPILL_GRADIENT: self.spill_gradient,
            Kind.RECALL_GRADIENT: self.recall_gradient,
            Kind.ACCUMULATE: self.accumulate,
            Kind.SQUARES: self.squares,
            Kind.LOSS: self.loss,
            Kind.VERDICT: self.decide,
        }

    def run(self, op: Op, context: StepContext) -> int | Wait:
        return self._run[op.kind](op, context)

    def use(self, plan: Plan, step_memory: StepMemory) -> None:
        """Takes over what changes with the number and size of micro-batches. Nothing may be under way."""
        self.plan = plan
        self.step_memory = step_memory

    def set_training(self, training: bool) -> None:
        for block in self.blocks:
            if block.module is not None and block.module.training != training:
                block.module.train(training)

    def loss_sum(self) -> float:
        """The summed loss that the last L op brought to the host."""
        return float(self._loss.item())

    def size_of_activation(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Bytes of the embedding's output for a batch, found by running it on whatever is in its slot."""
        self._bind(0, [("weights", self.plan.blocks[0].pool, 0)])
        module = self.blocks[0].module
        assert module is not None
        with torch.no_grad():
            hidden = module(batch)
        if not isinstance(hidden, torch.Tensor):
            raise ConfigError(f"embed returned a {type(hidden).__name__}: a block must return one tensor")
        return int(hidden.nbytes)

    # Compute

    def forward(self, op: Op, context: StepContext) -> int:
        self._bind(op.block, op.reads)
        source = self._input(op, context) if op.block else None
        if self.plan.keeps_graph(op.block) and context.training:
            assert source is not None
            # A copy: the slot is used again before the backward.
            source = source.clone().requires_grad_(op.block > self.plan.lowest)
            with torch.enable_grad():
                hidden, side = self._call(op, context, source)
            context.graphs[op.block, op.index] = ((hidden, side), source)
        else:
            with torch.no_grad():
                hidden, side = self._call(op, context, source)
        if side is not None:
            self.blocks[op.block].module.keep_side(context.batches[op.index], side.detach())  # type: ignore[union-attr,operator]
        self._output(op.writes[0], op.block + 1, op.index, context, hidden.detach())
        return 0

    def evaluate(self, op: Op, context: StepContext) -> int:
        self._bind(op.block, op.reads)
        with torch.no_grad():
            loss, _ = self._call(op, context, self._input(op, context) if op.block else None)
        self._add_loss(loss, context)
        return 0

    def backward(self, op: Op, context: StepContext) -> int:
        block = self.blocks[op.block]
        self._bind(op.block, op.reads)
        names = [name for name, parameter in block.parameters.items() if parameter.requires_grad]
        inputs = [block.parameters[name] for name in names]
        outputs, hidden = context.graphs.pop((op.block, op.index), (None, None))
        if hidden is None and op.block:
            hidden = self._input(op, context).requires_grad_(op.block > self.plan.lowest)
        if op.block > self.plan.lowest:
            assert hidden is not None
            inputs.append(hidden)  # type: ignore[arg-type]
        roots, seeds = self._roots(op, context, outputs, hidden)
        if not roots[0].requires_grad:
            raise ConfigError(f"{block.name} returned a tensor without a gradient: check the module")
        gradients = list(torch.autograd.grad(roots, inputs, seeds, allow_unused=True))
        if op.block > self.plan.lowest:
            below = gradients.pop()
            if below is None:
                raise ConfigError(f"{block.name} does not pass a gradient to its input: check the module")
            position = 1 if block.shape.num_trainable else 0
            self._view(op.writes[position], op.block, op.index, context).copy_(below)
        self._accumulate(op, block, dict(zip(names, gradients, strict=True)))
        return 0

    def _roots(
        self, op: Op, context: StepContext, outputs: Outputs | None, hidden: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Where the backward of a block starts, and the gradients of the loss there. Runs the block unless its
        outputs were kept."""
        is_last = op.block == self.plan.num_compute - 1
        seed = None if is_last else self._view(op.reads[2 if op.block else 1], op.block + 1, op.index, context)
        with torch.enable_grad():
            if outputs is None and op.block in self._recompute:
                assert hidden is not None
                extra = self._extra_inputs(op, context)
                self._seed(op, context)
                outputs, seed = self._pair(op, self._recompute[op.block](hidden, seed, *extra)), None
            elif outputs is None:
                outputs = self._call(op, context, hidden)
        output, side = outputs
        if is_last:
            self._add_loss(output, context)
            seed = torch.full_like(output, 1.0 / context.num_targets)
        if side is None or not side.requires_grad:
            return [output], [seed]
        of_side = self.blocks[op.block].module.side_gradient(context.batches[op.index])  # type: ignore[union-attr,operator]
        return [output, side], [seed, of_side / context.num_targets]

    def _call(self, op: Op, context: StepContext, hidden: torch.Tensor | None) -> Outputs:
        batch = context.batches[op.index]
        if op.block == 0:
            arguments: tuple[object, ...] = (batch,)
        elif op.block == self.plan.num_compute - 1:
            arguments = (hidden, batch)
        else:
            arguments = (hidden, *self._extra_inputs(op, context))
        self._seed(op, context)
        version = None if hidden is None else hidden._version
        output = self._forward[op.block](*arguments)
        if hidden is not None and hidden._version != version:
            raise ConfigError(
                f"{self.blocks[op.block].name} changes its input in place, which the backward needs as it was: let it "
                "work on a copy"
            )
        return self._pair(op, output)

    def _extra_inputs(self, op: Op, context: StepContext) -> tuple[object, ...]:
        """What a layer asks for besides the hidden state; before seeding, since it may draw random numbers."""
        ask = getattr(self.blocks[op.block].module, "extra_inputs", None)
        return () if ask is None else ask(context.batches[op.index])

    def _pair(self, op: Op, output: object) -> Outputs:
        block = self.blocks[op.block]
        side = None
        if isinstance(output, tuple) and len(output) == 2 and hasattr(block.module, "side_gradient"):
            output, side = output
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"{block.name} returned a {type(output).__name__}: a block must return one tensor")
        if op.block == self.plan.num_compute - 1:
            if output.dim():
                raise ConfigError(
                    f"head returned a tensor of shape {tuple(output.shape)}: it must return the summed loss"
                )
            output = output.float() if output.dtype != torch.float64 else output
        return output, side

    def _accumulate(self, op: Op, block: FlatBlock, gradients: dict[str, torch.Tensor | None]) -> None:
        """Adds in fp32 to the gradient slots; the first micro-batch of a step sets them."""
        if block.shape.num_trainable:
            pool, slot = str(op.writes[0][1]), slot_number(op.writes[0])
            total = self.device_memory.gradients[pool, slot]
            if op.first:
                for start, end in block.gaps():
                    total[start:end].zero_()
            for place in block.places:
                if place.trainable:
                    view = total[place.offset : place.end].view(place.shape)
                    _add(view, gradients[place.name], fresh=op.first)
            if op.last and not self.plan.clipping:
                largest = torch.linalg.vector_norm(total[: block.shape.num_trainable], math.inf)
                if not self.vertical and op.index:  # here over all micro-batches: the sum in RAM lags behind
                    largest = torch.maximum(largest, self.device_memory.largest[op.block])
                self.device_memory.largest[op.block].copy_(largest)
        if self.plan.trains_shared and block.shared:
            self._accumulate_shared(op, block, gradients)

    def _accumulate_shared(self, op: Op, block: FlatBlock, gradients: dict[str, torch.Tensor | None]) -> None:
        shared = self.blocks[-1]
        total = self.device_memory.gradients["shared", 0][: shared.shape.num_trainable]
        if op.first_shared:
            total.zero_()
        places = {place.name: place for place in shared.places}
        for name, shared_name in block.shared.items():
            place = places[shared_name]
            if place.trainable:
                _add(total[place.offset : place.end].view(place.shape), gradients[name], fresh=False)
        if not self.plan.clipping:
            self.device_memory.largest[self.plan.shared].copy_(torch.linalg.vector_norm(total, math.inf))

    def _add_loss(self, loss: torch.Tensor, context: StepContext) -> None:
        if not context.loss_started:
            self.device_memory.losses.zero_()
            context.loss_started = True
        self.device_memory.losses.add_(loss.detach())

    def _bind(self, block: int, reads: Sequence[Resource]) -> None:
        """Points a block's parameters at the device slot that holds their values."""
        pool, slot = str(reads[0][1]), slot_number(reads[0])
        if self._bound.get(block) != slot:
            self._bound[block] = slot
            self._point(self.blocks[block], self.device_memory.weights[pool, slot])
        if self.plan.shared is not None and self.plan.shared not in self._bound:
            self._bound[self.plan.shared] = 0
            self._point(self.blocks[self.plan.shared], self.device_memory.weights["shared", 0])

    @staticmethod
    def _point(block: FlatBlock, weights: torch.Tensor) -> None:
        for place in block.places:
            block.parameters[place.name].data = weights[place.offset : place.end].view(place.shape)

    def _seed(self, op: Op, context: StepContext) -> None:
        """The same random numbers in forward and recompute, whatever the order of the ops."""
        number = block_seed(self.seed, context.step, op.block, op.index)
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            torch.cuda.default_generators[index].manual_seed(number)

    # Tensors between blocks

    def _input(self, op: Op, context: StepContext) -> torch.Tensor:
        return self._view(op.reads[1], op.block, op.index, context).detach()

    def _view(self, resource: Resource, block: int, index: int, context: StepContext) -> torch.Tensor:
        shape = context.shapes[block, index]
        nbytes = shape.numel() * self.dtype.itemsize
        return self._buffer(resource, context)[:nbytes].view(self.dtype).view(shape)

    def _buffer(self, resource: Resource, context: StepContext) -> torch.Tensor:
        assert self.step_memory is not None
        if resource[0] == "between":
            return self.step_memory.between[slot_number(resource)]
        if resource[0] == "transfer":
            return self.step_memory.transfers[slot_number(resource)]
        _, block, index = resource
        return self.step_memory.tensor_home(int(block), int(index), len(context.batches))

    def _output(self, target: Resource, block: int, index: int, context: StepContext, hidden: torch.Tensor) -> None:
        assert self.step_memory is not None
        name = self.blocks[block - 1].name
        if hidden.dtype != self.dtype:
            raise ConfigError(f"{name} returned {hidden.dtype}, the engine computes in {self.dtype}: cast its output")
        nbytes = hidden.numel() * self.dtype.itemsize
        if nbytes > self.step_memory.activation_bytes:
            raise ConfigError(
                f"{name} returned {nbytes} bytes for one micro-batch, the embedding "
                f"{self.step_memory.activation_bytes}: every block must keep the size of its input"
            )
        context.shapes[block, index] = hidden.shape
        self._view(target, block, index, context).copy_(hidden)

    def park(self, op: Op, context: StepContext) -> int:
        return self._move(op, context)

    def get(self, op: Op, context: StepContext) -> int:
        return self._move(op, context)

    def _move(self, op: Op, context: StepContext) -> int:
        nbytes = context.shapes[op.block, op.index].numel() * self.dtype.itemsize
        context.count(op, nbytes)
        return self._copy(self._buffer(op.writes[0], context), self._buffer(op.reads[0], context), nbytes)

    def spill(self, op: Op, context: StepContext) -> Wait:
        assert self.store is not None
        number, nbytes = self._scratch(op, context)
        buffer = self._buffer(op.reads[0], context)
        return self._storing(self.store.write_scratch(number, buffer.data_ptr(), nbytes), nbytes)

    def recall(self, op: Op, context: StepContext) -> Wait:
        assert self.store is not None
        number, nbytes = self._scratch(op, context)
        buffer = self._buffer(op.writes[0], context)
        return self._storing(self.store.read_scratch(number, buffer.data_ptr(), nbytes, urgent=True), nbytes)

    def _scratch(self, op: Op, context: StepContext) -> tuple[int, int]:
        assert self.step_memory is not None
        _, number = self.step_memory.home(op.block, op.index, len(context.batches))
        nbytes = page_aligned(max(1, context.shapes[op.block, op.index].numel()) * self.dtype.itemsize)
        context.count(op, nbytes)
        return number, nbytes

    # Weights

    def read_weights(self, op: Op, context: StepContext) -> Wait:
        assert self.store is not None
        address = self.host.staging[slot_number(op.writes[0])].data_ptr()
        ticket = self.store.read(self._extent[op.block, op.index], address, slice(WEIGHT, WEIGHT + 1), urgent=True)
        return self._storing(ticket, op.nbytes)

    def upload(self, op: Op, context: StepContext) -> int:
        source, chunk = op.reads[0], self._chunk(op)
        if source[0] == "ram":
            buffer = self.host.weights[op.block, op.index]
        elif source[0] == "staging":
            buffer = self.host.staging[slot_number(source)]
        else:
            buffer = self.host.update_slot(slot_number(source), chunk.num_params)
        pool, slot = str(op.writes[0][1]), slot_number(op.writes[0])
        target = self.device_memory.weights[pool, slot][chunk.start : chunk.start + chunk.num_params]
        return self._copy(target.view(torch.uint8), buffer, op.nbytes)

    # Gradients and updates

    def download(self, op: Op, context: StepContext) -> int:
        chunk = self._chunk(op)
        pool, slot = str(op.reads[0][1]), slot_number(op.reads[0])
        gradient = self.device_memory.gradients[pool, slot][chunk.start : chunk.start + chunk.num_params]
        nbytes = chunk.num_params * self.plan.precision.gradient_bytes
        self._copy(self._gradient_buffer(op.writes[0], op), gradient.view(torch.uint8), nbytes)
        if op.index == 0 and not self.plan.clipping:
            self._largest[op.block].copy_(self.device_memory.largest[op.block], non_blocking=True)
        if op.whole:
            pool, slot = str(op.reads[1][1]), slot_number(op.reads[1])
            weight = self.device_memory.weights[pool, slot][chunk.start : chunk.start + chunk.num_params]
            update = self.host.update_slot(slot_number(op.writes[1]), chunk.num_params)
            self._copy(update, weight.view(torch.uint8), chunk.num_params * self.plan.precision.weight_bytes)
        return op.nbytes

    def _gradient_buffer(self, resource: Resource, op: Op) -> torch.Tensor:
        assert self.step_memory is not None
        if resource[0] == "kept":
            return self.step_memory.kept[op.block, op.index]
        if resource[0] == "spill":
            return self.step_memory.spills[slot_number(resource)]
        return self.host.updates[slot_number(resource)][self.host.gradient_offset :]

    def spill_gradient(self, op: Op, context: StepContext) -> Wait:
        assert self.store is not None
        buffer = self._gradient_buffer(op.reads[0], op)
        return self._storing(self.store.write_scratch(self._spill_number(op), buffer.data_ptr(), op.nbytes), op.nbytes)

    def recall_gradient(self, op: Op, context: StepContext) -> Wait:
        assert self.store is not None
        buffer = self._gradient_buffer(op.writes[0], op)
        return self._storing(self.store.read_scratch(self._spill_number(op), buffer.data_ptr(), op.nbytes), op.nbytes)

    def _spill_number(self, op: Op) -> int:
        assert self.step_memory is not None
        return self.step_memory.scratch_of_gradient(op.block, op.index)

    def accumulate(self, op: Op, context: StepContext) -> int:
        total = self._gradient_buffer(op.writes[0], op)
        part = self._gradient_buffer(op.reads[0], op)
        count = self._chunk(op).num_params
        if op.first:
            ctypes.memmove(total.data_ptr(), part.data_ptr(), count * self.plan.precision.gradient_bytes)
        else:
            _native.add_fp32(self.pool, total.data_ptr(), part.data_ptr(), count)
        return 0

    def squares(self, op: Op, context: StepContext) -> int:
        chunk = self._chunk(op)
        partials = self._squares[op.block][chunk.start // GRANULE :]
        buffer = self._gradient_buffer(op.reads[0], op)
        _native.sum_of_squares(self.pool, buffer.data_ptr(), "float32", chunk.num_params, partials.ctypes.data, GRANULE)
        return 0

    def loss(self, op: Op, context: StepContext) -> int:
        self._loss.copy_(self.device_memory.losses, non_blocking=True)
        return self._loss.nbytes

    def decide(self, op: Op, context: StepContext) -> int:
        """Whether the step counts, and by which rate, bias correction and scale its updates go."""
        finite = math.isfinite(self._loss.item())
        scale = 1.0
        if self.plan.clipping:
            assert self.max_grad_norm is not None
            norm = math.sqrt(math.fsum(float(partials.sum()) for partials in self._squares if len(partials)) or 0.0)
            context.grad_norm = norm
            finite = finite and math.isfinite(norm)
            scale = min(1.0, self.max_grad_norm / (norm + CLIP_EPSILON)) if finite else 1.0
        if finite:
            self.num_updates += 1
        context.skipped = not finite
        optimizer = replace(self.optimizer, lr=context.lr)
        self.verdict = Verdict(optimizer, self.num_updates, scale, skip=not finite)
        return 0

    def blocks_not_finite(self) -> list[str]:
        """Blocks whose last gradient was not finite; known when all downloads of a step have ended."""
        if self.plan.clipping:
            return []
        return [block.name for number, block in enumerate(self.blocks) if not self._is_finite(number)]

    def _is_finite(self, block: int) -> bool:
        return math.isfinite(self._largest[block].item())

    def load_state(self, op: Op, context: StepContext) -> Wait:
        assert self.store is not None
        home, chunk = self.plan.homes[op.block][op.index], self._chunk(op)
        first = WEIGHT if op.whole else STATE
        last = STATE if home.state is Home.SSD else WEIGHT
        address = self.host.update_slot(slot_number(op.writes[0]), chunk.num_params).data_ptr()
        if first == STATE:
            address += chunk.num_params * self.plan.precision.weight_bytes
        return self._storing(
            self.store.read(self._extent[op.block, op.index], address, slice(first, last + 1)), op.nbytes
        )

    def update(self, op: Op, context: StepContext) -> int:
        verdict = self.verdict
        assert verdict is not None
        if verdict.skip:
            return 0
        if not self.plan.clipping and not self._is_finite(op.block):
            return 0
        chunk = self._chunk(op)
        gradient = self._gradient_buffer(op.reads[1], op).data_ptr()
        for start, end, decay in self._decay_ranges(op.block, chunk):
            self._adamw(op, chunk, gradient, start, end, decay, verdict)
        return 0

    def _decay_ranges(self, block: int, chunk: Chunk) -> list[tuple[int, int, float]]:
        """Cuts a chunk where weight decay ends; offsets within the chunk."""
        boundary = min(max(self.blocks[block].decay_end - chunk.start, 0), chunk.num_params)
        ranges = [(0, boundary, self.optimizer.weight_decay), (boundary, chunk.num_params, 0.0)]
        return [(start, end, decay) for start, end, decay in ranges if end > start]

    def _adamw(self, op: Op, chunk: Chunk, gradient: int, start: int, end: int, decay: float, verdict: Verdict) -> None:
        precision, home = self.plan.precision, self.plan.homes[op.block][op.index]
        slot = next((slot_number(part) for part in op.writes if str(part[0]).startswith("update.")), None)
        base = 0 if slot is None else self.host.update_slot(slot, chunk.num_params).data_ptr()
        weight = self.host.weights[op.block, op.index].data_ptr() if home.weight is Home.RAM else base
        if home.state is Home.RAM:
            state = self.host.state[op.block, op.index].data_ptr()
        else:
            state = base + chunk.num_params * precision.weight_bytes
        exp_avg = state + chunk.num_params * precision.residual_bytes
        exp_avg_sq = exp_avg + chunk.num_params * 4
        optimizer = replace(verdict.optimizer, weight_decay=decay)
        values = Gradient(gradient + start * precision.gradient_bytes, "float32", end - start)
        weight += start * precision.weight_bytes
        moments = (exp_avg + start * 4, exp_avg_sq + start * 4, end - start)
        if precision.residual_bytes:
            chunk_state = SplitChunk(weight, state + start * precision.residual_bytes, *moments)
            update_split(self.pool, optimizer, chunk_state, values, step=verdict.num_updates, grad_scale=verdict.scale)
        else:
            update_fp32(
                self.pool,
                optimizer,
                Fp32Chunk(weight, *moments),
                values,
                step=verdict.num_updates,
                grad_scale=verdict.scale,
            )

    def write(self, op: Op, context: StepContext) -> Wait:
        assert self.store is not None
        home, chunk = self.plan.homes[op.block][op.index], self._chunk(op)
        first = WEIGHT if home.weight is Home.SSD else STATE
        last = STATE if home.state is Home.SSD else WEIGHT
        address = self.host.update_slot(slot_number(op.reads[0]), chunk.num_params).data_ptr()
        if first == STATE:
            address += chunk.num_params * self.plan.precision.weight_bytes
        return self._storing(
            self.store.write(self._extent[op.block, op.index], address, slice(first, last + 1)), op.nbytes
        )

    # Odds and ends

    def _chunk(self, op: Op) -> Chunk:
        return self.plan.blocks[op.block].chunks[op.index]

    def _storing(self, ticket: StoreTicket, nbytes: int) -> Wait:
        store = self.store
        assert store is not None

        def wait() -> int:
            store.wait(ticket)
            return nbytes

        return wait

    def _copy(self, target: torch.Tensor, source: torch.Tensor, nbytes: int) -> int:
        """Copies bytes between host and device on the current stream; between two host buffers at once."""
        if self.device.type == "cuda":
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)
        else:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
        return nbytes


def _add(total: torch.Tensor, gradient: torch.Tensor | None, *, fresh: bool) -> None:
    if fresh:
        total.zero_() if gradient is None else total.copy_(gradient)
    elif gradient is not None:
        total.add_(gradient)
