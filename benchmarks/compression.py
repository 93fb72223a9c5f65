"""Compression of AdamW's moments: raw bytes per second either way, and what a parameter takes before and after.

    python benchmarks/compression.py
    python benchmarks/compression.py --seconds 5

The moments are those of the native AdamW after some hundred steps with made-up gradients: normal, each row of a scale
of its own. They are repeated until they are larger than caches. Contenders take turns and medians are compared, so a
disturbance of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field

import torch
from step_options import Parser, count, positive

from greedysnake import _native
from greedysnake.runtime.optimizer import AdamW, Gradient, Moments, SplitChunk, update_split
from greedysnake.shapes import WORD_BYTES, precision_of

OPTIMIZER = AdamW(lr=1e-4)
COLUMNS = 4096


class State:
    """A chunk with moments of one kind."""

    def __init__(self, num_params: int, kind: str) -> None:
        precision = precision_of("bfloat16", kind)
        self.word_bytes = WORD_BYTES[kind]
        self.num_params = num_params
        self._stored = torch.zeros(precision.chunk_bytes(num_params), dtype=torch.uint8)
        at = self._stored.data_ptr()
        self._offsets = precision.offsets(num_params, trainable=True)
        moments = Moments.at(at, num_params, precision)
        self._chunk = SplitChunk(at, at + self._offsets["residual"], moments, num_params)

    def update(self, pool: _native.ThreadPool, grad: torch.Tensor, step: int) -> None:
        update_split(pool, OPTIMIZER, self._chunk, Gradient.of(grad), step=step)

    def moment(self, name: str) -> torch.Tensor:
        begin = self._offsets[name]
        return self._stored[begin : begin + self.word_bytes * self.num_params]


def simulate(num_params: int, num_steps: int) -> dict[str, State]:
    """The state of the same training with each kind of moments."""
    generator = torch.Generator().manual_seed(0)
    pool = _native.ThreadPool(1)
    states = {kind: State(num_params, kind) for kind in WORD_BYTES}
    scale = 1e-4 * torch.exp(torch.randn(num_params // COLUMNS, 1, generator=generator))
    for step in range(1, num_steps + 1):
        grad = (scale * torch.randn(num_params // COLUMNS, COLUMNS, generator=generator)).flatten()
        for state in states.values():
            state.update(pool, grad, step)
    pool.close()
    return states


def compressed_bytes(moment: torch.Tensor, word_bytes: int) -> int:
    copy = moment.clone()
    return _native.compress(_native.ThreadPool(1), copy.data_ptr(), copy.numel() // word_bytes, word_bytes)


@dataclass
class Contender:
    """One instruction set on words of one kind, with so many threads."""

    isa: str
    kind: str
    pool: _native.ThreadPool
    words: torch.Tensor
    compress_s: list[float] = field(default_factory=list)
    decompress_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        at, word_bytes = self.words.data_ptr(), WORD_BYTES[self.kind]
        num_words = self.words.numel() // word_bytes
        start_s = time.perf_counter()
        num_bytes = _native.compress(self.pool, at, num_words, word_bytes, self.isa)
        compressed_s = time.perf_counter()
        _native.decompress(self.pool, at, num_bytes, num_words, word_bytes, self.isa)
        self.decompress_s.append(time.perf_counter() - compressed_s)
        self.compress_s.append(compressed_s - start_s)

    def gb_per_s(self, times_s: list[float]) -> float:
        return self.words.numel() / statistics.median(times_s) / 1e9


def measure(states: dict[str, State], nbytes: int, num_threads: int, seconds: float) -> list[Contender]:
    contenders = []
    pools = [_native.ThreadPool(n) for n in sorted({1, num_threads})]
    for kind, state in states.items():
        both = torch.cat([state.moment("exp_avg"), state.moment("exp_avg_sq")])
        words = both.repeat(max(1, nbytes // both.numel()))
        contenders += [Contender(isa, kind, pool, words) for pool in pools for isa in _native.available_isas()]
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(contenders[0].compress_s) < 3:
        for contender in contenders:
            contender.run()
    for pool in pools:
        pool.close()
    return contenders


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=count, default=2**20, help=f"of the simulation, a multiple of {COLUMNS}")
    parser.add_argument("--steps", type=count, default=300)
    parser.add_argument("--mib", type=count, default=256, help="compressed at a time")
    parser.add_argument("--threads", type=count, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=positive, default=20.0, help="of measuring; three rounds at least")
    options: argparse.Namespace = parser.parse_args()
    if options.params % COLUMNS:
        parser.error(f"--params is {options.params}: give a multiple of {COLUMNS}")
    return options


def main() -> None:
    options = parse()
    states = simulate(options.params, options.steps)
    print(f"bytes per parameter after {options.steps} steps")
    print(f"{'moments':<10} {'':<10} {'before':>7} {'compressed':>7} {'share':>7}")
    for kind, state in states.items():
        for name in ("exp_avg", "exp_avg_sq"):
            compressed = compressed_bytes(state.moment(name), state.word_bytes) / state.num_params
            share = compressed / state.word_bytes
            print(f"{kind:<10} {name:<10} {state.word_bytes:>7.2f} {compressed:>7.2f} {share:>7.1%}")
    contenders = measure(states, options.mib * 2**20, options.threads, options.seconds)
    print(f"raw bytes per second, {options.mib} MiB, median of {len(contenders[0].compress_s)} rounds")
    print(f"{'moments':<10} {'isa':<10} {'threads':>7} {'compress GB/s':>10} {'decompress GB/s':>12}")
    for row in contenders:
        line = f"{row.kind:<10} {row.isa:<10} {row.pool.num_threads:>7} {row.gb_per_s(row.compress_s):>10.1f}"
        print(f"{line} {row.gb_per_s(row.decompress_s):>12.1f}")


if __name__ == "__main__":
    main()
