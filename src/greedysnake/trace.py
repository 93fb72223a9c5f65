"""What happened when: one record per op, totals per step, and the bound that applied. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from greedysnake.ops import Lane, Op


@dataclass(frozen=True, slots=True)
class Record:
    """One op as it ran; times in seconds on one clock."""

    step: int
    op: Op
    lane: Lane
    start_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True)
class Totals:
    """Busy seconds and bytes of one step, by link (compute, h2d, d2h, net, ssd_read, ssd_write, cpu)."""

    busy_s: Mapping[str, float]
    nbytes: Mapping[str, int]


BOUNDS = {
    "compute": "compute",
    "h2d": "pcie",
    "d2h": "pcie",
    "net": "net",
    "ssd_read": "ssd",
    "ssd_write": "ssd",
    "ssd": "ssd",
    "cpu": "cpu",
}


def totals(records: Iterable[Record]) -> Totals:
    """Adds up records. Ops of one link may overlap, so a link is busy for the union of their intervals."""
    spans: dict[str, list[tuple[float, float]]] = {}
    nbytes: dict[str, int] = {}
    for record in records:
        link = record.lane.link
        spans.setdefault(link, []).append((record.start_s, record.end_s))
        nbytes[link] = nbytes.get(link, 0) + record.nbytes
        if link.startswith("ssd"):
            spans.setdefault("ssd", []).append((record.start_s, record.end_s))
    return Totals({link: union_s(values) for link, values in spans.items()}, nbytes)


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total = 0.0
    reach = float("-inf")
    for start, end in sorted(spans):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total


def bound(busy_s: Mapping[str, float], elapsed_s: float) -> tuple[str, float]:
    """The link that was busy longest names the bound; the fraction is how much of the step it was busy."""
    if not busy_s or elapsed_s <= 0:
        return "compute", 0.0
    link = max(busy_s, key=lambda name: busy_s[name])
    return BOUNDS[link], min(1.0, busy_s[link] / elapsed_s)


def write_perfetto(records: Iterable[Record], path: str | Path) -> None:
    """Writes a timeline that Perfetto and chrome://tracing open: one row per lane."""
    rows = {lane: number for number, lane in enumerate(Lane)}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": lane.value}}
        for lane, row in rows.items()
    ]
    for record in records:
        events.append(
            {
                "ph": "X",
                "name": str(record.op),
                "cat": record.lane.link,
                "pid": 0,
                "tid": rows[record.lane],
                "ts": record.start_s * 1e6,
                "dur": (record.end_s - record.start_s) * 1e6,
                "args": {"step": record.step, "bytes": record.nbytes},
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": events}))
