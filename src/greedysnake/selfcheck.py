"""A short proof that this installation works: native kernels, I/O, and training from SSD against plain PyTorch."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

from greedysnake import _native
from greedysnake.errors import GreedySnakeError, StorageError
from greedysnake.models.sequential import Batch, Sequential
from greedysnake.placement import Placement
from greedysnake.runtime.engine import Engine
from greedysnake.runtime.io import IoEngine, io_uring_available
from greedysnake.runtime.optimizer import AdamW, Fp32Chunk, Gradient, update_fp32
from greedysnake.threads import torch_threads

NUM_STEPS = 20
NUM_LAYERS = 4
VOCAB, HIDDEN, WIDTH, LENGTH = 64, 64, 192, 32
OPTIMIZER = AdamW(lr=3e-3)


class CheckFailed(Exception):
    """A check found a difference; the message says which."""


@dataclass(frozen=True)
class Check:
    """One line of the table; `run(directory)` returns what to print, or raises."""

    name: str
    run: Callable[[Path], str]


def run_checks(console: Console, directory: Path | None = None) -> bool:
    """Run all checks in a temporary directory, print a line for each, and tell whether all passed."""
    checks = [
        Check("split and join", check_split),
        Check("AdamW kernels", check_adamw),
        *(Check(f"I/O by {backend}", partial(check_io, backend)) for backend in _backends()),
        Check("training from SSD", check_training),
        Check("checkpoint and resume", check_resume),
    ]
    num_failed = 0
    begin = time.perf_counter()
    with _temporary_directory(directory) as name, torch_threads(1):
        for number, check in enumerate(checks):
            place = Path(name) / str(number)
            place.mkdir()
            num_failed += not _passes(console, check, place)
    verdict = f"[red]{num_failed} of {len(checks)} failed[/red]" if num_failed else "[green]all ok[/green]"
    console.print(f"{verdict}, {time.perf_counter() - begin:.1f} s", highlight=False)
    return num_failed == 0


def _passes(console: Console, check: Check, place: Path) -> bool:
    start_s = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a temporary directory without O_DIRECT is no reason to worry here
            text, passed = check.run(place), True
    except (CheckFailed, GreedySnakeError) as error:
        text, passed = str(error), False
    word = "[green]ok    [/green]" if passed else "[red]failed[/red]"
    elapsed_s = time.perf_counter() - start_s
    console.print(f"{check.name:<22} {word} {elapsed_s:5.1f} s  {text}", highlight=False, soft_wrap=True)
    return passed


def check_split(_: Path) -> str:
    """fp32 -> bf16 weight and int16 residual -> fp32 must give the same bits, by every instruction set."""
    count = 1 << 20
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, torch.tensor([0.0]))
    weight, residual, joined = torch.empty_like(values, dtype=torch.bfloat16), values.short(), torch.empty_like(values)
    pool = _native.ThreadPool(1)
    for isa in _native.available_isas():
        _native.split(pool, values.data_ptr(), weight.data_ptr(), residual.data_ptr(), count, isa)
        _native.join(pool, weight.data_ptr(), residual.data_ptr(), joined.data_ptr(), count, isa)
        _require(torch.equal(joined.view(torch.int32), values.view(torch.int32)), f"{isa} does not restore its input")
    return f"{count} random values restored bit for bit by {', '.join(_native.available_isas())}"


def check_adamw(_: Path) -> str:
    """Ten steps must agree with torch.optim.AdamW in fp64, and every instruction set with every other to the bit."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10_000, generator=generator)
    grads = [torch.randn(10_000, generator=generator) for _ in range(10)]
    exact = nn.Parameter(start.double())
    reference = torch.optim.AdamW([exact], lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay)
    for grad in grads:
        exact.grad = grad.double()
        reference.step()
    pool = _native.ThreadPool(1)
    results = []
    for isa in _native.available_isas():
        weight, moments = start.clone(), torch.zeros(2, len(start))
        chunk = Fp32Chunk.of(weight, moments[0], moments[1])
        for number, grad in enumerate(grads):
            update_fp32(pool, OPTIMIZER, chunk, Gradient.of(grad), step=number + 1, isa=isa)
        results.append(weight)
    _require(all(torch.equal(results[0], other) for other in results), "instruction sets disagree")
    difference = float((results[0].double() - exact.detach()).abs().max())
    # Ten roundings of numbers below 8 to fp32.
    _require(difference < 10 * 2.0**-22, f"off torch.optim.AdamW by {difference:.1e}")
    return f"within {difference:.0e} of torch.optim.AdamW in fp64"


