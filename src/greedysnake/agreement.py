"""Trains a small copy of the user's own model twice, in plain PyTorch with transformers and here, and compares.

The copy has the same classes and kinds of layer in small sizes; optimizer, clipping, alpha, placement and schedule are
the user's. Both compute in float32, so that they must agree and not merely resemble each other.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from greedysnake.config import Config
from greedysnake.models.export import export_model
from greedysnake.models.huggingface import CausalLM, load_model
from greedysnake.models.shrink import shrink
from greedysnake.preparation import adamw, choose_device, why_not_compiled
from greedysnake.run_model import model_configuration
from greedysnake.runtime.engine import Engine
from greedysnake.runtime.flat import decays_by_default
from greedysnake.runtime.optimizer import AdamW

NUM_STEPS, NUM_LAYERS, NUM_MICRO_BATCHES = 4, 4, 3
BATCH, LENGTH = 2, 24
CHUNK_PARAMS = 1 << 14
"""Small, so that the small copy has several chunks in every layer."""

LOSS_TOLERANCE = 1e-5
"""Relative. float32 has 2**-24 per operation; what adds up in a different order differs by a little more."""
WEIGHT_TOLERANCE = 1e-3
"""Of the way that the weights went. AdamW divides by the size of the gradient, so where a gradient is nearly 0 its
rounding errors become steps of full size; they are few."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """Losses of all steps, and where the weights ended."""

    losses: list[float]
    weights: Mapping[str, torch.Tensor]


def compare(config: Config, console: Console) -> bool:
    """Prints the agreement step by step; tells whether it is within the tolerances."""
    full = model_configuration(config)
    small = shrink(full, min(NUM_LAYERS, full.get_text_config().num_hidden_layers))
    device = choose_device(config.engine.device)
    batches = [make_batches(step, small.get_text_config().vocab_size) for step in range(NUM_STEPS)]
    options: Any = {"seed": config.training.seed, "layers_per_block": config.engine.layers_per_block or 1}
    model = load_model(small, **options)
    with tempfile.TemporaryDirectory(prefix="greedysnake-verify-") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a temporary directory without O_DIRECT is no reason to worry here
        optimizer = adamw(config.training)
        exact = replace(optimizer, moments="float32")
        start, ours = train_here(config, exact, model, batches, Path(name), device)
        plain = train_plainly(config, Path(name) / "start", batches, device)
        rounded = None
        if optimizer != exact:
            again = load_model(small, **options)
            rounded = train_here(config, optimizer, again, batches, Path(name) / "rounded", device)[1]
    title = f"{small.model_type}, {small.num_hidden_layers} small layers, float32 on {device}"
    console.print(title, highlight=False, markup=False)
    for step, (mine, theirs) in enumerate(zip(ours.losses, plain.losses, strict=True)):
        line = f"step {step + 1}  loss here {mine:.7f}  in PyTorch {theirs:.7f}  difference {abs(mine - theirs):.1e}"
        console.print(line, highlight=False)
    loss_error = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, plain.losses, strict=True))
    weight_error = _weight_error(start, ours.weights, plain.weights)
    passed = loss_error <= LOSS_TOLERANCE and weight_error <= WEIGHT_TOLERANCE
    verdict = "[green]they agree[/green]" if passed else "[red]they do not agree[/red]"
    console.print(
        f"{verdict}: losses to {loss_error:.1e} of them (at most {LOSS_TOLERANCE:.0e}), "
        f"weights to {weight_error:.1e} of the way they went (at most {WEIGHT_TOLERANCE:.0e})",
        highlight=False,
        soft_wrap=True,
    )
    if rounded:
        console.print(
            f"this was with moments in float32; in {optimizer.moments} the last loss is {rounded.losses[-1]:.7f}, and "
            f"the weights are off by {_weight_error(start, rounded.weights, plain.weights):.1e} of the way they went",
            highlight=False,
            soft_wrap=True,
        )
    return passed


def make_batches(step: int, vocabulary: int) -> list[Batch]:
    """Micro-batches of random tokens, of which a third is no target."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for _ in range(NUM_MICRO_BATCHES):
        ids = torch.randint(0, vocabulary, (BATCH, LENGTH), generator=generator)
        ignored = torch.rand(BATCH, LENGTH, generator=generator) < 1 / 3
        batches.append({"input_ids": ids, "labels": ids.masked_fill(ignored, -100)})
    return batches


def train_here(
    config: Config,
    optimizer: AdamW,
    model: CausalLM,
    steps: Sequence[Sequence[Batch]],
    directory: Path,
    device: str,
) -> tuple[Mapping[str, torch.Tensor], Training]:
    """(the weights at the start, the training); the folder `start` in `directory` gets the model at the start."""
    options = config.engine
    with Engine(
        model,
        optimizer,
        storage=[directory / "store"],
        ram="1GiB",
        device=device,
        dtype="float32",
        schedule=options.schedule,
        alpha=options.alpha,
        max_grad_norm=config.training.clip_norm,
        placement=options.placement,
        slots=options.slots,
        optimistic=config.may_be_optimistic,
        chunk_params=CHUNK_PARAMS,
        compile=why_not_compiled(config, device) is None,
    ) as engine:
        export_model(engine, model, directory / "start", dtype="float32")
        losses = [engine.step(batches).loss for batches in steps]
        export_model(engine, model, directory / "end", dtype="float32")
    return _weights(_load(directory / "start", "cpu")), Training(losses, _weights(_load(directory / "end", "cpu")))


def train_plainly(config: Config, folder: Path, steps: Sequence[Sequence[Batch]], device: str) -> Training:
    """transformers' whole model, gradient accumulation, clip_grad_norm_ and torch.optim.AdamW."""
    model = _load(folder, device).train()
    optimizer = _torch_adamw(config, model)
    losses = []
    for batches in steps:
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        total = 0.0
        for batch, count in zip(batches, counts, strict=True):
            moved = {name: value.to(device) for name, value in batch.items()}
            loss = model(**moved, use_cache=False).loss * count / sum(counts)
            loss.backward()
            total += loss.item()
        if config.training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Training(losses, _weights(model))


def _torch_adamw(config: Config, model: torch.nn.Module) -> torch.optim.AdamW:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decaying = [parameter for name, parameter in named if decays_by_default(name, parameter)]
    others = [parameter for name, parameter in named if not decays_by_default(name, parameter)]
    options = adamw(config.training)
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)


def _load(folder: Path, device: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.to(device)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def _weight_error(
    start: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]
) -> float:
    """How far the two ends lie apart, as a share of the way from the start."""
    apart = sum(float((ours[name] - plain[name]).double().square().sum()) for name in plain)
    way = sum(float((plain[name] - start[name]).double().square().sum()) for name in plain)
    return float((apart / way) ** 0.5) if way else float(apart > 0)
