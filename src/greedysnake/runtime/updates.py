"""What the CPU does with gradients: sums, norms, the verdict on a step, and the update of a chunk.

Runs on the CPU lane's thread, in native code that releases Python's lock.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from greedysnake import _native
from greedysnake.errors import ConfigError, GreedySnakeError
from greedysnake.ops import Op
from greedysnake.placement import Home
from greedysnake.runtime.buffers import Buffers
from greedysnake.runtime.context import StepContext
from greedysnake.runtime.flat import FlatBlock
from greedysnake.runtime.optimizer import AdamW, Fp32Chunk, Gradient, Moments, SplitChunk, update_fp32, update_split
from greedysnake.runtime.ranks import Ranks
from greedysnake.shapes import GRANULE, Chunk

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


@dataclass(frozen=True)
class Verdict:
    """What the updates of a step go by."""

    optimizer: AdamW
    num_updates: int
    scale: float
    skip: bool


def start_pool(num_threads: int, cpus: Sequence[int] | None) -> _native.ThreadPool:
    """Threads that update chunks, pinned to `cpus` if given."""
    try:
        return _native.ThreadPool(num_threads, cpus)
    except ValueError as error:  # a CPU that there is not
        raise ConfigError(f"cpus is {list(cpus or ())}: {error}") from None
    except RuntimeError as error:
        raise GreedySnakeError(
            f"{num_threads} threads for the optimizer could not start: {error}; lower num_threads, or raise this "
            "user's limits (ulimit -a)"
        ) from None


class Updates:
    """Updates chunks where they live. Counts the updates, which the bias correction goes by."""

    def __init__(
        self,
        blocks: Sequence[FlatBlock],
        buffers: Buffers,
        pool: _native.ThreadPool,
        optimizer: AdamW,
        ranks: Ranks,
        *,
        max_grad_norm: float | None,
    ) -> None:
        self.num_updates = 0
        self._ranks = ranks
        self._blocks = blocks
        self._buffers = buffers
        self._pool = pool
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._verdict: Verdict | None = None
        self._squares = [np.zeros(block.num_trainable // GRANULE) for block in buffers.plan.blocks]
        pinned = buffers.device.losses.is_cuda  # so that the device copies there on its own
        self._loss = torch.zeros((), dtype=torch.float64, device="cpu", pin_memory=pinned)
        self._largest = torch.zeros(len(blocks), dtype=torch.float32, device="cpu", pin_memory=pinned)
        """Of each block, the bound on its last gradient that the device found."""

    @property
    def changed_nothing(self) -> bool:
        """Whether the last step's gradient was applied as it is: neither clipped nor skipped."""
        return self._verdict is not None and self._verdict.scale == 1.0 and not self._verdict.skip

    def own_loss_sum(self) -> float:
        """The summed loss that the last L op brought to the host: of this rank's micro-batches."""
        return float(self._loss.item())

    def blocks_not_finite(self) -> list[str]:
        """Blocks whose last gradient was not finite; known when all downloads of a step have ended."""
        if self._buffers.plan.clipping:
            return []
        return [block.name for number, block in enumerate(self._blocks) if not self._is_finite(number)]

    def _is_finite(self, block: int) -> bool:
        return math.isfinite(self._largest[block].item())

    # From the device, on the lane of downloads

    def take_loss(self) -> int:
        self._loss.copy_(self._buffers.device.losses, non_blocking=True)
        return self._loss.nbytes

    def take_largest(self, block: int) -> None:
        self._largest[block].copy_(self._buffers.device.largest_of_all[block], non_blocking=True)

    # Ops

    def accumulate(self, op: Op, context: StepContext) -> int:
        total = self._buffers.chunk_gradient(op.writes[0], op)
        part = self._buffers.chunk_gradient(op.reads[0], op)
        count = self._buffers.chunk(op).num_params
        if op.first:
            ctypes.memmove(total.data_ptr(), part.data_ptr(), count * self._buffers.plan.precision.gradient_bytes)
        else:
            _native.add_fp32(self._pool, total.data_ptr(), part.data_ptr(), count)
        return 0

    def squares(self, op: Op, context: StepContext) -> int:
        chunk = self._buffers.chunk(op)
        partials = self._squares[op.block][chunk.start // GRANULE :]
        address = self._buffers.chunk_gradient(op.reads[0], op).data_ptr()
        _native.sum_of_squares(self._pool, address, "float32", chunk.num_params, partials.ctypes.data, GRANULE)
        return 0

    def decide(self, op: Op, context: StepContext) -> int:
        """Whether the step counts, and by which rate, bias correction and scale its updates go. All ranks decide the
        same, from the same numbers."""
        clipping = self._buffers.plan.clipping
        own = math.fsum(float(partials.sum()) for partials in self._squares if len(partials)) if clipping else 0.0
        context.loss_sum, squares = self._ranks.sum_numbers([self.own_loss_sum(), own])
        finite = math.isfinite(context.loss_sum)
        scale = 1.0
        if clipping:
            assert self._max_grad_norm is not None
            norm = math.sqrt(squares or 0.0)
            context.grad_norm = norm
            finite = finite and math.isfinite(norm)
            scale = min(1.0, self._max_grad_norm / (norm + CLIP_EPSILON)) if finite else 1.0
        if finite:
            self.num_updates += 1
        context.skipped = not finite
        optimizer = replace(self._optimizer, lr=context.lr)
        self._verdict = Verdict(optimizer, self.num_updates, scale, skip=not finite)
        return 0

    def update(self, op: Op, context: StepContext) -> int:
        verdict = self._verdict
        if op.tentative:
            verdict = Verdict(replace(self._optimizer, lr=context.lr), context.num_updates + 1, scale=1.0, skip=False)
        assert verdict is not None
        if verdict.skip:
            return 0
        if not self._buffers.plan.clipping and not self._is_finite(op.block):
            return 0
        chunk = self._buffers.chunk(op)
        weights = self._weights_in_ram(op, context)
        for start, end, decay in self._decay_ranges(op.block, chunk):
            self._adamw(op, chunk, start, end, replace(verdict.optimizer, weight_decay=decay), verdict, weights)
        return 0

    def _weights_in_ram(self, op: Op, context: StepContext) -> int:
        """Address of the weights to update, if they live in RAM."""
        if self._buffers.plan.homes[op.block][op.index].weight is not Home.RAM:
            return 0
        if not op.tentative:
            return self._buffers.host.weights[op.block, op.index].data_ptr()
        before, after = context.tentative[op.block, op.index]
        ctypes.memmove(after.data_ptr(), before.data_ptr(), before.nbytes)
        return after.data_ptr()

    def _decay_ranges(self, block: int, chunk: Chunk) -> list[tuple[int, int, float]]:
        """Cuts a chunk where weight decay ends; offsets within the chunk."""
        boundary = min(max(self._blocks[block].decay_end - chunk.start, 0), chunk.num_params)
        ranges = [(0, boundary, self._optimizer.weight_decay), (boundary, chunk.num_params, 0.0)]
        return [(start, end, decay) for start, end, decay in ranges if end > start]

    def _adamw(
        self, op: Op, chunk: Chunk, start: int, end: int, optimizer: AdamW, verdict: Verdict, in_ram: int
    ) -> None:
        plan, host = self._buffers.plan, self._buffers.host
        precision, home = plan.precision, plan.homes[op.block][op.index]
        slot = next((part for part in op.writes if str(part[0]).startswith("update.")), None)
        base = 0 if slot is None else self._buffers.update_slot(slot, op).data_ptr()
        whole = base  # where the chunk would begin if its state lay behind its weight
        if home.state is Home.RAM:
            whole = host.state[op.block, op.index].data_ptr() - chunk.num_params * precision.weight_bytes
        moments = Moments.at(whole, chunk.num_params, precision, start=start, first=chunk.start, seed=op.block)
        weight = (in_ram or base) + start * precision.weight_bytes
        gradient = self._buffers.chunk_gradient(op.reads[0], op).data_ptr()
        values = Gradient(gradient + start * precision.gradient_bytes, "float32", end - start)
        step, scale = verdict.num_updates, verdict.scale
        if precision.residual_bytes:
            residual = whole + chunk.num_params * precision.weight_bytes + start * precision.residual_bytes
            split = SplitChunk(weight, residual, moments, end - start)
            update_split(self._pool, optimizer, split, values, step=step, grad_scale=scale)
        else:
            fp32 = Fp32Chunk(weight, moments, end - start)
            update_fp32(self._pool, optimizer, fp32, values, step=step, grad_scale=scale)
