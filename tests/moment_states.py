"""Chunks whose moments are stored in each kind: one for the kernels, and a slow reference beside it.

The reference is written from the description, not from the kernels: codes are looked up in a table of their values, and
random bits come from Python integers.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from greedysnake import _native
from greedysnake.runtime.moments import decode
from greedysnake.runtime.optimizer import AdamW, Fp32Chunk, Gradient, Moments, SplitChunk, update_fp32, update_split
from greedysnake.shapes import MOMENT_GROUP as GROUP

POOL = _native.ThreadPool(1)
STORED = {"float32": np.uint32, "bfloat16": np.uint16, "int8": np.uint8}
NAN = np.uint32(0x7FC00000).view(np.float32)

# What the codes stand for, as parts of a group's largest magnitude: 8 per binade, the last is 1. Code 0 of exp_avg
# counts as the next value below when rounding, and is zero.
EXP_AVG_STEPS = np.array([(1 + n % 8 / 8) * 2.0 ** (n // 8 - 16) for n in range(1, 129)])
EXP_AVG_SQ_STEPS = np.array([(1 + n % 8 / 8) * 2.0 ** (n // 8 - 32) for n in range(1, 257)])


class State:
    """One chunk's weights and moments in numpy, for the kernel."""

    def __init__(self, kind: str, master: np.ndarray, *, split: bool = False, first: int = 0, seed: int = 0) -> None:
        self.kind, self.count, self.first, self.seed = kind, master.size, first, seed
        bits = master.view(np.uint32)
        self.weight = ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16) if split else master.copy()
        self.residual = bits.astype(np.uint16).view(np.int16) if split else None
        self.exp_avg, self.exp_avg_sq = np.zeros((2, self.count), STORED[kind])
        self.scales = np.zeros((2, self.count // GROUP if kind == "int8" else 0), np.float32)

    def update(self, optimizer: AdamW, grad: np.ndarray, start=0, end=None, *, pool=POOL, **options) -> None:
        """One step for the elements from `start` to `end`. A gradient of 16-bit integers is bf16."""
        end = self.count if end is None else end
        part = slice(start, end)
        scales = [int(scale[start // GROUP :].ctypes.data) if scale.size else 0 for scale in self.scales]
        addresses = [int(moment[part].ctypes.data) for moment in (self.exp_avg, self.exp_avg_sq)]
        moments = Moments(*addresses, self.kind, *scales, self.first + start, self.seed)
        dtype = "bfloat16" if grad.dtype == np.uint16 else "float32"
        gradient = Gradient(grad[part].ctypes.data, dtype, end - start)
        weight = self.weight[part].ctypes.data
        if self.residual is None:
            update_fp32(pool, optimizer, Fp32Chunk(weight, moments, end - start), gradient, **options)
        else:
            chunk = SplitChunk(weight, self.residual[part].ctypes.data, moments, end - start)
            update_split(pool, optimizer, chunk, gradient, **options)

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        exp_avg, exp_avg_sq = decode(self.kind, self.vectors())
        return exp_avg.numpy().copy(), exp_avg_sq.numpy().copy()

    def vectors(self) -> dict[str, torch.Tensor]:
        """The stored bytes of the moments by name, in the same memory."""
        names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        parts = (self.exp_avg, self.exp_avg_sq, *self.scales)
        return {name: torch.from_numpy(part.view(np.uint8)) for name, part in zip(names, parts, strict=True)}

    def master(self) -> np.ndarray:
        if self.residual is None:
            return self.weight
        return ((self.weight.astype(np.uint32) << 16) + self.residual.astype(np.uint32)).view(np.float32)

    def bits(self) -> dict[str, bytes]:
        parts = {"master": self.master(), "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "scales": self.scales}
        return {name: part.tobytes() for name, part in parts.items()}


# The reference


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def random_bits(seed: int, step: int, first: int, count: int) -> np.ndarray:
    key = lowbias32(seed ^ lowbias32(step % 2**32))
    return np.array([lowbias32((number * 0x9E3779B9 + key) % 2**32) for number in range(first, first + count)])


def rounded_by_chance(x: np.ndarray, random: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32).astype(np.int64)
    up = (bits & 0xFFFF) + random > 0xFFFF
    # Finite values never go up to infinity.
    up &= bits >> 16 & 0x7FFF != 0x7F7F
    return ((bits >> 16) + up).astype(np.uint16)


def parts_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes as parts of the largest of their groups, and those."""
    groups = x.reshape(-1, GROUP)
    scales = groups.max(axis=1, initial=0)
    scales = np.where(np.isfinite(scales), scales, NAN).astype(np.float32)
    parts = groups / np.where(scales == 0, np.float32(1), scales)[:, None]
    return parts.astype(np.float64).ravel(), scales


def codes_by_chance(parts: np.ndarray, steps: np.ndarray, random: np.ndarray) -> np.ndarray:
    """The code below or the one above, by 20 random bits; what is below all codes has the first, NaN the last."""
    below = np.clip(np.searchsorted(steps, parts, side="right") - 1, 0, len(steps) - 2)
    above_share = (parts - steps[below]) / (steps[below + 1] - steps[below])
    up = above_share * 2**20 + random >= 2**20
    return np.where(np.isnan(parts), len(steps) - 1, below + (up & (parts > steps[0]))).astype(np.uint8)


def one_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), NAN, x)


class Reference:
    """AdamW in fp32, one rounding per operation, with the moments stored as the kind says."""

    def __init__(self, state: State) -> None:
        self.kind, self.first, self.seed = state.kind, state.first, state.seed
        self.master = state.master().copy()
        self.exp_avg, self.exp_avg_sq = state.exp_avg.copy(), state.exp_avg_sq.copy()
        self.scales = state.scales.copy()

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        if self.kind == "float32":
            return self.exp_avg.view(np.float32), self.exp_avg_sq.view(np.float32)
        if self.kind == "bfloat16":
            m, v = (part.astype(np.uint32) << 16 for part in (self.exp_avg, self.exp_avg_sq))
            return m.view(np.float32), v.view(np.float32)
        scale, scale_sq = self.scales.repeat(GROUP, axis=1)
        values = np.concatenate([[0.0], EXP_AVG_STEPS[1:], [-0.0], -EXP_AVG_STEPS[1:]]).astype(np.float32)
        return values[self.exp_avg] * scale, EXP_AVG_SQ_STEPS.astype(np.float32)[self.exp_avg_sq] * scale_sq

    def encode(self, m: np.ndarray, v: np.ndarray, step: int) -> None:
        if self.kind == "float32":
            self.exp_avg, self.exp_avg_sq = m.view(np.uint32), v.view(np.uint32)
            return
        random = random_bits(self.seed, step, self.first, m.size)
        if self.kind == "bfloat16":
            self.exp_avg = rounded_by_chance(m, random >> 16)
            self.exp_avg_sq = rounded_by_chance(v, random & 0xFFFF)
        else:
            parts, scale = parts_of(np.abs(m))
            codes = codes_by_chance(parts, EXP_AVG_STEPS, random % 2**12 * 2**8)
            self.exp_avg = np.where((codes > 0) & np.signbit(m), codes + 128, codes).astype(np.uint8)
            parts, scale_sq = parts_of(v)
            self.exp_avg_sq = codes_by_chance(parts, EXP_AVG_SQ_STEPS, random >> 12)
            self.scales = np.stack([scale, scale_sq])

    def update(self, optimizer: AdamW, grad: np.ndarray, *, step: int, grad_scale: float = 1.0) -> None:
        with np.errstate(all="ignore"):
            if grad.dtype == np.uint16:
                grad = (grad.astype(np.uint32) << 16).view(np.float32)
            grad = grad * np.float32(grad_scale)
            m, v = self.decoded()
            beta1, beta2 = optimizer.betas
            m, v = blended(m, grad, beta1), blended(v, grad * grad, beta2)
            largest = np.float32(3.40282347e38)
            m, v = one_nan(m), one_nan(np.where(largest < v, largest, v))
            correction1, root2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
            step_size, eps = np.float32(optimizer.lr * root2 / correction1), np.float32(optimizer.eps * root2)
            decay = np.float32(optimizer.lr * optimizer.weight_decay)
            change = step_size * (m / (np.sqrt(v) + eps)) + decay * self.master
            self.master = one_nan(self.master - change)
            self.encode(m, v, step)

    def bits(self) -> dict[str, bytes]:
        parts = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "scales": self.scales}
        return {name: part.tobytes() for name, part in parts.items()}


def blended(moment: np.ndarray, new: np.ndarray, beta: float) -> np.ndarray:
    if beta < 0.5:
        return new + np.float32(beta) * (moment - new)
    return moment + np.float32(1 - beta) * (new - moment)
