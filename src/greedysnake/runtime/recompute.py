"""The backward of a block without its output: in compiled code, what only the output needs is not computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Recompute(nn.Module):
    """Runs a module for the sake of its backward. Returns a zero whose gradient is that of the module's output.

    The output's values are not part of the result, so a compiler leaves out all that leads to them alone: of a
    decoder layer the last matrix product, a quarter of the recomputed forward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, hidden: torch.Tensor, gradient: torch.Tensor, *extra: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """A second output of the module is returned as it is."""
        output = self.module(hidden, *extra)
        if isinstance(output, tuple):
            return _Inject.apply(output[0], gradient), output[1]  # type: ignore[no-untyped-call]
        return _Inject.apply(output, gradient)  # type: ignore[no-any-return,no-untyped-call]


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None
