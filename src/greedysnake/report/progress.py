"""What a person sees of a training: where everything lives, one line that moves, a summary. No torch.

On a terminal the line is redrawn in place; elsewhere lines are printed one after another.
"""

from __future__ import annotations

import shlex
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from greedysnake.placement import Home
from greedysnake.sizes import format_size

if TYPE_CHECKING:
    from greedysnake.data.batches import DataReport
    from greedysnake.runtime.footprint import Footprint

RECENT_STEPS = 20
"""The time left is that of so many recent steps on average."""

SHOWN_BAD_ROWS = 5
EVALUATING_LINE_S = 60.0
MOVING_LINES = 3
"""What redrawing the moving line may wipe of a terminal, counted upwards from the cursor."""


@dataclass(frozen=True)
class Prospect:
    """What a run is about to do, in the words of its table."""

    output_dir: str
    device: str
    dtype: str
    num_steps: int
    first_step: int
    """Steps done before, at the checkpoint that is continued; 0 for a new run."""
    num_micro_batches: int
    micro_batch_size: int
    sequence_length: int
    not_compiled: str | None
    """Why layers are not compiled; None when they are."""
    num_ranks: int = 1
    num_gpus: int = 0
    """That this host has."""
    moments: str = "float32"
    layers_per_block: int = 1
    keeps_on_device: bool = True
    """Whether something was said about what stays on the device."""


@dataclass(frozen=True)
class Summary:
    """What a run did, from its start or its last checkpoint on."""

    output_dir: str
    num_steps: int
    """Steps done in all, those before a resume included."""
    total_steps: int
    loss: float | None
    """Of the last step; None when no step was done."""
    eval_loss: float | None
    num_tokens: int
    """Target tokens seen in all."""
    num_skipped: int
    elapsed_s: float
    ssd_written_bytes: int
    stopped_by: str | None
    """The signal that ended the run early."""
    overwrites: bool = False
    """The same command would discard it."""


def home_table(footprint: Footprint, num_ranks: int = 1) -> Table:
    """Before: what lives where, of one rank."""
    table = Table(show_footer=True, box=None, pad_edge=False)
    table.add_column("lives in" if num_ranks == 1 else f"on each of {num_ranks} ranks", footer="in all")
    columns = (("device", Home.DEVICE), ("RAM", Home.RAM), ("SSD", Home.SSD))
    for name, home in columns:
        total = sum(row.get(home, 0) for row in footprint.homes.values())
        table.add_column(name, footer=_size(total), justify="right")
    for name, row in footprint.homes.items():
        table.add_row(name, *(_size(row.get(home, 0)) for _, home in columns))
    return table


def prospect_text(footprint: Footprint, prospect: Prospect) -> str:
    """Before: budgets, and what the run is about to do."""
    num_ranks = prospect.num_ranks
    tokens = num_ranks * prospect.num_micro_batches * prospect.micro_batch_size * prospect.sequence_length
    begin, end = prospect.first_step, prospect.num_steps
    steps = f"steps {begin + 1} to {end}" if begin < end else f"all {end} steps are done"
    lines = [
        f"{count_text(footprint.num_params)} parameters in {prospect.dtype} on {prospect.device}, "
        + ("" if prospect.moments == "float32" else f"moments in {prospect.moments}, ")
        + ("" if prospect.layers_per_block == 1 else f"{prospect.layers_per_block} layers in a block, ")
        + f"run in {prospect.output_dir}",
        *_compiling(prospect),
        f"RAM {format_size(footprint.ram_bytes)} of a budget of {format_size(footprint.ram_budget_bytes)}; "
        f"disk {format_size(sum(footprint.disk_bytes))}, room for checkpoints included"
        + (f", on each of {num_ranks} ranks" if num_ranks > 1 else ""),
        *([f"updates wait for the norm of the whole gradient: {footprint.waits}"] if footprint.waits else []),
        f"{count_text(tokens)} tokens per step: {f'{num_ranks} ranks with ' if num_ranks > 1 else ''}"
        f"{prospect.num_micro_batches} "
        f"{'micro-batch' if prospect.num_micro_batches == 1 else 'micro-batches'} of "
        f"{prospect.micro_batch_size} x {prospect.sequence_length}; {steps}"
        + (f", continued from the checkpoint of step {begin}" if begin else ""),
        *_unused_vram(prospect),
        *_more_gpus(prospect),
    ]
    return "\n".join(lines)


def _compiling(prospect: Prospect) -> list[str]:
    if prospect.not_compiled is None:
        return ["layers are compiled during the first step, which therefore takes longer"]
    return [f"layers are not compiled: {prospect.not_compiled}"] if prospect.device == "cuda" else []


def _unused_vram(prospect: Prospect) -> list[str]:
    if prospect.device != "cuda" or prospect.keeps_on_device:
        return []
    num_ranks = prospect.num_ranks
    how = "train --plan" if num_ranks == 1 else f"greedysnake plan --ranks {num_ranks}"
    return [f"activations and weights leave the GPU between their uses: {how} finds out how much of them could stay"]


def _more_gpus(prospect: Prospect) -> list[str]:
    """Of a run that begins: one that is continued has as many ranks as it had."""
    others = prospect.num_gpus - 1
    if prospect.device != "cuda" or prospect.num_ranks > 1 or prospect.first_step or others < 1:
        return []
    return [
        f"{others} more {'GPU is' if others == 1 else 'GPUs are'} not used: in another output_dir, torchrun "
        f"--nproc-per-node {prospect.num_gpus} -m greedysnake train ... trains on all of them"
    ]


