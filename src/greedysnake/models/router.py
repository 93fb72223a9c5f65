"""The loss that balances the experts of a mixture, cut into the terms of single layers.

It multiplies, per expert, how often it was chosen by the probability it was given, each summed over all layers. Only
the probabilities have a gradient, and the loss is linear in them: what a layer adds to it follows from its own
probabilities once the counts of all layers are known, which is when the forward has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from greedysnake.errors import ConfigError
from greedysnake.models.sequential import Batch, MicroBatch

STATISTICS = "statistics of routers"
PROBABILITIES, COUNTS = 0, 1
"""Rows of a layer's statistics, summed over tokens: (2, experts)."""


@dataclass(frozen=True)
class Balance:
    """The balancing loss of a model, for one micro-batch."""

    num_experts: int
    num_chosen: int
    coefficient: float

    def keep(self, batch: Batch, layer: int, statistics: torch.Tensor) -> None:
        if not isinstance(batch, MicroBatch):
            raise ConfigError("the balancing loss needs a micro-batch that can hold notes: use MicroBatch(batch)")
        batch.notes.setdefault(STATISTICS, {})[layer] = statistics

    def loss(self, batch: Batch) -> torch.Tensor:
        total, rows = self._total(batch)
        return self.coefficient * self.num_experts * (total[COUNTS] / rows * (total[PROBABILITIES] / rows)).sum()

    def gradient(self, batch: Batch) -> torch.Tensor:
        """Of `loss` by the statistics of any one layer."""
        total, rows = self._total(batch)
        gradient = torch.zeros_like(total)
        gradient[PROBABILITIES] = self.coefficient * self.num_experts * total[COUNTS] / rows.square()
        return gradient

    def _total(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Statistics of all layers, and the number of tokens that they are of."""
        assert isinstance(batch, MicroBatch)
        total = torch.stack(list(batch.notes[STATISTICS].values())).sum(0)
        return total, total[COUNTS].sum() / self.num_chosen


class Router:
    """Reads the logits of the router in one layer."""

    def __init__(self, router: nn.Module, output_index: int, balance: Balance) -> None:
        self.balance = balance
        self._output_index = output_index
        self._seen: list[torch.Tensor] = []
        router.register_forward_hook(self._see)

    def record(
        self, layer: nn.Module, hidden: torch.Tensor, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls the layer; returns its output and the logits of its router."""
        self._seen.clear()
        output = layer(hidden, *arguments, **options)
        return output, self._seen.pop()

    def statistics(self, logits: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Probabilities and choices of every expert, summed over the tokens that are no padding, in fp32."""
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(self.balance.num_chosen, -1).indices
        counts = torch.zeros_like(probabilities, dtype=torch.float32).scatter_(-1, chosen, 1.0)
        both = torch.stack([probabilities.float(), counts])
        if attention_mask is not None:
            both = both * attention_mask.reshape(1, -1, 1)
        return both.sum(1)

    def _see(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._seen.append(output[self._output_index] if isinstance(output, tuple) else output)
