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


@dataclass(frozen=True)
class SplitChunk:
    """Addresses of one chunk's state for mixed precision; whoever made it keeps the memory alive."""

    weight: int
    """bf16"""

    residual: int
    """int16; joined with weight it is the fp32 master"""

    exp_avg: int
    """fp32"""

    exp_avg_sq: int
    """fp32"""

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
        """Take the addresses of tensors of equal length."""
        count = weight.numel()
        return cls(
            _address("weight", weight, torch.bfloat16, count),
            _address("residual", residual, torch.int16, count),
            _address("exp_avg", exp_avg, torch.float32, count),
            _address("exp_avg_sq", exp_avg_sq, torch.float32, count),
            count,
        )


@dataclass(frozen=True)
class Fp32Chunk:
    """Addresses of one chunk's state in full fp32; whoever made it keeps the memory alive."""

    weight: int
    exp_avg: int
    exp_avg_sq: int
    count: int
    """Number of elements."""

    @classmethod
    def of(cls, weight: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> Fp32Chunk:
        """Take the addresses of tensors of equal length."""
        count = weight.numel()
        return cls(
            _address("weight", weight, torch.float32, count),
            _address("exp_avg", exp_avg, torch.float32, count),
            _address("exp_avg_sq", exp_avg_sq, torch.float32, count),
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
    _check_length(chunk.count, grad)
    _native.adamw_split(
        pool,
        isa,
        grad.address,
        grad.dtype,
        chunk.weight,
        chunk.residual,
        chunk.exp_avg,
        chunk.exp_avg_sq,
        chunk.count,
        optimizer.lr,
        optimizer.betas[0],
        optimizer.betas[1],
        optimizer.eps,
        optimizer.weight_decay,
        step,
        grad_scale,
    )


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
    _check_length(chunk.count, grad)
    _native.adamw_fp32(
        pool,
        isa,
        grad.address,
        grad.dtype,
        chunk.weight,
        chunk.exp_avg,
        chunk.exp_avg_sq,
        chunk.count,
        optimizer.lr,
        optimizer.betas[0],
        optimizer.betas[1],
        optimizer.eps,
        optimizer.weight_decay,
        step,
        grad_scale,
    )


def _check_length(count: int, grad: Gradient) -> None:
    if grad.count != count:
        raise ConfigError(f"the gradient has {grad.count} elements, the chunk {count}: make them equal")


def _address(name: str, tensor: torch.Tensor, dtype: torch.dtype, count: int) -> int:
    if tensor.device.type != "cpu" or tensor.dtype != dtype:
        raise ConfigError(f"{name} is {tensor.dtype} on {tensor.device}: give {dtype} on the CPU")
    if not tensor.is_contiguous():
        raise ConfigError(f"{name} is not contiguous: give a flat range of memory")
    if tensor.numel() != count:
        raise ConfigError(f"{name} has {tensor.numel()} elements, weight {count}: make them equal")
    return tensor.data_ptr()
