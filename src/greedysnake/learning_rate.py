"""The learning rate of every step, under the names and with the values of transformers' schedules. No torch.

A schedule is a pure function of the step, so a resumed run needs nothing but its step count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from greedysnake.errors import ConfigError

ScheduleName = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "warmup_stable_decay", "wsd"
]
"""wsd is short for warmup_stable_decay."""

DecayShape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class LearningRate:
    """`lr.at(step)` for steps from 0. The first step of a warm-up has a rate of 0, as in transformers."""

    peak: float
    name: str
    num_steps: int
    """Steps of the whole training."""
    num_warmup: int = 0
    num_decay: int = 0
    """warmup_stable_decay only: steps of the decay at the end."""
    decay_shape: str = "cosine"
    """warmup_stable_decay only."""
    min_ratio: float = 0.0
    """Where the rate ends, as a share of the peak; warmup_stable_decay also begins there."""

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            raise ConfigError(f"lr_scheduler_type is {self.name!r}: use one of {', '.join(get_args(ScheduleName))}")
        if self.num_warmup > self.num_steps:
            raise ConfigError(
                f"warmup_steps is {self.num_warmup} and training has {self.num_steps} steps: "
                "warm up for fewer steps, or train for more"
            )
        if self.num_warmup + self.num_decay > self.num_steps:
            raise ConfigError(
                f"lr_scheduler_kwargs.num_decay_steps is {self.num_decay} after {self.num_warmup} steps of warm-up, "
                f"and training has {self.num_steps} steps: decay or warm up for fewer, or train for more"
            )

    def at(self, step: int) -> float:
        """The rate of the step after `step` others."""
        return self.peak * self.factor(step)

    def factor(self, step: int) -> float:
        """The share of the peak."""
        low = self.min_ratio if self.name in ("wsd", "warmup_stable_decay") else 0.0
        if self.name != "constant" and step < self.num_warmup:
            return step / self.num_warmup * (1.0 - low) + low
        return max(0.0, _SHAPES[self.name](self, step))


def _constant(_: LearningRate, __: int) -> float:
    return 1.0


def _linear(rate: LearningRate, step: int) -> float:
    return (rate.num_steps - step) / max(1, rate.num_steps - rate.num_warmup)


def _cosine(rate: LearningRate, step: int) -> float:
    progress = (step - rate.num_warmup) / max(1, rate.num_steps - rate.num_warmup)
    return 0.5 * (1.0 + math.cos(math.pi * progress)) * (1.0 - rate.min_ratio) + rate.min_ratio


def _stable_then_decay(rate: LearningRate, step: int) -> float:
    start = rate.num_steps - rate.num_decay
    if step < start:
        return 1.0
    if step >= rate.num_steps:
        return rate.min_ratio
    progress = (step - start) / rate.num_decay
    shape = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "1-sqrt": 1.0 - math.sqrt(progress),
    }[rate.decay_shape]
    return shape * (1.0 - rate.min_ratio) + rate.min_ratio


_SHAPES: dict[str, Callable[[LearningRate, int], float]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine,
    "warmup_stable_decay": _stable_then_decay,
    "wsd": _stable_then_decay,
}
