"""What stored moments mean: the slow twin of the decoding in native/kernels_moments.inc.

Knows bytes, not where they live. Rounding is the kernels' alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from greedysnake.shapes import MOMENT_GROUP

# The codes of native/kernels.h: (bits of magnitude, bits of mantissa).
_EXP_AVG_CODE = (7, 3)
_EXP_AVG_SQ_CODE = (8, 3)


def decode(
    kind: str, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scales: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments in fp32, from uint8 tensors of the bytes as stored; they may share that memory.

    `scales` are the bytes of the scales of exp_avg and exp_avg_sq for "int8", and empty for other kinds.
    """
    if kind == "float32":
        return exp_avg.view(torch.float32), exp_avg_sq.view(torch.float32)
    if kind == "bfloat16":
        return _widened(exp_avg), _widened(exp_avg_sq)
    if kind != "int8":
        raise ValueError(f'moments "{kind}" are not known: use "float32", "bfloat16" or "int8"')
    scale, scale_sq = (part.view(torch.float32).repeat_interleave(MOMENT_GROUP) for part in scales)
    top = (1 << _EXP_AVG_CODE[0]) - 1
    code = exp_avg.int() & top
    magnitude = torch.where(code == 0, 0.0, _value(code, *_EXP_AVG_CODE))
    signed = torch.where(exp_avg > top, -magnitude, magnitude)
    return signed * scale, _value(exp_avg_sq.int(), *_EXP_AVG_SQ_CODE) * scale_sq


def _widened(stored: torch.Tensor) -> torch.Tensor:
    return (stored.view(torch.int16).int() << 16).view(torch.float32)


def _value(code: torch.Tensor, magnitude_bits: int, mantissa_bits: int) -> torch.Tensor:
    """The largest code is 1.0; below it, a code is the upper bits of an fp32 less an offset."""
    offset = (127 << mantissa_bits) - (2**magnitude_bits - 1)
    bits: torch.Tensor = (code + offset) << (23 - mantissa_bits)
    return bits.view(torch.float32)
