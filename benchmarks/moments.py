"""What moments in fewer bytes cost in loss: the same trainings with each kind of them, over several seeds.

    python benchmarks/moments.py
    python benchmarks/moments.py --seeds 3 -- training.max_steps=1000 training.adam_beta2=0.999

Every training is `greedysnake train` in a process of its own; what stands behind -- is given to all of them, a YAML
file first if there is one. Trainings of one seed begin with the same weights and see the same data in the same order,
so their losses are compared seed by seed. Which differences mean something is told by a "control": float32 with an
adam_epsilon that is a tenth larger, a change that means nothing by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from step_options import Parser, count

from greedysnake.shapes import MOMENTS

EXACT, CONTROL = "float32", "control"
KINDS = {
    EXACT: ["training.adam_moments=float32"],
    CONTROL: ["training.adam_moments=float32", "training.adam_epsilon=1.1e-8"],
    **{name: [f"training.adam_moments={name}"] for name in MOMENTS if name != EXACT},
}
"""What `train` is given for each."""


@dataclass(frozen=True)
class Trained:
    """How a training ended."""

    loss: float
    """Held out."""
    train_loss: float
    """Mean of the last tenth of its steps."""
    stored_bytes: int
    """Of the drives, checkpoints included."""


def train(kind: str, seed: int, arguments: Sequence[str], folder: Path) -> Trained:
    chosen = [*KINDS[kind], f"training.seed={seed}", f"output_dir={folder}"]
    command = [sys.executable, "-m", "greedysnake", "train", *arguments, *chosen]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None]
    if not held_out:
        sys.exit("nothing was held out: give training.eval_steps and data.validation_share behind --")
    losses = [line["loss"] for line in lines if "loss" in line]
    last = losses[-max(1, len(losses) // 10) :]
    stored = sum(path.stat().st_blocks * 512 for path in folder.rglob("greedysnake.extents"))
    return Trained(held_out[-1], statistics.fmean(last), stored)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", nargs="+", default=list(KINDS), choices=tuple(KINDS))
    parser.add_argument("--seeds", type=count, default=3, help="0, 1, ...")
    parser.add_argument("more", nargs="*", help="behind --: what greedysnake train is given")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    print(f"{'moments':<10}{'seed':>5}{'held out':>10}{'last steps':>12}{'on the drive':>14}", flush=True)
    found: dict[tuple[str, int], Trained] = {}
    for seed in range(options.seeds):
        for kind in options.moments:
            with tempfile.TemporaryDirectory() as name:
                row = found[kind, seed] = train(kind, seed, options.more, Path(name) / "run")
            size = f"{row.stored_bytes / 1e6:.2f} MB"
            print(f"{kind:<10}{seed:>5}{row.loss:>10.4f}{row.train_loss:>12.4f}{size:>14}", flush=True)
    for kind in options.moments:
        losses = [found[kind, seed].loss for seed in range(options.seeds)]
        text = f"{kind}: held out {statistics.fmean(losses):.4f}"
        if kind != EXACT and EXACT in options.moments:
            apart = [found[kind, seed].loss - found[EXACT, seed].loss for seed in range(options.seeds)]
            text += f"; against {EXACT} {statistics.fmean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})"
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
