"""Room for the micro-batches of a step: made when it is first needed, and made anew when more is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from greedysnake.errors import PlanError, RankError
from greedysnake.models.sequential import Batch
from greedysnake.ops import Plan
from greedysnake.runtime.arena import Arena
from greedysnake.runtime.buffers import Buffers
from greedysnake.runtime.compute import Compute
from greedysnake.runtime.fitting import fit_gradients
from greedysnake.runtime.memory import StepMemory
from greedysnake.runtime.runner import Runner, with_op
from greedysnake.runtime.store import Store


class Room:
    """Tensors between blocks and gradients that wait, for steps up to a number and size of micro-batches."""

    def __init__(
        self,
        arena: Arena,
        buffers: Buffers,
        compute: Compute,
        store: Store | None,
        runner: Runner,
        device: torch.device,
        *,
        vertical: bool,
    ) -> None:
        self._arena = arena
        self._buffers = buffers
        self._compute = compute
        self._store = store
        self._runner = runner
        self._device = device
        self._vertical = vertical
        self._memory: StepMemory | None = None
        self._activation_bytes: dict[object, int] = {}
        """By the shapes of a batch."""

    def activation_bytes(self, index: int, batch: Batch) -> int:
        """Of a tensor between blocks, for a step's micro-batch of this index."""
        key = tuple(sorted((name, tuple(value.shape), value.dtype) for name, value in batch.items()))
        if key not in self._activation_bytes:
            try:
                with self._runner.on_compute_stream():
                    self._activation_bytes[key] = self._compute.size_of_activation(batch)
            except Exception as error:  # that of the forward it stands for
                named = with_op(error, f"F0.{index}")
                raise named from (None if named is error else error)
        return self._activation_bytes[key]

    def fits(self, num_micro_batches: int, activation_bytes: int) -> bool:
        return self._memory is not None and self._memory.fits(num_micro_batches, activation_bytes)

    def make(
        self, plan: Plan, num_micro_batches: int, activation_bytes: int, meet: Callable[[], object]
    ) -> tuple[Plan, StepMemory]:
        """Takes memory for steps like this and all before, and finds homes for the gradients that wait. The engine is
        flushed. PlanError or RankError leaves no room at all: the next step starts anew. `meet` raises one unless all
        ranks have come that far."""
        if self._memory is not None:
            num_micro_batches = max(num_micro_batches, self._memory.num_micro_batches)
            activation_bytes = max(activation_bytes, self._memory.activation_bytes)
            self._memory.release()
            self._memory = None
            self._buffers.drop_step()
        free_bytes = self._arena.budget_bytes - self._arena.used_bytes
        plan, kept = fit_gradients(
            plan,
            num_micro_batches,
            activation_bytes,
            free_bytes,
            vertical=self._vertical,
            has_ssd=self._store is not None,
        )
        with self._runner.on_compute_stream():  # whose memory it is: once it is freed, activations may lie there
            memory = StepMemory(
                self._arena,
                plan,
                self._device,
                num_micro_batches=num_micro_batches,
                activation_bytes=activation_bytes,
                kept=kept,
                vertical=self._vertical,
            )
        stream = self._runner.compute_stream
        if stream is not None:
            stream.synchronize()  # streams that copy use it too, and no op tells them that it is zeroed
        try:
            if self._store is not None:
                self._store.require_scratch(memory.scratch_sizes())
            meet()
        except (PlanError, RankError):
            memory.release()
            raise
        return plan, memory

    def use(self, plan: Plan, memory: StepMemory) -> None:
        """From the next step on. Whatever fails here leaves the store without its scratch file."""
        if self._store is not None:
            self._store.resize_scratch(memory.scratch_sizes())
        self._buffers.use(plan, memory)
        self._memory = memory
