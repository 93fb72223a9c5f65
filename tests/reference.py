"""Plain PyTorch training loop: gradient accumulation, clip_grad_norm_, torch.optim.AdamW. The yardstick for parity.

Also the small models that tests train in both worlds, and a second loop that rounds where the engine does in bfloat16.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import greedysnake as gs
from greedysnake import _native
from greedysnake.runtime.optimizer import Fp32Chunk, Gradient, update_fp32
from greedysnake.runtime.randomness import block_seed
from greedysnake.schedule import snake

Batch = dict[str, torch.Tensor]
OPTIMIZER = gs.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


class Embed(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, hidden) * 0.5)

    def forward(self, batch: Batch) -> torch.Tensor:
        return functional.embedding(batch["ids"], self.weight)


class Layer(nn.Module):
    """Norm, mixing over the sequence, MLP: small but with everything that has a gradient."""

    def __init__(self, hidden: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden, bias=False)
        self.dropout = dropout

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device)
        mixed = hidden.cumsum(1) / steps[:, None]
        inner = functional.gelu(self.up(self.norm(hidden + 0.5 * mixed)))
        return hidden + functional.dropout(self.down(inner), self.dropout, self.training)


class Gate(nn.Module):
    """A layer of another structure: no matrix, parameters of no and of one dimension."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(hidden))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.sigmoid(hidden * self.scale + self.shift) * 2


class Plain(nn.Module):
    """A layer without parameters."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden)


class Head(nn.Module):
    def __init__(self, vocab: int, hidden: int, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.weight = nn.Parameter(torch.randn(vocab, hidden) * 0.2) if tied is None else tied

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits = functional.linear(self.norm(hidden), self.weight)
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
        )


@dataclass
class Parts:
    """A model's pieces, before anyone trains them."""

    embed: nn.Module
    layers: list[nn.Module]
    head: nn.Module

    def sequential(self, **options: int) -> gs.Sequential:
        return gs.Sequential(self.embed, self.layers, self.head, num_targets=num_targets, **options)

    def blocks(self, layers_per_block: int = 1) -> list[list[nn.Module]]:
        """Modules by the block that they stream in."""
        groups = [self.layers[i : i + layers_per_block] for i in range(0, len(self.layers), layers_per_block)]
        return [[self.embed], *groups, [self.head]]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Names as the engine gives them; a tied parameter only under its first name."""
        modules = {
            "embed": self.embed,
            **{f"layers.{i}": layer for i, layer in enumerate(self.layers)},
            "head": self.head,
        }
        seen: set[int] = set()
        named = {}
        for prefix, module in modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[f"{prefix}.{name}"] = parameter
        return named


def make_parts(
    *,
    vocab: int = 37,
    hidden: int = 32,
    width: int = 96,
    num_layers: int = 4,
    tied: bool = False,
    frozen: Sequence[str] = (),
    dropout: float = 0.0,
    uneven: bool = False,
    mixed: bool = False,
    repeated: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Parts:
    """`frozen` names prefixes of parameters, e.g. "layers.1" or "embed". `uneven` gives layers different sizes,
    `mixed` puts layers of other structures between them, `repeated` the first in place of the second and last."""
    torch.manual_seed(seed)
    embed = Embed(vocab, hidden)
    layers: list[nn.Module] = [Layer(hidden, width * (1 + i % 3 if uneven else 1), dropout) for i in range(num_layers)]
    if mixed:
        layers = [layers[0], Gate(hidden), Plain(), *layers[1:], Plain(), Gate(hidden)]
    if repeated:
        layers[1] = layers[-1] = layers[0]
    parts = Parts(embed, layers, Head(vocab, hidden, embed.weight if tied else None))
    for name, parameter in parts.named_parameters().items():
        if name.startswith(tuple(frozen)):
            parameter.requires_grad_(False)
    nn.ModuleList([parts.embed, *parts.layers, parts.head]).to(device)
    return parts


def make_factories(num_layers: int = 4, *, vocab: int = 37, hidden: int = 32, width: int = 96) -> gs.Sequential:
    """The model of `factory_parts`, as functions that make its modules one by one."""
    layers = [partial(_seeded, 10 + i, partial(Layer, hidden, width)) for i in range(num_layers)]
    embed = partial(_seeded, 1, partial(Embed, vocab, hidden))
    head = partial(_seeded, 2, partial(Head, vocab, hidden))
    return gs.Sequential(embed, layers, head, num_targets=num_targets)


def factory_parts(num_layers: int = 4, *, vocab: int = 37, hidden: int = 32, width: int = 96) -> Parts:
    layers = [_seeded(10 + i, partial(Layer, hidden, width)) for i in range(num_layers)]
    embed = _seeded(1, partial(Embed, vocab, hidden))
    return Parts(embed, layers, _seeded(2, partial(Head, vocab, hidden)))


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def make_batches(
    num_micro_batches: int,
    step: int,
    *,
    vocab: int = 37,
    length: int = 12,
    uneven: bool = True,
    device: str = "cpu",
) -> list[Batch]:
    """Micro-batches; with `uneven` they differ in size and in how many of their tokens are targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    batches = []
    for index in range(num_micro_batches):
        rows = 2 + index % 3 if uneven else 2
        ids = torch.randint(0, vocab, (rows, length), generator=generator)
        labels = ids.roll(-1, 1)
        if uneven:
            labels[:, : index % (length - 2)] = -100
        batches.append({"ids": ids.to(device), "labels": labels.to(device)})
    return batches


