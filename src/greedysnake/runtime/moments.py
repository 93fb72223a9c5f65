"""What stored moments mean: the slow twin of native/kernels_moments.inc, and the way from one kind to another.

Knows bytes, not where they live. What steps round is the kernels' alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from greedysnake.shapes import MOMENT_GROUP

# The codes of native/kernels.h: (bits of magnitude, bits of mantissa).
_EXP_AVG_CODE = (7, 3)
_EXP_AVG_SQ_CODE = (8, 3)


def decode(kind: str, vectors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments in fp32, from the bytes as stored, by the names that shapes.MOMENTS has for them; they may share
    that memory."""
    exp_avg, exp_avg_sq = vectors["exp_avg"], vectors["exp_avg_sq"]
    if kind == "float32":
        return exp_avg.view(torch.float32), exp_avg_sq.view(torch.float32)
    if kind == "bfloat16":
        return _widened(exp_avg), _widened(exp_avg_sq)
    if kind != "int8":
        raise ValueError(f'moments "{kind}" are not known: use "float32", "bfloat16" or "int8"')
    scale, scale_sq = (
        vectors[name].view(torch.float32).repeat_interleave(MOMENT_GROUP)
        for name in ("exp_avg_scale", "exp_avg_sq_scale")
    )
    top = (1 << _EXP_AVG_CODE[0]) - 1
    code = exp_avg.int() & top
    magnitude = torch.where(code == 0, 0.0, _value(code, *_EXP_AVG_CODE))
    signed = torch.where(exp_avg > top, -magnitude, magnitude)
    return signed * scale, _value(exp_avg_sq.int(), *_EXP_AVG_SQ_CODE) * scale_sq


def encode(kind: str, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, vectors: Mapping[str, torch.Tensor]) -> None:
    """Fills `vectors` with the bytes of both moments, rounded to the nearest. What is done once, not in every step,
    needs no chance to be right on average; and what was decoded comes back to the bytes that it was."""
    if kind == "float32":
        vectors["exp_avg"].view(torch.float32).copy_(exp_avg)
        vectors["exp_avg_sq"].view(torch.float32).copy_(exp_avg_sq)
        return
    if kind == "bfloat16":
        for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            # A finite value stays finite, as in the kernels.
            near = torch.where(moment.isfinite(), moment.clamp(-_LARGEST_BF16, _LARGEST_BF16), moment)
            vectors[name].view(torch.bfloat16).copy_(near)
        return
    if kind != "int8":
        raise ValueError(f'moments "{kind}" are not known: use "float32", "bfloat16" or "int8"')
    code = _codes(exp_avg.abs(), vectors["exp_avg_scale"].view(torch.float32), *_EXP_AVG_CODE)
    negative = (exp_avg < 0) & (code > 0)
    vectors["exp_avg"].copy_(code + negative.int() * (1 << _EXP_AVG_CODE[0]))
    vectors["exp_avg_sq"].copy_(_codes(exp_avg_sq, vectors["exp_avg_sq_scale"].view(torch.float32), *_EXP_AVG_SQ_CODE))


_LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def _codes(magnitude: torch.Tensor, scale: torch.Tensor, magnitude_bits: int, mantissa_bits: int) -> torch.Tensor:
    """The codes of non-negative values, whose groups' scales it sets. A group with a value that is not finite has no
    codes: NaN as its scale makes all of it NaN."""
    groups = magnitude.view(-1, MOMENT_GROUP)
    largest = groups.amax(dim=1)
    scale.copy_(torch.where(largest.isfinite(), largest, torch.nan))
    divisor = torch.where(scale == 0, 1.0, scale)
    shift = 23 - mantissa_bits
    upper = ((groups / divisor[:, None]).view(torch.int32) + (1 << (shift - 1))) >> shift
    return (upper - _offset(magnitude_bits, mantissa_bits)).clamp(0, (1 << magnitude_bits) - 1).view(-1)


def _widened(stored: torch.Tensor) -> torch.Tensor:
    return (stored.view(torch.int16).int() << 16).view(torch.float32)


def _value(code: torch.Tensor, magnitude_bits: int, mantissa_bits: int) -> torch.Tensor:
    """The largest code is 1.0; below it, a code is the upper bits of an fp32 less an offset."""
    bits: torch.Tensor = (code + _offset(magnitude_bits, mantissa_bits)) << (23 - mantissa_bits)
    return bits.view(torch.float32)


def _offset(magnitude_bits: int, mantissa_bits: int) -> int:
    return (127 << mantissa_bits) - ((1 << magnitude_bits) - 1)
