"""metrics.jsonl: one object per step, each step once, whatever happened to the run. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from greedysnake.durable import sync
from greedysnake.errors import StorageError, explained

if TYPE_CHECKING:
    from greedysnake.runtime.engine import StepResult

KEYS = (
    *("step", "loss", "grad_norm", "lr", "num_tokens", "tokens_per_s", "elapsed_s", "ssd_read_bytes"),
    *("ssd_write_bytes", "h2d_bytes", "d2h_bytes", "bound", "bound_fraction", "ssd_written_total_bytes"),
)
"""What every line has; `eval_loss` comes with the steps after which the model was evaluated."""


def step_record(step: int, result: StepResult, *, lr: float, ssd_written_total_bytes: int) -> dict[str, object]:
    """The line of one step; `step` counts from 1."""
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "num_tokens": result.num_tokens,
        "tokens_per_s": result.num_tokens / result.elapsed_s,
        "elapsed_s": result.elapsed_s,
        "ssd_read_bytes": result.ssd_read_bytes,
        "ssd_write_bytes": result.ssd_write_bytes,
        "h2d_bytes": result.h2d_bytes,
        "d2h_bytes": result.d2h_bytes,
        "bound": result.bound,
        "bound_fraction": result.bound_fraction,
        "ssd_written_total_bytes": ssd_written_total_bytes,
    }


def of_all_ranks(results: Sequence[StepResult]) -> StepResult:
    """A step as all ranks did it: their bytes together, the time of the slowest, the bound of the busiest."""
    busiest = max(results, key=lambda result: result.bound_fraction)
    return replace(
        results[0],
        elapsed_s=max(result.elapsed_s for result in results),
        ssd_read_bytes=sum(result.ssd_read_bytes for result in results),
        ssd_write_bytes=sum(result.ssd_write_bytes for result in results),
        h2d_bytes=sum(result.h2d_bytes for result in results),
        d2h_bytes=sum(result.d2h_bytes for result in results),
        bound=busiest.bound,
        bound_fraction=busiest.bound_fraction,
    )


class MetricsFile:
    """Appends lines; what lies after the checkpoint that a run continues from is dropped when it is opened."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        """`last_step` is the step of the checkpoint, 0 for a new run."""
        self.path = path
        with explained("write", path):
            # Of what is dropped as a whole, nothing is read: it may be anything.
            records = read_metrics(path) if last_step else []
            kept = [record for record in records if int(str(record["step"])) <= last_step]
            _replace(path, kept)
            self._file = path.open("a")
        self.last: Mapping[str, object] | None = kept[-1] if kept else None
        """The line of the last step."""

    def write(self, record: Mapping[str, object]) -> None:
        """Adds one line, which is in the file on return. Numbers that JSON does not have become null."""
        with explained("write", self.path):
            self._file.write(_line(record))
            self._file.flush()
        self.last = record

    def amend(self, values: Mapping[str, object]) -> None:
        """Adds `values` to the last line."""
        records = read_metrics(self.path)
        records[-1].update(values)
        self._file.close()
        with explained("write", self.path):
            _replace(self.path, records)
            self._file = self.path.open("a")
        self.last = records[-1]

    def sync(self) -> None:
        """The lines are on the drive on return, as what is saved after them will be."""
        with explained("write", self.path):
            os.fdatasync(self._file.fileno())  # not by its name, which may be that of another file by now, or of none

    def close(self) -> None:
        with suppress(OSError):  # every line is in the file already, but one that was refused, and that was told
            self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, object]]:
    """The lines of a run; a last line that was torn by a crash is left out. StorageError when another is no record."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is empty, or torn
    return [_record(line, path, number) for number, line in enumerate(lines, start=1)]


def _record(line: bytes, path: Path, number: int) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise StorageError(
            f"{path} is damaged: line {number} is not the record of a step: remove that line", path=str(path)
        )
    return record


def _replace(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """The old file stays until the new one is complete."""
    new = path.with_name(path.name + ".new")
    new.write_text("".join(map(_line, records)))
    sync(new)
    os.replace(new, path)
    sync(path.parent)


def _line(record: Mapping[str, object]) -> str:
    return json.dumps(as_json(record)) + "\n"


def as_json(record: Mapping[str, object]) -> dict[str, object]:
    """A line's values; numbers that JSON does not have become null."""
    return {name: _finite(value) for name, value in record.items()}


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
