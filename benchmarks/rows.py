"""The rows of docs/performance.md: runs of benchmarks/step.py, and each figure beside its target.

    python benchmarks/rows.py --storage DIR
    python benchmarks/rows.py alpha ssd --storage DIR --out RESULTS --traces

Without names all rows are measured, one after the other; --list prints them with their commands. Tables and figures
come as they are ready, and all figures once more at the end. Ratios are those of one run where both sides are in it,
else of two runs right after each other. With --out, what each run printed is kept there as JSON, and with --traces a
timeline of its last step. With --minutes, on a machine that is there for so long, rows that would take longer than what
is left are left out, and said. What follows a lone -- goes to every run, such as -- --steps 2.

The exit code is 1 if a target was missed, a run failed that should not or was left out, and 2 for an option that cannot
work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from step_options import Parser, positive

STEP = Path(__file__).parent / "step.py"
WATCH_S = 0.5
Found = Mapping[str, Mapping[str, Any]]
"""Of every run of a row, by its name: what step.py printed as JSON."""


@dataclass(frozen=True)
class Figure:
    text: str
    value: Callable[[Found], float | str]
    """KeyError where a system failed, so that there is no such figure."""
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, value: float | str) -> bool | None:
        """None where there is nothing to meet."""
        if isinstance(value, str) or (self.at_least is None and self.at_most is None):
            return None
        return (self.at_least or -math.inf) <= value <= (self.at_most or math.inf)

    @property
    def target(self) -> str:
        least = [] if self.at_least is None else [f">= {self.at_least:g}"]
        return " ".join(least + ([] if self.at_most is None else [f"<= {self.at_most:g}"]))


@dataclass(frozen=True)
class Row:
    title: str
    runs: Mapping[str, str]
    """Name -> arguments of step.py; DIR stands for the drive."""
    figures: Sequence[Figure]
    needs_s: float
    """About what its runs take on an H200, from start to end: by such runs, or by their steps where there were none."""
    may_fail: bool = False
    limits_s: Mapping[str, float] = field(default_factory=dict)
    """Runs that are ended after so long: of systems that are not expected to get anywhere."""


# Figures


def of(run: str, system: str, key: str) -> Callable[[Found], float | str]:
    return lambda found: float(system_of(found[run], system)[key])


def system_of(run: Mapping[str, Any], system: str) -> Mapping[str, Any]:
    """KeyError where it failed."""
    return {row["system"]: row for row in run["rows"] if "failed" not in row}[system]  # type: ignore[no-any-return]


def speed(run: str, over: str, *, system: str = "greedysnake", peer: str = "greedysnake") -> Callable[[Found], float]:
    """Tokens/s of `system` in `run`, as a multiple of those of `peer` in the run `over`."""

    def ratio(found: Found) -> float:
        ours, theirs = system_of(found[run], system), system_of(found[over], peer)
        return float(ours["tokens_per_s"] / theirs["tokens_per_s"])

    return ratio


def last_step(run: str, over: str) -> Callable[[Found], float]:
    """Of last steps: the first counted one has a collection of Python's garbage in it, and with clipping it is the
    start and moves less."""

    def ratio(found: Found) -> float:
        ours, theirs = (system_of(found[name], "greedysnake") for name in (run, over))
        return float(theirs["steps_s"][-1] / ours["steps_s"][-1])

    return ratio


def fate(run: str) -> Callable[[Found], float | str]:
    """What became of the system of a run, in words."""

    def words(found: Found) -> str:
        if "failed" in found[run]:
            return str(found[run]["failed"])
        (row,) = found[run]["rows"]
        return str(row["failed"]) if "failed" in row else f"{len(row['steps_s'])} steps, losses {row['losses']}"

    return words


def least_free(run: str) -> Callable[[Found], float | str]:
    return lambda found: float(found[run]["least_free_bytes"]) / 1e9


def within_caps(run: str) -> list[Figure]:
    """Of the model that is larger than the machine."""
    return [
        Figure("tokens/s", of(run, "greedysnake", "tokens_per_s")),
        Figure("VRAM, bytes", of(run, "greedysnake", "peak_vram_bytes"), at_most=24e9),
        Figure("RAM, bytes", of(run, "greedysnake", "peak_rss_bytes"), at_most=96e9),
    ]


def against_drive(run: str) -> list[Figure]:
    return [
        Figure(f"of what its bytes need, drive {when}", of(run, "greedysnake", f"of_ssd_bound_{when}"))
        for when in ("before", "after")
    ]


# Rows

IO = "--io backend=threads queue_depth=8 piece_bytes=4194304 num_threads=6"
IN_RAM = (
    "--ram 60GiB --steps 5 --slots updates=40 staging=16 weights=4 "
    "--placement weights_ram=1 optimizer_ram=1 activations_device=1 activations_ram=0"
)
ON_SSD = "--storage DIR --ram 24GiB --placement activations_device=1 activations_ram=0 weights_device=1"
SLOTS = "--slots updates=48 staging=16 weights=4"
HELD = "--steps 3 --no-bounds --slots updates=110 staging=16 weights=4"
KNEE = "--micro-batches 64 --alpha 0.28"
BALANCED = (
    "--systems greedysnake --layers 12 --storage DIR --ram 24GiB --micro-batches 80 --steps 3 --no-bounds "
    f"{IO} total_bytes_per_s=2500000000 --no-compress-moments --slots updates=12 staging=16 weights=4 "
    "--placement activations_device=1 activations_ram=0 weights_ram=0.14 optimizer_ram=0.14"
)
EIGHT = "--layers 32 --hidden 4096 --mlp 14336 --heads 32 --kv-heads 8 --vocab 128256 --storage DIR --vram-cap 24GB"

ROWS: Mapping[str, Row] = {
    "ssd": Row(
        "SSD tier, 131k tokens per step",
        {"ssd": f"--systems zero-infinity greedysnake --alternate --steps 4 --peer-steps 2 {SLOTS} {IO} {ON_SSD}"},
        [
            Figure("of 26 bytes per parameter", of("ssd", "greedysnake", "of_26_bytes_per_param"), 0.92),
            Figure("of ZeRO-Infinity", speed("ssd", "ssd", peer="zero-infinity"), 4.0),
        ],
        needs_s=320.0,
    ),
    "saturated": Row(
        "SSD tier, 524k tokens per step",
        {"saturated": f"--systems pytorch greedysnake {KNEE} --steps 4 --peer-steps 3 {SLOTS} {IO} {ON_SSD}"},
        [Figure("of PyTorch", speed("saturated", "saturated", peer="pytorch"), 0.92)],
        needs_s=150.0,
    ),
    "ram": Row(
        "RAM tier, 131k tokens per step",
        {
            "ram": f"--systems pytorch greedysnake zero-offload --peer-steps 3 {IN_RAM}",
            "ram-clipped": f"--systems greedysnake --no-bounds --clip 1.0 {IN_RAM}",
            "ram-graphs": f"--systems greedysnake --no-bounds --vram-cap 120GB {IN_RAM} graphs_device=0.33",
        },
        [
            Figure("of PyTorch", speed("ram", "ram", peer="pytorch"), 0.98),
            Figure("of ZeRO-3 with CPU offload", speed("ram", "ram", peer="zero-offload"), 3.0),
            Figure("clipped, of the figure without", speed("ram-clipped", "ram"), 0.95),
            Figure("graphs kept in VRAM, of PyTorch", speed("ram-graphs", "ram", peer="pytorch"), 1.06),
            Figure("graphs kept in VRAM, of ZeRO-3", speed("ram-graphs", "ram", peer="zero-offload")),
        ],
        needs_s=300.0,
    ),
    "8b": Row(
        "8 B parameters, 24 GB of VRAM, 96 GB of RAM",
        {
            "8b": f"--systems greedysnake {EIGHT} --ram 84GiB --ram-cap 96GB --no-checkpoints --alpha 0.17 --steps 2 "
            f"--slots updates=40 staging=16 weights=3 {IO} --placement weights_ram=1 optimizer_ram=0.45 "
            "activations_device=0.22 activations_ram=0.78"
        },
        [*against_drive("8b"), *within_caps("8b")],
        needs_s=200.0,
    ),
    "8b-pairs": Row(
        "8 B parameters, as above, two layers in a block",
        {
            "8b-pairs": f"--systems greedysnake {EIGHT} --ram 84GiB --ram-cap 96GB --no-checkpoints --alpha 0.25 "
            f"--steps 2 --layers-per-block 2 --slots updates=40 staging=16 weights=2 {IO} --placement weights_ram=1 "
            "optimizer_ram=0.6 activations_device=0.2 activations_ram=0.8"
        },
        [*against_drive("8b-pairs"), *within_caps("8b-pairs")],
        needs_s=170.0,
    ),
    "clipping": Row(
        "exact clipping, SSD tier, 131k tokens per step",
        {
            "clipping-0": f"--systems greedysnake {HELD} {IO} total_bytes_per_s=1900000000 {ON_SSD}",
            "clipping": f"--systems greedysnake {HELD} {IO} total_bytes_per_s=1900000000 {ON_SSD} --clip 1.0",
        },
        [Figure("of the figure without", last_step("clipping", "clipping-0"), 0.95)],
        needs_s=190.0,
    ),
    "saturated-clipping": Row(
        "exact clipping, SSD tier, 524k tokens per step",
        {
            "saturated-clipping-0": f"--systems greedysnake --steps 3 --no-bounds {KNEE} {SLOTS} "
            f"{IO} total_bytes_per_s=2500000000 {ON_SSD}",
            "saturated-clipping": f"--systems greedysnake --steps 3 --no-bounds {KNEE} --clip 1.0 "
            f"--slots updates=240 staging=16 weights=4 {IO} total_bytes_per_s=2500000000 {ON_SSD}",
        },
        [Figure("of the figure without", last_step("saturated-clipping", "saturated-clipping-0"))],
        needs_s=170.0,
    ),
    "alpha": Row(
        "late updates, where drive and compute balance",
        {"alpha": f"{BALANCED} --alpha 0.2", "alpha-0": f"{BALANCED} --alpha 0"},
        [Figure("of alpha = 0", last_step("alpha", "alpha-0"), 1.1)],
        needs_s=130.0,
    ),
    "8b-peers": Row(
        "8 B parameters, DeepSpeed",
        {
            "8b-zero-offload": f"--systems zero-offload {EIGHT} --ram-cap 120GB --no-bounds --steps 1",
            "8b-zero-infinity": f"--systems zero-infinity {EIGHT} --no-bounds --micro-batches 1 --steps 2",
        },
        [
            Figure("ZeRO-3 with CPU offload", fate("8b-zero-offload")),
            Figure("ZeRO-Infinity", fate("8b-zero-infinity")),
            Figure("ZeRO-Infinity, least free on the drive, GB", least_free("8b-zero-infinity")),
        ],
        needs_s=290.0,
        may_fail=True,
        limits_s={"8b-zero-infinity": 240.0},
    ),
    "moments": Row(
        "moments compressed and in fewer bytes, SSD tier, 131k tokens per step, drive held",
        {
            f"moments-{name}": f"--systems greedysnake --steps 3 --no-bounds {SLOTS} {moments} "
            f"{IO} total_bytes_per_s=2500000000 {ON_SSD}"
            for name, moments in {
                "plain": "--no-compress-moments",
                **{moments: f"--moments {moments}" for moments in ("float32", "bfloat16", "int8")},
            }.items()
        },
        [
            Figure("compressed, of plain", last_step("moments-float32", "moments-plain"), 1.08),
            Figure("bfloat16, of float32", last_step("moments-bfloat16", "moments-float32"), 1.4),
            Figure("int8, of float32", last_step("moments-int8", "moments-float32"), 1.8),
        ],
        needs_s=220.0,
    ),
    "8b-int8": Row(
        "8 B parameters, moments in int8: all weights and optimizer state in 96 GB of RAM",
        {
            "8b-int8": f"--systems greedysnake {EIGHT} --ram 84GiB --ram-cap 96GB --no-checkpoints --moments int8 "
            f"--steps 2 --slots updates=40 staging=16 weights=3 {IO} --placement weights_ram=1 optimizer_ram=1 "
            "activations_device=0.22 activations_ram=0.78"
        },
        within_caps("8b-int8"),
        needs_s=110.0,
    ),
}


# Runs


def measure_row(name: str, options: argparse.Namespace, left_s: float) -> dict[str, dict[str, Any]]:
    """Of every run what `measure` found, or {} where there was no time left to begin it."""
    row, start_s = ROWS[name], time.monotonic()
    if row.needs_s > left_s:
        left = f"{max(0.0, left_s):.0f} s of --minutes are left"
        print(f"\n{name}: left out: it takes about {row.needs_s:.0f} s, and {left}")
        return {run: {} for run in row.runs}
    found = {}
    for run in row.runs:
        left_now_s = left_s - (time.monotonic() - start_s)
        found[run] = measure(run, row, options, left_now_s) if left_now_s > 0 else {}
    print()
    print_figures(name, found)
    sys.stdout.flush()
    return found


def arguments_of(run: str, row: Row, storage: Sequence[str] = ("DIR",), more: Sequence[str] = ()) -> list[str]:
    """Of step.py. `more` may change what was said before it."""
    words = row.runs[run].split()
    place = words.index("DIR") if "DIR" in words else None
    if place is not None:
        words[place : place + 1] = storage
    return [*words, *more]


def measure(name: str, row: Row, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """What step.py printed, or {"failed": ...}; with `least_free_bytes` of the drive while it ran."""
    arguments = [*arguments_of(name, row, options.storage, options.more), "--json"]
    if options.traces and "greedysnake" in arguments:
        arguments += ["--trace", str(Path(options.out) / f"{name}.trace.json")]
    print(f"\n{name}: python benchmarks/step.py {' '.join(arguments)}", flush=True)
    start_s = time.monotonic()
    with watched_drive(options.storage) as least:
        limit_s = min(row.limits_s.get(name, options.limit_s), max(0.0, left_s))
        found = finish([sys.executable, str(STEP), *arguments], limit_s)
    found.update(least_free_bytes=least(), elapsed_s=time.monotonic() - start_s)
    print(f"{name}: {found['elapsed_s']:.0f} s", flush=True)
    if options.out:
        (Path(options.out) / f"{name}.json").write_text(json.dumps(found))
    return found


def finish(command: list[str], limit_s: float) -> dict[str, Any]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"had not ended after {limit_s:.0f} s"}
    finally:
        if process.returncode is None:
            process.terminate()  # it ends its system and removes the files
            process.communicate()
    try:
        return json.loads(output)  # type: ignore[no-any-return]
    except json.JSONDecodeError:
        return {"failed": f"step.py ended with exit code {process.returncode}"}


@contextlib.contextmanager
def watched_drive(storage: Sequence[str]) -> Iterator[Callable[[], int]]:
    """The least that was free on the fullest drive while the context was open."""
    done = threading.Event()

    def free() -> int:
        return min((shutil.disk_usage(existing(directory)).free for directory in storage), default=0)

    least = free()

    def watch() -> None:
        nonlocal least
        while not done.wait(WATCH_S):
            least = min(least, free())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: least
    finally:
        done.set()
        thread.join()


def existing(directory: str) -> Path:
    path = Path(directory).absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


# Text


def print_figures(name: str, found: Found) -> bool:
    """Whether all is as it should be."""
    row, sound = ROWS[name], True
    left_out = not all(found.values()) and not any("failed" in each for each in found.values())
    for number, figure in enumerate(row.figures):
        try:
            value = figure.value(found)
        except KeyError:
            value, sound = ("left out", False) if left_out else ("failed", row.may_fail and sound)
        met = figure.is_met(value)
        sound = sound and met is not False
        verdict = {True: "met", False: "MISSED", None: ""}[met]
        text = value if isinstance(value, str) else f"{value:.4g}"
        title = row.title if number == 0 else ""
        print(f"{title:48} {figure.text:44} {text:>10} {figure.target:>8} {verdict}".rstrip())
    return sound


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all of them by default")
    parser.add_argument("--storage", nargs="+", default=[], help="a directory on each drive")
    parser.add_argument("--out", help="folder for what the runs printed, as JSON")
    parser.add_argument("--traces", action="store_true", help="with --out: timelines too, which Perfetto opens")
    parser.add_argument("--limit-s", type=positive, default=900.0, help="a run that takes longer is ended")
    parser.add_argument("--minutes", type=positive, default=math.inf, help="leave out what would take longer")
    parser.add_argument("--list", action="store_true", help="print the rows and their commands, and measure nothing")
    mine, more = split(arguments)
    options: argparse.Namespace = parser.parse_args(mine)
    options.more = more
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no row: give some of {', '.join(ROWS)}")
    options.rows = options.rows or list(ROWS)
    needs = [name for name in options.rows if any("DIR" in run for run in ROWS[name].runs.values())]
    if needs and not options.storage and not options.list:
        parser.error(f"{needs[0]} without --storage: give a directory on the drive")
    if options.traces and not options.out:
        parser.error("--traces without --out: give a folder for the timelines")
    return options


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(arguments)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.list:
        for name in options.rows:
            print(f"{name}: {ROWS[name].title}")
            for run in ROWS[name].runs:
                print(f"    python benchmarks/step.py {' '.join(arguments_of(run, ROWS[name]))}")
        return 0
    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * options.minutes
    found = {name: measure_row(name, options, end_s - time.monotonic()) for name in options.rows}
    print()
    sound = [print_figures(name, found[name]) for name in options.rows]
    return int(not all(sound))


def stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)
