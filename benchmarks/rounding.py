"""How far updates are off because moments are stored in fewer bytes: the kernels themselves, on gradients made for it.

    python benchmarks/rounding.py

Many parameters get random gradients for thousands of steps, once for each kind of moments. What is compared is the
update of every parameter in the last steps: the root of the mean square of its difference to that with float32, as a
share of the update's own; and its size, which is 1 where roundings cancel out. Gradients have a fifth of their
deviation as their mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from step_options import Parser, count

from greedysnake import _native
from greedysnake.runtime.optimizer import AdamW, Fp32Chunk, Gradient, Moments, update_fp32
from greedysnake.shapes import GRANULE, MOMENTS, precision_of

NUM_PARAMS = 4 * GRANULE
NUM_COUNTED = 200
BETA2S = (0.999, 0.95)

Sizes = Callable[[int, int], torch.Tensor]
"""The deviation of every parameter's gradient in a step, of so many."""


@dataclass
class Training:
    """Parameters whose weight is always 0 and whose step is 1, so that it becomes the update."""

    kind: str
    weight: torch.Tensor = field(default_factory=lambda: torch.zeros(NUM_PARAMS))

    def __post_init__(self) -> None:
        precision = precision_of("float32", self.kind)
        self._bytes = torch.zeros(precision.chunk_bytes(NUM_PARAMS), dtype=torch.uint8)
        moments = Moments.at(self._bytes.data_ptr(), NUM_PARAMS, precision)
        self._chunk = Fp32Chunk(self.weight.data_ptr(), moments, NUM_PARAMS)

    def update(self, pool: _native.ThreadPool, beta2: float, gradient: torch.Tensor, step: int) -> torch.Tensor:
        self.weight.zero_()
        optimizer = AdamW(lr=1.0, betas=(0.9, beta2), weight_decay=0.0)
        update_fp32(pool, optimizer, self._chunk, Gradient.of(gradient), step=step)
        return self.weight.double()


def alike(step: int, num_steps: int) -> torch.Tensor:
    return torch.full((NUM_PARAMS,), 1e-3)


def of_all_sizes() -> Sizes:
    """Within a group: two thirds lie within a factor of 4.5 either way of the median."""
    sizes = 1e-3 * torch.exp(1.5 * torch.randn(NUM_PARAMS, generator=torch.Generator().manual_seed(1)))
    return lambda step, num_steps: sizes


def falling(step: int, num_steps: int) -> torch.Tensor:
    """To a quarter, for every second parameter, after half of the steps."""
    falls = (torch.arange(NUM_PARAMS) % 2 == 0) & (step > num_steps // 2)
    return torch.where(falls, 0.25e-3, 1e-3)


def sparse(step: int, num_steps: int) -> torch.Tensor:
    """One in ten parameters has a gradient."""
    generator = torch.Generator().manual_seed(step)
    return 1e-3 * (torch.rand(NUM_PARAMS, generator=generator) < 0.1)


MODELS: dict[str, Sizes] = {
    "of one size": alike,
    "of all sizes": of_all_sizes(),
    "half of them fall": falling,
    "sparse": sparse,
}


def measure(sizes: Sizes, beta2: float, num_steps: int) -> dict[str, tuple[float, float]]:
    """Of each kind: the difference, and the size of the update along the exact one."""
    pool = _native.ThreadPool(1, None)
    trainings = {kind: Training(kind) for kind in MOMENTS}
    generator = torch.Generator().manual_seed(0)
    means = 0.2 * torch.randn(NUM_PARAMS, generator=generator)
    apart = dict.fromkeys(MOMENTS, 0.0)
    along = dict.fromkeys(MOMENTS, 0.0)
    way = 0.0
    for step in range(1, num_steps + 1):
        gradient = sizes(step, num_steps) * (torch.randn(NUM_PARAMS, generator=generator) + means)
        updates = {kind: training.update(pool, beta2, gradient, step) for kind, training in trainings.items()}
        if step <= num_steps - NUM_COUNTED:
            continue
        exact = updates["float32"]
        way += float(exact.square().sum())
        for kind, update in updates.items():
            apart[kind] += float((update - exact).square().sum())
            along[kind] += float((update * exact).sum())
    pool.close()
    return {kind: ((apart[kind] / way) ** 0.5, along[kind] / way) for kind in MOMENTS}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=4000)
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.steps < NUM_COUNTED:
        parser.error(f"--steps {options.steps}: give {NUM_COUNTED} or more, which are those that count")
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    compact = [kind for kind in MOMENTS if kind != "float32"]
    print(f"{'gradients':<20}{'beta2':>7}" + "".join(f"{kind + ' off':>14}{'size':>7}" for kind in compact))
    for name, sizes in MODELS.items():
        for beta2 in BETA2S:
            found = measure(sizes, beta2, options.steps)
            columns = "".join(f"{found[kind][0]:>14.1%}{found[kind][1]:>7.2f}" for kind in compact)
            print(f"{name:<20}{beta2:>7}{columns}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
