"""Fused AdamW, with each kind of moments, against PyTorch's fused AdamW plus the bf16 copy it needs; CRC32C per thread.

Contenders take turns and medians are compared, so a disturbance of the machine hits all of them. The memory
bandwidth is that of a native pass over one array which reads four cache lines and rewrites three: the mix of
an update with fp32 gradients (16 B read, 12 B written per parameter) without arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from greedysnake import _native
from greedysnake.runtime.optimizer import AdamW, Gradient, Moments, SplitChunk, update_split
from greedysnake.shapes import MOMENT_GROUP, MOMENTS, precision_of

OPTIMIZER = AdamW(lr=1e-4)


@dataclass(frozen=True)
class Row:
    contender: str
    grad_dtype: str
    moments: str
    params_per_s: float
    ratio_to_torch: float
    ratio_to_float32: float | None
    """To the same kernel with float32 moments; None for PyTorch."""
    bytes_per_param: float | None
    """Traffic the algorithm needs; None for PyTorch, whose passes overlap in cache differently."""
    gb_per_s: float | None
    bandwidth_fraction: float | None


class TorchState:
    """What PyTorch keeps: an fp32 master, moments, and the bf16 weight as a copy."""

    def __init__(self, num_params: int) -> None:
        self.master = torch.randn(num_params)
        self.weight = self.master.bfloat16()
        self.exp_avg = torch.zeros(num_params)
        self.exp_avg_sq = torch.zeros(num_params)
        self.converted = torch.zeros(num_params)
        self.step = torch.tensor(0.0)

    def update(self, grad: torch.Tensor) -> None:
        if grad.dtype != torch.float32:
            self.converted.copy_(grad)
            grad = self.converted
        self.step += 1
        torch._fused_adamw_(
            [self.master],
            [grad],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.step],
            lr=OPTIMIZER.lr,
            beta1=OPTIMIZER.betas[0],
            beta2=OPTIMIZER.betas[1],
            weight_decay=OPTIMIZER.weight_decay,
            eps=OPTIMIZER.eps,
            amsgrad=False,
            maximize=False,
        )
        self.weight.copy_(self.master)


class SplitState:
    """What GreedySnake keeps, as it is stored."""

    def __init__(self, num_params: int, kind: str) -> None:
        precision = precision_of("bfloat16", kind)
        self.stored = torch.zeros(precision.chunk_bytes(num_params), dtype=torch.uint8)
        self.stored[: 2 * num_params].view(torch.bfloat16).copy_(torch.randn(num_params))
        weight, residual = (self.stored.data_ptr() + offset for offset in (0, 2 * num_params))
        moments = Moments.at(weight, num_params, precision)
        self.chunk = SplitChunk(weight, residual, moments, num_params)
        self.bytes_per_param = self.stored.nbytes / num_params
        self.step = 0

    def update(self, pool: _native.ThreadPool, isa: str, grad: torch.Tensor) -> None:
        self.step += 1
        update_split(pool, OPTIMIZER, self.chunk, Gradient.of(grad), step=self.step, isa=isa)


def median_seconds(contenders: dict[str, Callable[[], None]], num_rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(num_rounds + 1):
        for name, run in contenders.items():
            start_s = time.perf_counter()
            run()
            elapsed_s = time.perf_counter() - start_s
            if round_index > 0:  # the first round touches new pages
                times[name].append(elapsed_s)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(num_params: int, num_threads: int, num_rounds: int) -> tuple[list[Row], float, float]:
    """Return the rows, the memory bandwidth and the CRC rate of one thread, both in bytes per second."""
    torch.set_num_threads(num_threads)
    pool = _native.ThreadPool(num_threads)
    grads = {"float32": torch.randn(num_params), "bfloat16": torch.randn(num_params).bfloat16()}
    theirs, ours = TorchState(num_params), {kind: SplitState(num_params, kind) for kind in MOMENTS}
    scratch = torch.zeros(num_params * 4)

    contenders: dict[str, Callable[[], None]] = {}
    for dtype, grad in grads.items():
        contenders[f"torch {dtype}"] = partial(theirs.update, grad)
        for isa in _native.available_isas():
            for kind, state in ours.items():
                contenders[f"{isa} {dtype} {kind}"] = partial(state.update, pool, isa, grad)
    scratch_bytes = scratch.numel() * 4
    contenders["memory"] = lambda: _native.memory_pass(pool, scratch.data_ptr(), scratch_bytes)
    contenders["crc32c"] = lambda: use(_native.crc32c(scratch.data_ptr(), scratch_bytes))
    elapsed_s = median_seconds(contenders, num_rounds)
    pool.close()

    bandwidth = 1.75 * scratch_bytes / elapsed_s["memory"]
    rows = []
    for dtype in grads:
        torch_s = elapsed_s[f"torch {dtype}"]
        rows.append(Row("torch", dtype, "float32", num_params / torch_s, 1.0, None, None, None, None))
        for isa in _native.available_isas():
            float32_s = elapsed_s[f"{isa} {dtype} float32"]
            for kind, state in ours.items():
                ours_s = elapsed_s[f"{isa} {dtype} {kind}"]
                # All that is stored is read and written, the gradient is read.
                bytes_per_param = 2 * state.bytes_per_param + (4 if dtype == "float32" else 2)
                rate = bytes_per_param * num_params / ours_s
                rows.append(
                    Row(
                        isa,
                        dtype,
                        kind,
                        num_params / ours_s,
                        torch_s / ours_s,
                        float32_s / ours_s,
                        bytes_per_param,
                        rate / 1e9,
                        rate / bandwidth,
                    )
                )
    return rows, bandwidth, scratch_bytes / elapsed_s["crc32c"]


def use(_: object) -> None:
    """Turn a call with a result into one without."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=50_000_000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.params % MOMENT_GROUP:
        parser.error(f"--params is {arguments.params}: give a multiple of {MOMENT_GROUP}")
    rows, bandwidth, crc_rate = measure(arguments.params, arguments.threads, arguments.rounds)

    if arguments.json:
        result = {
            "params": arguments.params,
            "threads": arguments.threads,
            "memory_gb_per_s": bandwidth / 1e9,
            "crc32c_gb_per_s_per_thread": crc_rate / 1e9,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(result, indent=2))
        return
    print(f"{arguments.params:,} parameters, {arguments.threads} threads, median of {arguments.rounds} rounds")
    print(f"memory, 4 lines read and 3 of them rewritten: {bandwidth / 1e9:.1f} GB/s")
    print(
        f"{'contender':<10} {'gradients':<10} {'moments':<10} {'Mparam/s':>9} {'x torch':>8} {'x float32':>10}"
        f" {'B/param':>8} {'GB/s':>7} {'of memory':>10}"
    )
    for row in rows:
        line = f"{row.contender:<10} {row.grad_dtype:<10} {row.moments:<10} {row.params_per_s / 1e6:>9.0f}"
        line += f" {row.ratio_to_torch:>8.2f}"
        if row.gb_per_s is not None and row.bandwidth_fraction is not None:
            line += f" {row.ratio_to_float32:>10.2f} {row.bytes_per_param:>8.2f}"
            line += f" {row.gb_per_s:>7.1f} {row.bandwidth_fraction:>10.0%}"
        print(line)
    print(f"crc32c: {crc_rate / 1e9:.1f} GB/s per thread")


if __name__ == "__main__":
    main()
