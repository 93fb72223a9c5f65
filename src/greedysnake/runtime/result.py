"""What one step did, in numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from greedysnake.ops import Lane, Op
from greedysnake.runtime.context import Spared, StepContext
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
    """With compress_moments: less what was spared so far. What its last updates spare is taken off the next step's."""
    ssd_write_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    bound: str
    """The busiest resource: ssd, pcie, compute or cpu."""
    bound_fraction: float
    """Share of the step during which it was busy."""
    skipped: bool
    """The gradient was not finite and was not applied."""


OPEN_STEPS = 4
"""So long ago a step may have been whose ops are not all over."""


class SparedBytes:
    """What results take off the bytes that ops say they move: each as much as is known by then, and what was not known
    before."""

    def __init__(self) -> None:
        self._open: deque[Mapping[str, int]] = deque()
        """What lists spare that results have counted, by link; it may grow."""
        self._final: dict[str, int] = {}
        """What earlier ones did."""
        self._taken: dict[str, int] = {}
        self._ahead: Mapping[str, int] = {}
        """What the last list spares for the next one."""

    def skip(self, spared: Spared) -> None:
        """A list that no result counts, but for what it does for the next one."""
        self._ahead = spared.ahead

    def take(self, spared: Spared, said: Mapping[str, int]) -> dict[str, int]:
        """For a step, of the bytes that its ops said they move, by link."""
        self._open += [spared.now, self._ahead]
        self._ahead = spared.ahead
        while len(self._open) > 2 * OPEN_STEPS:
            _add(self._final, self._open.popleft())
        due = dict(self._final)
        for each in self._open:
            _add(due, each)
        taken = {link: min(most, due.get(link, 0) - self._taken.get(link, 0)) for link, most in said.items()}
        _add(self._taken, taken)
        return taken


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for link, count in list(more.items()):  # lanes may be counting
        total[link] = total.get(link, 0) + count


def make_result(
    context: StepContext,
    moved: Iterable[Op],
    busy_s: Mapping[str, float],
    spared: SparedBytes,
    *,
    loss: float,
    elapsed_s: float,
    skipped: bool,
) -> StepResult:
    """`moved` are the ops whose bytes belong to the step, `busy_s` the time that each link was busy in it. What was
    `spared` of these bytes is taken off."""
    nbytes: dict[str, int] = {}
    for lane, count in context.nbytes.items():
        link = Lane(lane).link
        nbytes[link] = nbytes.get(link, 0) + count
    for op in moved:
        nbytes[op.lane.link] = nbytes.get(op.lane.link, 0) + op.nbytes
    for link, count in spared.take(context.spared, nbytes).items():
        nbytes[link] -= count
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
