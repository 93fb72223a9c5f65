"""How a step gets shorter with more ranks, on drives and devices of known speed: each rank has one of either.

The same step each time: a model of fixed size, with its micro-batches dealt out to the ranks. So with W ranks every
drive and every device has 1/W of the work, and what is not W times as fast is spent on waiting for each other. Drives
and devices are those of overlap.py: a rate limit, and blocks that wait. Beside what was measured stands what the
simulator expects of one rank's schedule, where passing weights and gradients between devices takes no time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from overlap import Measured, Setup, measure  # type: ignore[import-not-found]
from step_options import Parser, count, positive  # type: ignore[import-not-found]

SHARES = {"SSD-bound": 0.3, "knee": 1.0, "compute-bound": 3.0}
"""Compute of a step, as a share of what its SSD traffic takes."""


@dataclass(frozen=True)
class Row:
    """One kind of step with some number of ranks."""

    name: str
    num_ranks: int
    bound_s: float
    """What the slower of drive and device needs."""
    measured: Measured

    @property
    def fraction(self) -> float:
        return self.bound_s / float(self.measured.step_s)


def setup_of(name: str, num_ranks: int, options: argparse.Namespace) -> Setup:
    """One rank's part of the step. Its bytes are a part of the model's, its micro-batches a part of the step's."""
    setup = Setup(options.layers, options.params, options.chunks, options.micro_batches, 0.0, options.rate, alpha=0.25)
    compute_s = SHARES[name] * setup.ssd_s / num_ranks
    return replace(setup, compute_s=compute_s, micro_batches=options.micro_batches // num_ranks)


def run_rank(options: argparse.Namespace) -> None:
    """Measures all kinds of step as one of the ranks; the first prints what it found."""
    if options.of > 1:
        dist.init_process_group("gloo", init_method=f"file://{options.meet}", rank=options.rank, world_size=options.of)
    found = {}
    for name in SHARES:
        found[name] = vars(measure(setup_of(name, options.of, options), options.directory, options.steps))
    if options.rank == 0:
        print(json.dumps(found))
    if options.of > 1:
        dist.destroy_process_group()


def measure_ranks(num_ranks: int, options: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        own = ["--of", str(num_ranks), "--meet", f"{folder}/meet"]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], *own, "--rank", str(rank)], stdout=subprocess.PIPE, text=True
            )
            for rank in range(num_ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"a rank of {num_ranks} failed: see above")
    found = json.loads(outputs[0])
    rows = []
    for name in SHARES:
        setup = setup_of(name, num_ranks, options)
        bound_s = max(setup.ssd_s / num_ranks, setup.compute_s)
        rows.append(Row(name, num_ranks, bound_s, Measured(**found[name])))
    return rows


def table(rows: Sequence[Row]) -> str:
    first = {row.name: row.measured.step_s for row in rows if row.num_ranks == 1}
    lines = [f"{'step':<16}{'ranks':>6}{'step s':>9}{'expected':>10}{'bound s':>9}{'of bound':>10}{'speedup':>9}"]
    for row in sorted(rows, key=lambda row: (list(SHARES).index(row.name), row.num_ranks)):
        speedup = f"{first[row.name] / row.measured.step_s:.2f}" if row.name in first else ""
        lines.append(
            f"{row.name:<16}{row.num_ranks:>6}{row.measured.step_s:>9.3f}{row.measured.simulated_s:>10.3f}"
            f"{row.bound_s:>9.3f}{row.fraction:>10.3f}{speedup:>9}"
        )
    return "\n".join(lines)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=count, nargs="+", default=[1, 2, 4], help="numbers of ranks to compare")
    parser.add_argument("--steps", type=count, default=6, help="steps that are measured in each run")
    parser.add_argument("--layers", type=count, default=12)
    parser.add_argument("--params", type=count, default=131_072, help="parameters of a layer")
    parser.add_argument("--chunks", type=count, default=16, help="chunks of a layer, all ranks' together")
    parser.add_argument("--micro-batches", type=count, default=8, help="of a step, all ranks' together")
    parser.add_argument("--rate", type=positive, default=22e6, help="bytes per second of each drive")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where the drives are")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=count, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    options: argparse.Namespace = parser.parse_args(given)
    if options.params % options.chunks:
        parser.error(f"--chunks {options.chunks} with --params {options.params}: give a number that divides it")
    for number in options.ranks:
        if options.micro_batches % number or options.chunks % number:
            parser.error(f"--ranks {number}: give numbers that divide --micro-batches and --chunks")
    if not options.directory.is_dir():
        parser.error(f"--directory {options.directory} is no directory: give one that exists")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if options.rank is not None:
        run_rank(options)
        return
    print(table([row for number in options.ranks for row in measure_ranks(number, options)]))


if __name__ == "__main__":
    main()
