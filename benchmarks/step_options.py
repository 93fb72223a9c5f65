"""What the options of benchmarks/step.py and overlap.py may be: a wrong one is refused in one sentence, before anything
has started. Knows nothing of what the options do, and imports no torch."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from greedysnake.errors import GreedySnakeError
from greedysnake.placement import Placement, Slots
from greedysnake.runtime.io import IoEngine
from greedysnake.sizes import parse_size

IO_FIELDS: dict[str, type] = {
    "backend": str,
    "queue_depth": int,
    "num_threads": int,
    "piece_bytes": int,
    "read_bytes_per_s": float,
    "write_bytes_per_s": float,
    "total_bytes_per_s": float,
}
"""Of gs.IoOptions, whose module imports torch."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong, and not all options again."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


# One option


def count(text: str) -> int:
    if not re.fullmatch(r"\+?\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given: give a whole number, 1 or more")
    return int(text)


def positive(text: str) -> float:
    value = as_number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} given: give a number above 0")
    return value


def norm(text: str) -> float:
    value = as_number(text)
    if not value > 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} given: give a number above 0, or inf to clip nothing")
    return value


def fraction(text: str) -> float:
    value = as_number(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} given: give a fraction between 0 and 1")
    return value


def as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def size(text: str) -> str:
    """Stays text: the engine takes it as it is."""
    try:
        num_bytes = parse_size(text)
    except GreedySnakeError:
        num_bytes = 0
    if num_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given: give a number of bytes, or text such as 24GiB or 2GB")
    return text


def device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} given: give cpu, cuda or cuda:N")
    return text


def on_cuda(options: argparse.Namespace) -> bool:
    return str(options.device).startswith("cuda")


# NAME=VALUE


def values_of(flag: str, texts: list[str], kinds: dict[str, type]) -> dict[str, Any]:
    """What the NAME=VALUE texts say, each value of the kind that its name has."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in kinds:
            raise ValueError(f"{flag} {text!r} given: give NAME=VALUE, where NAME is one of {', '.join(kinds)}")
        try:
            found[name] = kinds[name](value)
        except ValueError:
            kind = "a whole number" if kinds[name] is int else "a number"
            raise ValueError(f"{flag} {text!r} given: {name} is {kind}") from None
    return found


def placement_values(options: argparse.Namespace) -> dict[str, float]:
    return values_of("--placement", options.placement, {field.name: float for field in fields(Placement)})


def slot_values(options: argparse.Namespace) -> dict[str, int]:
    return values_of("--slots", options.slots, {field.name: int for field in fields(Slots)})


def io_values(options: argparse.Namespace) -> dict[str, Any]:
    return values_of("--io", options.io, IO_FIELDS)


def rate_limits(options: argparse.Namespace) -> dict[str, float]:
    """Those of --io. They stand for a slower drive, so they are no setting of ours that could be a bad one."""
    return {name: value for name, value in io_values(options).items() if name.endswith("_bytes_per_s")}


# All together


def check(options: argparse.Namespace) -> None:
    """Raises ValueError, with a sentence for the user."""
    check_model(options)
    for flag, make, values in (
        ("--placement", Placement, placement_values(options)),
        ("--slots", Slots, slot_values(options)),
        ("--io", check_io, io_values(options)),
    ):
        try:
            make(**values)
        except GreedySnakeError as error:
            raise ValueError(f"{flag}: {error}") from None
    check_paths(options)
    if options.alternate and options.steps < 2:
        raise ValueError("--alternate with --steps 1: the first step is not counted, give --steps 2 or more")
    if options.optimistic and options.clip is None:
        raise ValueError("--optimistic without --clip: give a norm to clip at, such as --clip 1.0")
    if options.optimistic and options.schedule != "vertical":
        raise ValueError(f"--optimistic with --schedule {options.schedule}: it needs the vertical one")
    if options.vram_cap and not on_cuda(options):
        raise ValueError(f"--vram-cap {options.vram_cap} with --device {options.device}: leave it out, or use cuda")


def check_model(options: argparse.Namespace) -> None:
    hidden, heads, kv_heads = options.hidden, options.heads, options.kv_heads
    if hidden % (2 * heads):
        raise ValueError(
            f"--hidden {hidden} with --heads {heads}: give a multiple of {2 * heads}, so that heads have an even size"
        )
    if heads % kv_heads:
        raise ValueError(f"--kv-heads {kv_heads} with --heads {heads}: give a number that divides {heads}")
    if options.sequence < 2:
        raise ValueError("--sequence 1 has no next token to learn: give 2 or more")


def check_paths(options: argparse.Namespace) -> None:
    for directory in map(Path, options.storage):
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"--storage {directory} is a file: give a directory")
    if len({Path(directory).resolve() for directory in options.storage}) < len(options.storage):
        raise ValueError(f"--storage {' '.join(options.storage)} has a directory twice: give one for each drive")
    needs = [name for name in options.systems if name == "zero-infinity"] + ["--alternate"] * options.alternate
    if needs and not options.storage:
        raise ValueError(f"{needs[0]} without --storage: give a directory on the drive")
    if options.trace:
        trace = Path(options.trace)
        if trace.is_dir() or not trace.parent.is_dir():
            raise ValueError(f"--trace {trace}: give a file in a folder that exists")


def check_io(**values: Any) -> None:
    """The engine itself knows what its numbers may be, and whether there is io_uring."""
    with IoEngine(**values):
        pass
