"""What one step did, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from greedysnake.ops import Lane, Op
from greedysnake.runtime.context import StepContext
from greedysnake.trace import bound


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    loss: float
    """Sum of the losses of all target tokens of the step, divided by their number."""
    grad_norm: float | None
    """Norm of the whole gradient before clipping; None when clipping is off."""
    num_tokens: int
    """Target tokens."""
    elapsed_s: float
    ssd_read_bytes: int
    """With compress_moments: less what was spared while it ran, though some of its updates go on after it."""
    ssd_write_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    bound: str
    """The busiest resource: ssd, pcie, compute or cpu."""
    bound_fraction: float
    """Share of the step during which it was busy."""
    skipped: bool
    """The gradient was not finite and was not applied."""


def make_result(
    context: StepContext,
    moved: Iterable[Op],
    busy_s: Mapping[str, float],
    spared: Mapping[str, int],
    *,
    loss: float,
    elapsed_s: float,
    skipped: bool,
) -> StepResult:
    """`moved` are the ops whose bytes belong to the step, `busy_s` the time that each link was busy in it, `spared` the
    bytes that it did not move after all."""
    nbytes: dict[str, int] = {}
    for lane, count in context.nbytes.items():
        link = Lane(lane).link
        nbytes[link] = nbytes.get(link, 0) + count
    for op in moved:
        nbytes[op.lane.link] = nbytes.get(op.lane.link, 0) + op.nbytes
    for link, count in spared.items():
        nbytes[link] = nbytes.get(link, 0) - count
    name, fraction = bound(busy_s, elapsed_s)
    return StepResult(
        loss=loss,
        grad_norm=context.grad_norm,
        num_tokens=context.num_targets,
        elapsed_s=elapsed_s,
        ssd_read_bytes=nbytes.get("ssd_read", 0),
        ssd_write_bytes=nbytes.get("ssd_write", 0),
        h2d_bytes=nbytes.get("h2d", 0),
        d2h_bytes=nbytes.get("d2h", 0),
        bound=name,
        bound_fraction=fraction,
        skipped=skipped,
    )
