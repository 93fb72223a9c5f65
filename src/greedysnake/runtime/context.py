"""What the ops of one call of step() or evaluate() have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from greedysnake.errors import ConfigError
from greedysnake.ops import Op
from greedysnake.runtime.ranks import Ranks
from greedysnake.runtime.slots import Attempt

TentativeWeights = Mapping[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""What a block returns: the hidden state or the loss, and for some layers a second tensor that the loss depends on."""


@dataclass(frozen=True)
class Spared:
    """Bytes that ops of one list said they move and did not, since these were compressed, by link. Each is counted by
    the thread of one lane."""

    now: dict[str, int] = field(default_factory=dict)
    ahead: dict[str, int] = field(default_factory=dict)
    """Of ops that belong to the next list."""

    def count(self, op: Op, moved_bytes: int) -> None:
        of_link = self.ahead if op.ahead else self.now
        of_link[op.lane.link] = of_link.get(op.lane.link, 0) + op.nbytes - moved_bytes


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
    spared: Spared = field(default_factory=Spared)

    def agree(self, ranks: Ranks, call: str, activation_bytes: int, *, as_many: bool) -> tuple[int, int]:
        """Takes over what all ranks' micro-batches are together. Returns how many the rank with the most has, and the
        size of the largest tensor between blocks that any has. With `as_many`, all must have the same number: they meet
        once for every micro-batch."""
        own = (self.step, self.lr, len(self.batches), self.num_targets, activation_bytes)
        steps, rates, counts, targets, sizes = zip(*ranks.exchange(call, own), strict=True)
        if len({*zip(steps, rates, strict=True)}) > 1:
            raise ConfigError(
                f"the ranks are at steps {', '.join(map(str, steps))} with the rates {', '.join(map(str, rates))}: all "
                "of them make the same steps, with the same lr"
            )
        if as_many and len({*counts}) > 1:
            raise ConfigError(
                f"the ranks have {', '.join(map(str, counts))} micro-batches: the horizontal schedule needs as many on "
                "each of them"
            )
        self.num_targets, self.first_index = sum(targets), sum(counts[: ranks.rank])
        if self.num_targets <= 0:
            raise ConfigError(f"the {sum(counts)} micro-batches have no target tokens: there is no loss to compute")
        return max(counts), max(sizes)

    def count(self, op: Op, nbytes: int) -> None:
        lane = op.lane.value
        self.nbytes[lane] = self.nbytes.get(lane, 0) + nbytes
