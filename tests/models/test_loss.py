"""Cross-entropy in chunks of tokens against torch's own, in one piece."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from greedysnake.models import loss
from greedysnake.models.loss import IGNORED, chunked_cross_entropy, cross_entropy


def make(dtype: torch.dtype, tokens: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(33, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, 33, (tokens,), generator=generator)
    labels[::7] = IGNORED
    return hidden, weight, labels


@pytest.mark.parametrize("part_elements", [1, 100, 1 << 26])
@pytest.mark.parametrize("chunk_tokens", [1, 12, 50, 1000])
def test_loss_and_gradients_are_those_of_torch(
    chunk_tokens: int, part_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "PART_ELEMENTS", part_elements)
    hidden, weight, labels = make(torch.float32)
    ours = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    theirs = cross_entropy(hidden, weight, labels)
    # The same sums in another order: a few units in the last place of float32.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    found = torch.autograd.grad(ours * 0.3, [hidden, weight])
    wanted = torch.autograd.grad(theirs * 0.3, [hidden, weight])
    for ours_one, theirs_one in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_one, theirs_one, rtol=1e-4, atol=1e-5)


class LargeTensors(TorchDispatchMode):
    """Notes the dtypes of all tensors that are made as large as the weight."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.num_elements = num_elements
        self.dtypes: dict[int, torch.dtype] = {}
        """By the memory they are in."""
        self.alive: list[torch.Tensor] = []
        """So that no other gets their memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.numel() >= self.num_elements:
            self.dtypes[found.untyped_storage().data_ptr()] = found.dtype
            self.alive.append(found)
        return found


def test_of_the_size_of_the_weight_there_are_two_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient in float32, and in its own dtype: with a large vocabulary each is gigabytes."""
    monkeypatch.setattr(loss, "PART_ELEMENTS", 64)
    hidden, weight, labels = make(torch.bfloat16, tokens=12)
    with LargeTensors(weight.numel()) as large:
        total = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=12)
        torch.autograd.grad(total * 0.5, [hidden, weight])
    made = [dtype for place, dtype in large.dtypes.items() if place != weight.untyped_storage().data_ptr()]
    assert sorted(made, key=str) == [torch.bfloat16, torch.float32]


def test_scale_of_the_gradient_is_not_rounded_to_bfloat16() -> None:
    hidden, weight, labels = make(torch.bfloat16)
    scale = 1 / 131_073  # bf16 has no number within 0.3 % of some of its neighbours
    (of_hidden,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels) * scale, [hidden])
    (unscaled,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels), [hidden])
    ratio = of_hidden.double().norm() / unscaled.double().norm() / scale
    assert abs(ratio.item() - 1) < 2e-4


def test_ignored_tokens_alone_give_no_loss_and_no_gradient() -> None:
    hidden, weight, labels = make(torch.float32)
    ours = chunked_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED))
    gradients = torch.autograd.grad(ours, [hidden, weight])
    assert ours.item() == 0
    assert all(not gradient.any() for gradient in gradients)


def test_without_gradients_none_are_computed() -> None:
    hidden, weight, labels = make(torch.float32)
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, labels).requires_grad


def test_bias_and_adjusted_logits_have_the_gradients_of_the_whole() -> None:
    hidden, weight, labels = make(torch.float32)
    bias = torch.linspace(-1, 1, weight.shape[0], requires_grad=True)

    def cap(logits: torch.Tensor) -> torch.Tensor:
        return 3 * torch.tanh(logits / 3)

    inputs = [hidden, weight, bias]
    ours = chunked_cross_entropy(hidden, weight, labels, bias=bias, adjust=cap, chunk_tokens=5)
    logits = cap(torch.nn.functional.linear(hidden, weight, bias))
    theirs = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for found, wanted in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        again = chunked_cross_entropy(hidden, weight, labels, bias=bias, adjust=cap)
    torch.testing.assert_close(again, ours, rtol=1e-6, atol=0)


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_kernel_for_gpus_is_compiled_once_for_many_lengths(
    needs_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for each of the first two, since one that is known makes faster code."""
    torch._dynamo.reset()
    monkeypatch.setattr(loss, "missing_for_compiling", lambda device: None)
    kernel, stats = loss._kernel.__wrapped__("cuda"), torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr(loss, "_kernel", lambda device: kernel)
    stats.clear()
    num_graphs = []
    for tokens in (50, 50, *range(5, 41, 3)):
        hidden, weight, labels = make(torch.float32, tokens)
        with torch.set_grad_enabled(needs_gradient), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            ours = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=30)
        num_graphs.append(stats["unique_graphs"])
        theirs = cross_entropy(hidden, weight, labels)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        if needs_gradient:
            found = torch.autograd.grad(ours, [hidden, weight])
            for ours_one, theirs_one in zip(found, torch.autograd.grad(theirs, [hidden, weight]), strict=True):
                torch.testing.assert_close(ours_one, theirs_one, rtol=1e-4, atol=1e-5)
    assert num_graphs == [2, 2] + [3] * 12  # chunks of 30 and of 20 tokens, then any


def test_without_a_compiler_the_kernel_for_gpus_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch, "compile", lambda *values, **options: pytest.fail("it was compiled"))
    kernel = loss._kernel.__wrapped__("cuda")
    monkeypatch.setattr(loss, "_kernel", lambda device: kernel)
    hidden, weight, labels = make(torch.float32)
    ours = chunked_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(ours, cross_entropy(hidden, weight, labels), rtol=1e-6, atol=0)
