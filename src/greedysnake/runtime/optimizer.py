"""AdamW for chunks of flat state: hyperparameters and the calls into the native kernels.

Knows nothing of blocks, schedules or where the state lives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from greedysnake import _native
from greedysnake._native import ThreadPool
from greedysnake.errors import ConfigError
from greedysnake.shapes import MOMENTS, Precision

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters of one AdamW step."""

    lr: float
    """Learning rate of the step."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of exp_avg and exp_avg_sq per step."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.01
    """Decoupled decay: a step takes lr * weight_decay of the weight away."""

    moments: str = "float32"
    """How both moments are stored: "float32", "bfloat16" or "int8", in 8, 4 or 2.1 bytes per parameter. All but the
    first round what the next step goes by."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not isinstance(getattr(self, name), Real):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give a number")
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ConfigError(f"lr is {self.lr}: give a finite number, 0 or more")
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ConfigError(f"betas is {self.betas}: give two numbers, as in (0.9, 0.999)")
        for i, beta in enumerate(self.betas):
            if not isinstance(beta, Real) or not 0 <= beta < 1:
                raise ConfigError(f"betas[{i}] is {beta!r}: give a number from 0 up to, but not including, 1")
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ConfigError(f"eps is {self.eps}: give a finite number, 0 or more")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"weight_decay is {self.weight_decay}: give a finite number, 0 or more")
        if not isinstance(self.moments, str) or self.moments not in MOMENTS:
            raise ConfigError(f"moments is {self.moments!r}: use 'float32', 'bfloat16' or 'int8'")


@dataclass(frozen=True)
class Moments:
    """Addresses of a chunk's moments as they are stored; whoever made them keeps the memory alive."""

    exp_avg: int

    exp_avg_sq: int

    kind: str = "float32"
    """"float32", "bfloat16" (rounded by chance) or "int8" (one byte each, scaled by group)"""

    exp_avg_scale: int = 0
    """int8 only: fp32, one per group of 64 parameters"""

    exp_avg_sq_scale: int = 0

    first: int = 0
    """Number of the first parameter in its block, which rounding by chance goes by"""

    seed: int = 0
    """32 bits of the block's own, likewise"""

    @classmethod
    def of(cls, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, count: int) -> Moments:
        """Take the addresses of `count` float32 moments."""
        return cls(
            _address("exp_avg", exp_avg, torch.float32, count),
            _address("exp_avg_sq", exp_avg_sq, torch.float32, count),
        )

    @classmethod
    def at(
        cls, chunk: int, num_params: int, precision: Precision, *, start: int = 0, first: int = 0, seed: int = 0
    ) -> Moments:
        """Of the parameters from `start` on in a chunk that lies at an address as it is stored. `first` is the number
        of the chunk's own first parameter."""
        offsets = precision.offsets(num_params, trainable=True)
        at = {vector.name: chunk + offsets[vector.name] + vector.size(start) for vector in MOMENTS[precision.moments]}
        return cls(**at, kind=precision.moments, first=first + start, seed=seed)


@dataclass(frozen=True)
class SplitChunk:
    """Addresses of one chunk's state for mixed precision; whoever made it keeps the memory alive."""

    weight: int
    """bf16"""

    residual: int
    """int16; joined with weight it is the fp32 master"""

    moments: Moments

    count: int
    """Number of elements."""

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        residual: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> SplitChunk:
        """Take the addresses of tensors of equal length; the moments are float32."""
        count = weight.numel()
        return cls(
            _address("weight", weight, torch.bfloat16, count),
            _address("residual", residual, torch.int16, count),
            Moments.of(exp_avg, exp_avg_sq, count),
            count,
        )


@dataclass(frozen=True)
class Fp32Chunk:
    """Addresses of one chunk's state with fp32 weights; whoever made it keeps the memory alive."""

    weight: int
    moments: Moments
    count: int
    """Number of elements."""

    @classmethod
    def of(cls, weight: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> Fp32Chunk:
        """Take the addresses of tensors of equal length; the moments are float32."""
        count = weight.numel()
        return cls(
            _address("weight", weight, torch.float32, count),
            Moments.of(exp_avg, exp_avg_sq, count),
            count,
        )


@dataclass(frozen=True)
class Gradient:
    """Address and dtype of one chunk's gradient."""

    address: int
    dtype: str
    """"float32" or "bfloat16"."""

    count: int
    """Number of elements."""

    @classmethod
    def of(cls, grad: torch.Tensor) -> Gradient:
        if grad.dtype not in _DTYPE_NAMES:
            raise ConfigError(f"the gradient is {grad.dtype}: use torch.float32 or torch.bfloat16")
        return cls(_address("grad", grad, grad.dtype, grad.numel()), _DTYPE_NAMES[grad.dtype], grad.numel())


def update_split(
    pool: ThreadPool,
    optimizer: AdamW,
    chunk: SplitChunk,
    grad: Gradient,
    *,
    step: int,
    grad_scale: float = 1.0,
    isa: str = "auto",
) -> None:
    """Apply one step in place to a chunk with split weights. Blocks; other Python threads run meanwhile.

    `step` counts from 1. The gradient is multiplied by `grad_scale` first.
    """
    # The native function takes a missing residual for fp32 weights, and would write beyond the bf16 ones.
    if chunk.residual == 0 and chunk.count > 0:
        raise ValueError("residual is a null address: pass the address of its memory")
    _update(pool, optimizer, chunk, chunk.residual, grad, step, grad_scale, isa)


def update_fp32(
    pool: ThreadPool,
    optimizer: AdamW,
    chunk: Fp32Chunk,
    grad: Gradient,
    *,
    step: int,
    grad_scale: float = 1.0,
    isa: str = "auto",
) -> None:
    """Apply one step in place to a chunk with fp32 weights; else as `update_split`."""
    _update(pool, optimizer, chunk, 0, grad, step, grad_scale, isa)


def _update(
    pool: ThreadPool,
    optimizer: AdamW,
    chunk: SplitChunk | Fp32Chunk,
    residual: int,
    grad: Gradient,
    step: int,
    grad_scale: float,
    isa: str,
) -> None:
    if grad.count != chunk.count:
        raise ConfigError(f"the gradient has {grad.count} elements, the chunk {chunk.count}: make them equal")
    moments = chunk.moments
    _native.adamw(
        pool,
        isa,
        moments.kind,
        grad.address,
        grad.dtype,
        chunk.weight,
        residual,
        moments.exp_avg,
        moments.exp_avg_sq,
        moments.exp_avg_scale,
        moments.exp_avg_sq_scale,
        chunk.count,
        moments.first,
        moments.seed,
        optimizer.lr,
        optimizer.betas[0],
        optimizer.betas[1],
        optimizer.eps,
        optimizer.weight_decay,
        step,
        grad_scale,
    )


def _address(name: str, tensor: torch.Tensor, dtype: torch.dtype, count: int) -> int:
    if tensor.device.type != "cpu" or tensor.dtype != dtype:
        raise ConfigError(f"{name} is {tensor.dtype} on {tensor.device}: give {dtype} on the CPU")
    if not tensor.is_contiguous():
        raise ConfigError(f"{name} is not contiguous: give a flat range of memory")
    if tensor.numel() != count:
        raise ConfigError(f"{name} has {tensor.numel()} elements, weight {count}: make them equal")
    return tensor.data_ptr()
