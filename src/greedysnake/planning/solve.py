"""Looks for the share of late updates and the number of buffers with which a step is shortest. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

ALPHAS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
UPDATES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
STAGING = (4, 6, 12, 16)
WORTH_IT = 0.002
"""Share of a step that a change must gain."""


@dataclass(frozen=True)
class Choice:
    """What is free when model, batch and machine are given. RAM that it leaves goes to weights, activations and
    state."""

    alpha: float
    updates: int
    """Slots.updates"""
    staging: int
    """Slots.staging"""
    graphs: int = 0
    """Layers, from the last one down, whose graph stays on the device. Not looked for here."""


Seconds = Callable[[Choice], float]
"""How long a step is with a choice; infinite if it does not fit."""


def solve(step_s: Seconds, start: Choice, *, least_s: float = 0.0, vary_alpha: bool = True) -> Choice:
    """The best choice that can be reached from `start` by going along one axis at a time, as long as that gains.

    A step of `least_s` cannot be beaten, and is not tried to.
    """
    tried: dict[Choice, float] = {}

    def seconds(choice: Choice) -> float:
        if choice not in tried:
            tried[choice] = step_s(choice)
        return tried[choice]

    axes: dict[str, Sequence[Any]] = {"updates": UPDATES, "staging": STAGING}
    if vary_alpha:
        axes = {"alpha": ALPHAS, **axes}
    best, settled = start, False
    while not settled:
        settled = True
        for name, values in axes.items():
            found = _along(seconds, best, name, values, least_s)
            if found != best:
                best, settled = found, False
    return best


def _along(seconds: Seconds, start: Choice, name: str, values: Sequence[Any], least_s: float) -> Choice:
    """Goes up or down one axis until it gains no more."""
    best = start
    for direction in (1, -1):
        wider = sorted({*values, getattr(best, name)})[::direction]
        for value in wider[wider.index(getattr(best, name)) + 1 :]:
            if seconds(best) <= least_s * (1 + WORTH_IT):
                return best
            following = replace(best, **{name: value})
            if not seconds(following) <= seconds(best) * (1 - WORTH_IT) < math.inf:
                break
            best = following
        if best != start:
            break
    return best