def check_io(backend: str, directory: Path) -> str:
    """What is written must be read back."""
    nbytes = 16 << 20
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy().tobytes()
    memory = mmap.mmap(-1, 2 * nbytes)
    memory[:nbytes] = data
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with IoEngine(backend) as engine, engine.open(directory / "file", create=True) as file:
        engine.wait(engine.submit("write", file, 0, address, nbytes))
        file.sync()
        engine.wait(engine.submit("read", file, 0, address + nbytes, nbytes))
        _require(memory[nbytes:] == data, "what was read is not what was written")
        return f"{nbytes >> 20} MiB written and read back{' past the page cache' if file.direct else ''}"


def check_training(directory: Path) -> str:
    """The engine, with all weights and optimizer state on SSD, must train as plain PyTorch does."""
    expected = train_plainly(make_modules())
    modules = make_modules()
    with _engine(modules, directory) as engine:
        losses = [engine.step(make_batches(step)).loss for step in range(NUM_STEPS)]
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
    # Both compute in fp32 and add the gradients of micro-batches in another order.
    _require(difference < 1e-4, f"losses differ from plain PyTorch by up to {difference:.1e}")
    _require(losses[-1] < losses[0], f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    return f"{NUM_STEPS} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, within {difference:.0e} of plain PyTorch"


def check_resume(directory: Path) -> str:
    """A run that stops at a checkpoint and is resumed must give the losses of one that never stopped."""
    half = NUM_STEPS // 2
    with _engine(make_modules(), directory) as engine:
        for step in range(half):
            engine.step(make_batches(step))
        engine.save()
        expected = [engine.step(make_batches(step)).loss for step in range(half, NUM_STEPS)]
    with _engine(make_modules(), directory, resume=True) as engine:
        losses = [engine.step(make_batches(step)).loss for step in range(engine.num_steps, NUM_STEPS)]
    _require(losses == expected, "the resumed run has other losses")
    return f"stopped after step {half} and resumed: the same losses to the bit"


class Embed(nn.Module):
    """Tokens to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, HIDDEN))

    def forward(self, batch: Batch) -> torch.Tensor:
        return functional.embedding(batch["ids"], self.table)


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.net(hidden)
        return hidden + inner


class Head(nn.Module):
    """Vectors to the summed loss."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(HIDDEN, VOCAB)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(self.logits(hidden).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def make_modules() -> list[nn.Module]:
    """Embedding, layers and head; the same values at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [Embed(), *(Layer() for _ in range(NUM_LAYERS)), Head()]


def make_batches(step: int) -> list[Batch]:
    """Three micro-batches in which each token follows from the one before."""
    generator = torch.Generator().manual_seed(step)
    batches: list[Batch] = []
    for _ in range(3):
        ids = torch.randint(0, VOCAB, (4, LENGTH), generator=generator)
        batches.append({"ids": ids, "labels": (ids * 5 + 1) % VOCAB})
    return batches


def train_plainly(modules: list[nn.Module]) -> list[float]:
    """Gradient accumulation and torch.optim.AdamW; the loss of every step."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=OPTIMIZER.lr)
    losses = []
    for step in range(NUM_STEPS):
        batches = make_batches(step)
        num_targets = sum(batch["labels"].numel() for batch in batches)
        total = 0.0
        for batch in batches:
            hidden = modules[0](batch)
            for layer in modules[1:-1]:
                hidden = layer(hidden)
            loss = modules[-1](hidden, batch)
            (loss / num_targets).backward()
            total += loss.item()
        adamw.step()
        adamw.zero_grad()
        losses.append(total / num_targets)
    return losses


def _engine(modules: list[nn.Module], directory: Path, *, resume: bool = False) -> Engine:
    model = Sequential(modules[0], modules[1:-1], modules[-1], num_targets=lambda batch: batch["labels"].numel())
    nothing_in_ram = Placement(activations_ram=0.0, gradients_ram=0.0)
    return Engine(
        model, OPTIMIZER, storage=[directory], ram="64MiB", dtype="float32", placement=nothing_in_ram, resume=resume
    )


def _temporary_directory(directory: Path | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="greedysnake-selfcheck-", dir=directory)
    except OSError as error:
        raise StorageError(
            f"no temporary directory can be made in {directory or tempfile.gettempdir()} ({error.strerror}): "
            "give another place, as in greedysnake selfcheck DIR"
        ) from error


def _backends() -> list[str]:
    return ["io_uring", "threads"] if io_uring_available()[0] else ["threads"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckFailed(message)