def data_text(train: DataReport, validation: DataReport | None) -> str:
    """Before: what became of the rows, and which could not be used."""
    lines = [f"data: {train}", *([f"held out: {validation}"] if validation else [])]
    bad_rows = list(dict.fromkeys([*train.bad_rows, *(validation.bad_rows if validation else ())]))
    lines += [f"skipped {row}" for row in bad_rows[:SHOWN_BAD_ROWS]]
    return "\n".join(lines)


@contextmanager
def lost_terminal() -> Iterator[None]:
    """Goes on when there is nobody to read any more: with a terminal or the other end of a pipe, the training need not
    end, nor its checkpoint be lost."""
    try:
        yield
    except OSError:
        pass
    except SystemExit as error:  # rich's answer to a pipe without a reader, to which it then writes no more
        if not isinstance(error.__context__, BrokenPipeError):
            raise


class Progress:
    """During: shows every step; use it as a context manager."""

    def __init__(self, console: Console, *, num_steps: int, every: int) -> None:
        """Without a terminal, the first step, every `every`-th and the last are printed."""
        self._console = console
        self._num_steps = num_steps
        self._every = every
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._printed = 0
        self._line = ""
        """Of the last step."""
        self._spoke_s = 0.0

    def step(self, record: Mapping[str, object]) -> None:
        """Shows one line of metrics.jsonl."""
        number = int(str(record["step"]))
        self._recent_s.append(float(str(record["elapsed_s"])))
        line = step_line(record, self._num_steps, self._left_s(number))
        if self._live:
            if "eval_loss" in record and number != self._num_steps:
                self.say(line)  # stays above the moving line, where the last one stays by itself
            self._line = line
            self._move(line)
        elif not self._printed or number % self._every == 0 or number == self._num_steps or "eval_loss" in record:
            self.say(line)
        self._printed += 1

    def evaluating(self, done: int, count: int) -> None:
        """Instead of the moving line until `evaluated`; without a terminal, a line a minute."""
        text = f"evaluating: {done} of {count} micro-batches"
        if self._live:
            self._move(text)
        elif not done:
            self._spoke_s = time.monotonic()
        elif time.monotonic() - self._spoke_s >= EVALUATING_LINE_S:
            self._spoke_s = time.monotonic()
            self.say(text)

    def evaluated(self) -> None:
        self._move(self._line)

    def _move(self, line: str) -> None:
        """Over two lines if need be: the time left comes last."""
        if self._live:
            with lost_terminal():
                self._live.update(Text(line), refresh=True)

    def say(self, sentence: str) -> None:
        """A sentence above the moving line."""
        with lost_terminal():
            self._console.print(sentence, highlight=False, soft_wrap=True, markup=False)

    def __enter__(self) -> Progress:
        if self._live:
            with lost_terminal():
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            with lost_terminal():
                self._live.stop()

    def _left_s(self, step: int) -> float:
        return (self._num_steps - step) * sum(self._recent_s) / len(self._recent_s)


def stop_notice(name: str, *, is_terminal: bool) -> str:
    """What is said when a signal comes, which may be while the line moves."""
    below = "\n" * (MOVING_LINES if is_terminal else 1)
    return f"\n{name}: the step under way is finished and saved; a second signal ends at once{below}"


def step_line(record: Mapping[str, object], num_steps: int, left_s: float) -> str:
    """step, loss, lr, tokens/s, what bounds the step and how close, SSD bytes written, time left."""
    numbers = {name: float(str(record[name])) for name in _NUMBERS}
    parts = [
        f"step {record['step']}/{num_steps}",
        f"loss {numbers['loss']:.4f}",
        *([f"eval {float(str(record['eval_loss'])):.4f}"] if "eval_loss" in record else []),
        f"lr {numbers['lr']:.2e}",
        f"{count_text(round(numbers['tokens_per_s']))} tokens/s",
        f"{record['bound']} busy {numbers['bound_fraction']:.0%}",
        f"SSD {numbers['ssd_written_total_bytes'] / 1e9:.3g} GB written",
        f"{_duration(left_s)} left",
    ]
    return "  ".join(parts)


def summary_text(summary: Summary) -> str:
    """After: one paragraph."""
    steps = f"{summary.num_steps} of {summary.total_steps} steps done"
    if summary.num_steps > summary.total_steps:
        steps = f"{summary.num_steps} steps done, more than the {summary.total_steps} asked for"
    done = f"{steps}, {count_text(summary.num_tokens)} target tokens seen"
    loss = "" if summary.loss is None else f", loss {summary.loss:.4f}"
    evaluation = "" if summary.eval_loss is None else f", held-out loss {summary.eval_loss:.4f}"
    skipped = f", {summary.num_skipped} skipped (gradient not finite)" if summary.num_skipped else ""
    lines = [
        f"{done}{loss}{evaluation}{skipped}",
        f"{_duration(summary.elapsed_s)} this time; {summary.ssd_written_bytes / 1e9:.3g} GB written to SSD in all",
    ]
    if summary.stopped_by:
        command = "the same command, without overwrite_output_dir," if summary.overwrites else "the same command"
        lines.append(
            f"stopped by {summary.stopped_by} after step {summary.num_steps}, which is saved: "
            f"{command} continues from there"
        )
    elif summary.num_steps >= summary.total_steps:
        lines.append(f"next: greedysnake export {shlex.quote(str(summary.output_dir))} OUT")
    return "\n".join(lines)


_NUMBERS = ("loss", "lr", "tokens_per_s", "bound_fraction", "ssd_written_total_bytes")


def _size(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes else "-"


def count_text(number: int) -> str:
    """1234567 -> 1.23M"""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return str(number)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
