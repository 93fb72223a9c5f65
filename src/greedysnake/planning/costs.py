"""How long each op takes on a machine that is known by a few rates. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from greedysnake.ops import LANES, Kind, Lane, Op, Plan
from greedysnake.placement import Home


@dataclass(frozen=True)
class Rates:
    """What the links of a machine do in a second."""

    ssd_bytes_per_s: float
    """All drives together while they read and write."""
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    cpu_params_per_s: float
    """Parameters that the optimizer updates."""
    cpu_bytes_per_s: float
    """Gradients that are added up, or whose squares are."""
    ssd_read_bytes_per_s: float | None = None
    """The drives while nothing is written; None is as fast as with both."""
    ssd_write_bytes_per_s: float | None = None
    """While nothing is read."""
    net_bytes_per_s: float = math.inf
    """Between the devices of several ranks."""
    state_share: float = 1.0
    """Of the bytes of optimizer state, how many cross the drives; fewer than all where moments are compressed."""


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one micro-batch in one block, on the device."""

    forward_s: float
    backward_s: float
    """With the forward computed again, or in the last block, which has no other, for the first time."""
    kept_backward_s: float | None = None
    """Where the graph was kept; None is not known, and taken to be the forward less."""

    def times(self, factor: float) -> BlockTimes:
        kept_s = None if self.kept_backward_s is None else self.kept_backward_s * factor
        return BlockTimes(self.forward_s * factor, self.backward_s * factor, kept_s)


class Costs:
    """How long ops take that have their link to themselves."""

    def __init__(self, plan: Plan, rates: Rates, times: Sequence[BlockTimes], *, activation_bytes: int) -> None:
        """`times` has one entry for each block that runs; `activation_bytes` is the size of a tensor between two."""
        assert len(times) == plan.num_compute
        self.rates = rates
        self._plan = plan
        self._times = times
        self._activation_bytes = activation_bytes
        self._keeps_graph = [plan.keeps_graph(block) for block in range(plan.num_compute)]
        drives = rates.ssd_bytes_per_s
        of_link = {"h2d": rates.h2d_bytes_per_s, "d2h": rates.d2h_bytes_per_s, "net": rates.net_bytes_per_s}
        of_link |= {"ssd_read": drives, "ssd_write": drives}
        self._bytes_per_s = {kind: of_link[lane.link] for kind, lane in LANES.items() if lane.link in of_link}

    def seconds(self, op: Op) -> float:
        """An op of the drives as if they read and wrote all the time."""
        per_s = self._bytes_per_s.get(op.kind)
        if per_s is not None:
            return self.nbytes(op) / per_s
        return self._compute_s(op) if op.lane is Lane.COMPUTE else self._cpu_s(op)

    def nbytes(self, op: Op) -> int:
        """Bytes that it moves; an op does not say those of a tensor between blocks."""
        if op.kind in _OF_TENSORS:
            return self._activation_bytes
        if self.rates.state_share == 1.0 or op.kind not in _OF_STATE:
            return op.nbytes
        return op.nbytes - round((1.0 - self.rates.state_share) * state_bytes(op, self._plan))

    def _compute_s(self, op: Op) -> float:
        times = self._times[op.block]
        if op.kind is not Kind.BACKWARD:
            return times.forward_s
        if not self._keeps_graph[op.block]:
            return times.backward_s
        return times.backward_s - times.forward_s if times.kept_backward_s is None else times.kept_backward_s

    def _cpu_s(self, op: Op) -> float:
        if op.kind is Kind.VERDICT:
            return 0.0
        num_params = self._plan.blocks[op.block].chunks[op.index].num_params
        if op.kind is Kind.UPDATE:
            return num_params / self.rates.cpu_params_per_s
        return num_params * self._plan.precision.gradient_bytes / self.rates.cpu_bytes_per_s


def state_bytes(op: Op, plan: Plan) -> int:
    """Bytes of optimizer state that an op moves over the drives, as they are before they are compressed."""
    if op.kind not in _OF_STATE or plan.homes[op.block][op.index].state is not Home.SSD:
        return 0
    return plan.precision.state_bytes(plan.blocks[op.block].chunks[op.index].num_params)


_OF_STATE = frozenset({Kind.LOAD_STATE, Kind.WRITE})
_OF_TENSORS = frozenset({Kind.PARK, Kind.GET, Kind.SPILL, Kind.RECALL})