def num_targets(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    results: list[gs.StepResult] = field(default_factory=list)


def train_engine(
    model: gs.Sequential,
    batches: Callable[[int], list[Batch]],
    num_steps: int = 10,
    *,
    lr: Callable[[int], float] | None = None,
    optimizer: gs.AdamW = OPTIMIZER,
    between: Callable[[gs.Engine, int], None] | None = None,
    **options: object,
) -> Trained:
    """Trains with the engine; `between(engine, step)` runs after each step."""
    with gs.Engine(model, optimizer, **{"ram": "64MiB", **options}) as engine:  # type: ignore[arg-type]
        trained = Trained()
        for step in range(engine.num_steps, num_steps):
            result = engine.step(batches(step), lr=lr(step) if lr else None)
            trained.results.append(result)
            if between:
                between(engine, step)
        trained.losses = [result.loss for result in trained.results]
        trained.norms = [result.grad_norm for result in trained.results if result.grad_norm is not None]
        take_values(engine, trained)
    return trained


def take_values(engine: gs.Engine, trained: Trained) -> None:
    trained.parameters = dict(engine.named_parameters())
    trained.moments = {name: (first, second) for name, first, second in engine.named_moments()}


def train_reference(
    parts: Parts,
    optimizer: gs.AdamW,
    batches: Callable[[int], list[Batch]],
    num_steps: int,
    *,
    max_grad_norm: float | None = None,
    lr: Callable[[int], float] | None = None,
    layers_per_block: int = 1,
    seed: int = 0,
) -> Trained:
    """Trains in float32, with the random numbers that the engine draws with this `seed`."""
    named = {name: parameter for name, parameter in parts.named_parameters().items() if parameter.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
    trained = Trained()
    blocks = parts.blocks(layers_per_block)
    for step in range(num_steps):
        micro_batches = batches(step)
        total = sum(num_targets(batch) for batch in micro_batches)
        loss_sum = 0.0
        for index, batch in enumerate(micro_batches):
            loss = _forward(blocks, batch, partial(block_seed, seed, step), index)
            (loss / total).backward()
            loss_sum += loss.item()
        if max_grad_norm is not None:
            trained.norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), max_grad_norm)))
        for group in adamw.param_groups:
            group["lr"] = lr(step) if lr else optimizer.lr
        adamw.step()
        adamw.zero_grad()
        trained.losses.append(loss_sum / total)
    trained.parameters = {name: parameter.detach().cpu() for name, parameter in parts.named_parameters().items()}
    return trained


def _forward(
    blocks: Sequence[Sequence[nn.Module]], batch: Batch, seed_of: Callable[[int, int], int], index: int
) -> torch.Tensor:
    """The loss of one micro-batch; each block starts from the random numbers that `seed_of(block, index)` gives."""
    hidden: torch.Tensor | None = None
    for number, block in enumerate(blocks):
        torch.manual_seed(seed_of(number, index))
        for module in block:
            arguments = (batch,) if number == 0 else (hidden,) if number < len(blocks) - 1 else (hidden, batch)
            hidden = module(*arguments)
    assert hidden is not None
    return hidden


