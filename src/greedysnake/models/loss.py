"""Cross-entropy over a large vocabulary in chunks of tokens: the logits never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from greedysnake.compiling import missing_for_compiling

IGNORED = -100
"""Label of a token that is no target."""

CHUNK_TOKENS = 4096

PART_ELEMENTS = 1 << 26
"""Of what is temporary and as large as the weight: with a vocabulary of 128256 and a hidden size of 4096 that would be
gigabytes."""

NUM_EXACT = 2
"""Sizes of chunks that are compiled for as they are: rows of one length have whole chunks and a last one."""

Adjust = Callable[[torch.Tensor], torch.Tensor]
Kernel = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    adjust: Adjust | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> torch.Tensor:
    """Summed loss of `labels` under the logits hidden @ weight.T + bias, as an fp32 scalar.

    `hidden` is (tokens, hidden size), `labels` (tokens). The gradients are computed with the loss, chunk by chunk, so
    nothing is computed twice and at most `chunk_tokens` rows of logits exist at a time. `adjust` is applied to the
    logits of a chunk, element by element: a scale, a soft cap.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, adjust, chunk_tokens)  # type: ignore[no-any-return,no-untyped-call]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        adjust: Adjust | None,
        chunk_tokens: int,
    ) -> torch.Tensor:
        needs_gradient = any(ctx.needs_input_grad[:3])
        kernel = _kernel(hidden.device.type)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if needs_gradient else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_gradient else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_gradient else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = functional.linear(hidden[rows], weight, bias)
            loss, of_logits = _chunk(kernel, logits, labels[rows], needs_gradient, adjust)
            total += loss
            if of_hidden is not None and of_weight is not None:
                torch.mm(of_logits, weight, out=of_hidden[rows])
                for part in _parts(of_weight):  # the product is of the weight's size as well
                    of_weight[part] += of_logits[:, part].T @ hidden[rows]
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        if of_hidden is not None and of_weight is not None:
            ctx.save_for_backward(of_hidden, of_weight, of_bias)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        scale = outputs[0]
        # In fp32: a scale rounded to bf16 would be off by the same factor for every token.
        of_hidden = (of_hidden.to(of_weight.dtype) * scale).to(of_hidden.dtype)
        scaled = torch.empty_like(of_weight, dtype=ctx.weight_dtype)
        for part in _parts(of_weight):
            scaled[part] = of_weight[part] * scale
        of_bias = None if of_bias is None else (of_bias * scale).to(ctx.weight_dtype)
        return of_hidden, scaled, of_bias, None, None, None


def _parts(weight: torch.Tensor) -> Iterator[slice]:
    """Ranges of a matrix's rows: what is computed of one at a time takes a small part of its memory."""
    num_rows = max(1, PART_ELEMENTS // weight.shape[1])
    return (slice(start, start + num_rows) for start in range(0, weight.shape[0], num_rows))


def _chunk(
    kernel: Kernel, logits: torch.Tensor, labels: torch.Tensor, needs_gradient: bool, adjust: Adjust | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss of one chunk, and its gradient by the logits as they come from the matrix."""
    if adjust is None:
        return kernel(logits, labels, needs_gradient)
    with torch.set_grad_enabled(needs_gradient):
        logits = logits.detach().requires_grad_(needs_gradient)
        adjusted = adjust(logits)
    loss, gradient = kernel(adjusted.detach(), labels, needs_gradient)
    if needs_gradient:
        (gradient,) = torch.autograd.grad(adjusted, logits, gradient)
    return loss, gradient


def _loss_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, needs_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss of one chunk, and its gradient in the logits' dtype."""
    scores = logits.float()
    is_target = labels != IGNORED
    picked = labels.clamp(min=0)[:, None]
    log_sum = scores.logsumexp(-1, keepdim=True)
    loss = ((log_sum - scores.gather(-1, picked)).squeeze(-1) * is_target).sum()
    if not needs_gradient:
        return loss, logits
    gradient = (scores - log_sum).exp()
    gradient.scatter_add_(-1, picked, torch.full_like(picked, -1, dtype=gradient.dtype))
    return loss, (gradient * is_target[:, None]).to(logits.dtype)


class _Fused:
    """Compiled for each of the first sizes of chunks, then once for all others: rows of many lengths have many, and
    after eight torch would compile no more, and have all temporary tensors in memory."""

    def __init__(self) -> None:
        self._compiled = torch.compile(_loss_and_gradient, dynamic=False)
        self._exact: dict[bool, set[int]] = {False: set(), True: set()}

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, needs_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exact = self._exact[needs_gradient]
        if len(exact) < NUM_EXACT:
            exact.add(len(labels))
        if len(labels) not in exact:
            from torch._dynamo import maybe_mark_dynamic  # not before something is compiled: it takes a second

            maybe_mark_dynamic(logits, 0)
            maybe_mark_dynamic(labels, 0)
        return self._compiled(logits, labels, needs_gradient)


@cache
def _kernel(device_type: str) -> Kernel:
    """On a GPU the passes over the logits are fused, where that can be done."""
    return _Fused() if device_type == "cuda" and missing_for_compiling("cuda") is None else _loss_and_gradient


def cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same in one piece by torch's own code: the yardstick in tests."""
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
