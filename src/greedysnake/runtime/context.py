"""What the ops of one call of step() or evaluate() have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from greedysnake.ops import Op
from greedysnake.runtime.slots import Attempt

TentativeWeights = Mapping[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
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
    loss_sum: float = math.nan
    """Of all ranks; known when the step is judged."""
    first_index: int = 0
    """Micro-batches of the ranks before this one: all of a step draw random numbers of their own."""
    loss_started: bool = False
    shapes: dict[tuple[int, int], torch.Size] = field(default_factory=dict)
    """Shape of the input of each block, by block and micro-batch."""
    graphs: dict[tuple[int, int], tuple[Outputs, torch.Tensor]] = field(default_factory=dict)
    """Outputs and input of the layers whose graph is kept, by block and micro-batch."""
    grad_norm: float | None = None
    skipped: bool = False
    attempt: Attempt = field(default_factory=Attempt)
    """What its tentative updates belong to."""
    tentative: TentativeWeights = field(default_factory=dict)
    """Of chunks whose weights live in RAM: the weights before a tentative update, and where those after it go."""
    num_updates: int = 0
    """Updates before it."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes of tensors between blocks, by lane, each on its own thread; the ops know the rest."""

    def count(self, op: Op, nbytes: int) -> None:
        lane = op.lane.value
        self.nbytes[lane] = self.nbytes.get(lane, 0) + nbytes