def train_reference_bf16(
    parts: Parts,
    optimizer: gs.AdamW,
    batches: Callable[[int], list[Batch]],
    num_steps: int,
    *,
    max_grad_norm: float | None = None,
    horizontal: bool = False,
    torch_adamw: bool = False,
) -> Trained:
    """Rounds where the engine does: computes in bf16 with weights that are the fp32 masters rounded to nearest (ties
    away from zero), adds the bf16 gradients of the micro-batches in fp32 in the engine's order, updates the masters.

    The update is that of the engine's kernel, which rounds unlike PyTorch's in the last place, or with `torch_adamw`
    PyTorch's own.
    """
    owner = {id(parameter): name for name, parameter in parts.named_parameters().items()}
    master = {name: parameter.detach().clone() for name, parameter in parts.named_parameters().items()}
    # Copied one by one, so that a tied weight has a gradient for each of its uses.
    blocks = [[copy.deepcopy(module).bfloat16() for module in block] for block in parts.blocks()]
    leaves: list[dict[str, nn.Parameter]] = []
    for block, twin in zip(parts.blocks(), blocks, strict=True):
        pairs = zip(block[0].parameters(), twin[0].parameters(), strict=True)
        leaves.append({owner[id(parameter)]: leaf for parameter, leaf in pairs})
    update = _TorchUpdate(master, optimizer) if torch_adamw else _KernelUpdate(master, optimizer)
    trained = Trained()
    for step in range(num_steps):
        for block_leaves in leaves:
            for name, leaf in block_leaves.items():
                leaf.data = to_bf16(master[name])
        micro_batches = batches(step)
        total = sum(num_targets(batch) for batch in micro_batches)
        gradients: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        loss_sum = 0.0
        for index, batch in enumerate(micro_batches):
            loss = _forward(blocks, batch, partial(block_seed, 0, step), index)
            loss_sum += loss.item()
            loss.backward(torch.full_like(loss, 1.0 / total))
            for number, block_leaves in enumerate(leaves):
                gradients[number, index] = {n: leaf.grad for n, leaf in block_leaves.items() if leaf.grad is not None}
                for leaf in block_leaves.values():
                    leaf.grad = None
        sums: dict[str, torch.Tensor] = {}
        for place in _order(len(blocks), len(micro_batches), horizontal=horizontal):
            for name, gradient in gradients[place].items():
                sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()
        scale = 1.0
        if max_grad_norm is not None:
            norm = math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in sums.values()))
            scale = min(1.0, max_grad_norm / (norm + 1e-6))
            trained.norms.append(norm)
        update(sums, scale, step + 1)
        trained.losses.append(loss_sum / total)
    trained.parameters = master
    return trained


def _order(num_blocks: int, num_micro_batches: int, *, horizontal: bool) -> list[tuple[int, int]]:
    """(block, micro-batch) in the order of the backward."""
    last = num_blocks - 1
    down = range(last, -1, -1)
    if horizontal:
        return [(block, index) for index in range(num_micro_batches) for block in down]
    return [(block, index) for block in down for index in snake(2 * last - block, num_micro_batches)]


def to_bf16(master: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest, ties away from zero."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


class _KernelUpdate:
    def __init__(self, master: dict[str, torch.Tensor], optimizer: gs.AdamW) -> None:
        self.master, self.optimizer = master, optimizer
        self.moments = {name: (torch.zeros_like(v), torch.zeros_like(v)) for name, v in master.items()}
        self.pool = _native.ThreadPool(1, None)

    def __call__(self, gradients: dict[str, torch.Tensor], scale: float, step: int) -> None:
        for name, gradient in gradients.items():
            value = self.master[name]
            optimizer = self.optimizer if value.dim() >= 2 else replace(self.optimizer, weight_decay=0.0)
            chunk = Fp32Chunk.of(value, *self.moments[name])
            update_fp32(self.pool, optimizer, chunk, Gradient.of(gradient), step=step, grad_scale=scale)


class _TorchUpdate:
    def __init__(self, master: dict[str, torch.Tensor], optimizer: gs.AdamW) -> None:
        self.master = {name: nn.Parameter(value) for name, value in master.items()}
        decays = {name: optimizer.weight_decay if value.dim() >= 2 else 0.0 for name, value in master.items()}
        groups = [{"params": [p], "weight_decay": decays[name]} for name, p in self.master.items()]
        self.adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)

    def __call__(self, gradients: dict[str, torch.Tensor], scale: float, step: int) -> None:
        for name, parameter in self.master.items():
            parameter.grad = gradients[name] * scale if name in gradients else None
        self.adamw.step()


def make_engine(parts: Parts | gs.Sequential, *directories: Path, **options: object) -> gs.Engine:
    model = parts.sequential() if isinstance(parts, Parts) else parts
    defaults = {"ram": "64MiB", "dtype": "float32", "alpha": 0.5, "chunk_params": 2048}
    return gs.Engine(model, OPTIMIZER, storage=directories, **{**defaults, **options})  # type: ignore[arg-type]
