"""How close a step comes to what its slowest resource allows, on a drive and a device of known speed.

The drive is the I/O engine's rate limit; the device is blocks that wait instead of computing, so that the cores are
free for the engine. Blocks have parameters, so all bytes flow: read, updated by the real optimizer and written.
Is an SSD-bound step as long as its bytes need, a compute-bound one as long as its compute, and one that needs both
equally as long as either? What do vertical order, weights that stay on the device, layers that share an activation,
moments that are compressed and moments in fewer bytes gain where the drive is the bound, and a late share of the update
when both are equally busy? And what does exact clipping cost then? Beside what was measured stands what the simulator
expects of the same schedule.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import tempfile
import time
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from step_options import Parser, count, positive  # type: ignore[import-not-found]
from torch import nn

import greedysnake as gs
from greedysnake.models.sequential import Batch
from greedysnake.ops import Kind, Lane, Op, Plan
from greedysnake.planning.costs import BlockTimes, Costs, Rates
from greedysnake.planning.observe import observe
from greedysnake.planning.simulate import forecast
from greedysnake.shapes import precision_of
from greedysnake.trace import Record, write_perfetto

ROWS = 4
BURST_S = 0.005
"""As much lateness as the drive's rate limit makes up for (native/io_limits.h)."""
ALPHAS = (0.0, 0.15, 0.2, 0.25, 0.3)
"""In theory a fifth is best at the knee: the forward has a quarter of the compute time and with a late share a of the
updates (2 + 22 a) / 26 of the SSD bytes."""


class Device:
    """Computes by waiting. A wait that the machine ends late makes the next one shorter, by as much as the rate limit
    of the drive makes up for: a device with kernels in its queue does not notice that the host woke up late."""

    def __init__(self, forward_s: float) -> None:
        self.forward_s = forward_s
        self._busy_until_s = 0.0
        self._gradient = torch.zeros(0)

    def gradient(self, shape: torch.Size) -> torch.Tensor:
        """Random, the same every time: that of other numbers than a training has would be compressed better."""
        if self._gradient.shape != shape:
            self._gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
        return self._gradient

    def compute(self, seconds: float) -> None:
        self._busy_until_s = max(self._busy_until_s, time.perf_counter() - BURST_S) + seconds
        time.sleep(max(0.0, self._busy_until_s - time.perf_counter()))


class Waiting(torch.autograd.Function):
    """A forward, and a backward that takes twice as long; the gradient of the weight is that of its device."""

    @staticmethod
    def forward(ctx: object, hidden: torch.Tensor, weight: torch.Tensor, device: Device) -> torch.Tensor:
        device.compute(device.forward_s)
        ctx.rest = (weight.shape, device)  # type: ignore[attr-defined]
        return hidden.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        shape, device = ctx.rest  # type: ignore[attr-defined]
        device.compute(2 * device.forward_s)
        return gradients[0], device.gradient(shape), None


class WaitingLayer(nn.Module):
    def __init__(self, num_params: int, device: Device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_params))
        self.device = device

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = Waiting.apply(hidden, self.weight, self.device)  # type: ignore[no-untyped-call]
        return output


class Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch["values"] + self.weight


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        return (hidden * self.weight).sum()


@dataclass(frozen=True)
class Setup:
    """A model, a device and a drive."""

    num_layers: int
    params_per_layer: int
    chunks_per_layer: int
    micro_batches: int
    compute_s: float
    """What the waits of one step add up to."""
    bytes_per_s: float
    alpha: float = 0.25
    schedule: str = "vertical"
    first_in_ram: bool = False
    """The embedding and the first layer live in RAM: the next step needs them as soon as they are updated."""
    max_grad_norm: float | None = None
    optimistic: bool = False
    moments: str = "float32"
    compress_moments: bool = False
    weights_stay: bool = False
    """On the device, from step to step: they are written, and never fetched."""
    width: int = 16
    """Of the tensors between blocks. They wait in RAM unless they are wide."""
    layers_per_block: int = 1

    @property
    def num_blocks(self) -> int:
        return math.ceil(self.num_layers / self.layers_per_block)

    @property
    def activation_bytes(self) -> int:
        """Of one that waits on the drive."""
        return 2 * ROWS * self.width if self.width > 16 else 0

    @property
    def forward_s(self) -> float:
        """A forward is one wait, a backward recomputes it and waits twice as long again."""
        return self.compute_s / (4 * self.num_layers * self.micro_batches)

    @property
    def bytes_per_param(self) -> float:
        """SSD traffic of a step: weights twice, once or for every micro-batch; the rest in and all of it out."""
        fetches = 0 if self.weights_stay else 2 if self.schedule == "vertical" else 2 * self.micro_batches
        chunk_params = self.params_per_layer // self.chunks_per_layer
        state = precision_of("bfloat16", self.moments).state_bytes(chunk_params) / chunk_params
        return 2 * fetches + state + (2 + state)

    @property
    def ssd_s(self) -> float:
        num_on_ssd = self.num_layers - self.first_in_ram
        activations = 2 * self.num_blocks * self.micro_batches * self.activation_bytes
        return (num_on_ssd * self.params_per_layer * self.bytes_per_param + activations) / self.bytes_per_s

    @property
    def placement(self) -> gs.Placement:
        """Embedding and head are one chunk each."""
        num_chunks = self.num_layers * self.chunks_per_layer + 2
        share = (1 + self.chunks_per_layer) / num_chunks if self.first_in_ram else 0.0
        return gs.Placement(
            weights_ram=share,
            optimizer_ram=share,
            weights_device=1.0 if self.weights_stay else 0.0,
            activations_ram=0.0 if self.activation_bytes else 1.0,
        )

    def layers(self) -> list[nn.Module]:
        device = Device(self.forward_s)
        return [WaitingLayer(self.params_per_layer, device) for _ in range(self.num_layers)]

    def batches(self) -> list[dict[str, torch.Tensor]]:
        return [{"values": torch.ones(ROWS, self.width, dtype=torch.bfloat16)} for _ in range(self.micro_batches)]


@dataclass(frozen=True)
class Measured:
    step_s: float
    """Median from the start of one step to the start of the next: other work on the machine disturbs some."""
    simulated_s: float
    num_records: int
    ssd_bytes: int


def simulated(setup: Setup, plan: Plan, state_share: float) -> float:
    """What the simulator expects of a step. Copies and updates of so few bytes take no time."""
    end, most = BlockTimes(0.0, 0.0), setup.layers_per_block
    counts = [min(most, setup.num_layers - first) for first in range(0, setup.num_layers, most)]
    times = [end, *(BlockTimes(count * setup.forward_s, 3 * count * setup.forward_s) for count in counts), end]
    rates = replace(Rates(setup.bytes_per_s, *[math.inf] * 4), state_share=state_share)
    costs = Costs(plan, rates, times, activation_bytes=setup.activation_bytes)
    return forecast(plan, costs, setup.micro_batches, kind=setup.schedule).step_s


def measure(setup: Setup, directory: Path, num_steps: int, trace: Path | None = None) -> Measured:
    """Trains for `num_steps` after those that fill the pipeline: the third is the first with tentative updates."""
    chunk_params = setup.params_per_layer // setup.chunks_per_layer
    with (
        tempfile.TemporaryDirectory(dir=directory) as storage,
        gs.Engine(
            gs.Sequential(
                Embed(setup.width),
                setup.layers(),
                Head(setup.width),
                num_targets=lambda batch: ROWS,
                layers_per_block=setup.layers_per_block,
            ),
            gs.AdamW(lr=1e-3, moments=setup.moments),
            storage=[storage],
            ram="256MiB",
            schedule=setup.schedule,
            alpha=setup.alpha,
            placement=setup.placement,
            chunk_params=chunk_params,
            io=gs.IoOptions(total_bytes_per_s=setup.bytes_per_s, piece_bytes=1 << 16),
            num_threads=1,
            max_grad_norm=setup.max_grad_norm,
            optimistic=setup.optimistic,
            compress_moments=setup.compress_moments,
            trace=True,
        ) as engine,
    ):
        batches = setup.batches()
        for _ in range(3 if setup.optimistic else 1):
            engine.step(batches)
        engine.records.clear()
        gc.collect()
        starts_s = [time.perf_counter()]
        moved_bytes = 0
        for _ in range(num_steps):
            result = engine.step(batches)
            starts_s.append(time.perf_counter())
            moved_bytes += result.ssd_read_bytes + result.ssd_write_bytes
        if trace is not None:
            write_perfetto(engine.records, trace)
        step_s = statistics.median(after - before for before, after in itertools.pairwise(starts_s))
        expected_s = simulated(setup, engine.plan, observe(engine.records, engine.plan).rates.state_share)
        return Measured(step_s, expected_s, len(engine.records) // num_steps, moved_bytes // num_steps)


def compute_alone(setup: Setup, num_steps: int) -> float:
    """Seconds a step's blocks take without the engine, recompute included."""
    layers, batches = setup.layers(), setup.batches()
    starts_s = [time.perf_counter()]
    for _ in range(num_steps):
        for layer in layers:
            for batch in batches:
                with torch.no_grad():
                    layer(batch["values"])
        for layer in layers:
            for batch in batches:
                layer(batch["values"].detach().requires_grad_()).sum().backward()
        starts_s.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(starts_s))


@dataclass(frozen=True)
class Row:
    """One claim: what was measured, what it is compared with, and what their ratio must reach."""

    name: str
    measured: Measured
    against: str
    other: Measured | float
    """Another step, or the seconds that no step can beat."""
    target: float

    @property
    def against_s(self) -> float:
        return self.other.step_s if isinstance(self.other, Measured) else self.other

    @property
    def ratio(self) -> float:
        """Of the two times, larger is better."""
        return self.against_s / self.measured.step_s

    @property
    def reached(self) -> bool:
        return self.ratio >= self.target


def ssd_bound(base: Setup, directory: Path, num_steps: int) -> Row:
    setup = replace(base, compute_s=0.3 * base.ssd_s)
    return Row("SSD-bound step", measure(setup, directory, num_steps), "bytes / rate", setup.ssd_s, 1 / 1.1)


def compute_bound(base: Setup, directory: Path, num_steps: int) -> Row:
    setup = replace(base, compute_s=1.2, bytes_per_s=base.bytes_per_s * base.ssd_s / 0.4)
    alone_s = compute_alone(setup, num_steps)
    return Row("compute-bound step", measure(setup, directory, num_steps), "compute alone", alone_s, 1 / 1.1)


def vertical_or_horizontal(base: Setup, directory: Path, num_steps: int) -> Row:
    setup = replace(base, micro_batches=8, compute_s=0.3 * base.ssd_s)
    vertical = measure(setup, directory, num_steps)
    horizontal = measure(replace(setup, schedule="horizontal"), directory, num_steps)
    return Row("vertical, M=8, SSD-bound", vertical, "horizontal", horizontal, 2.0)


def compact_moments(base: Setup, directory: Path, num_steps: int) -> list[Row]:
    """Moments in fewer bytes, where the drive is the bound: to gain at least 0.95 of what the bytes promise."""
    setup = replace(base, compute_s=0.3 * base.ssd_s)
    exact = measure(setup, directory, num_steps)
    rows = []
    for moments in ("bfloat16", "int8"):
        compact = replace(setup, moments=moments)
        target = 0.95 * setup.bytes_per_param / compact.bytes_per_param
        rows.append(Row(f"moments in {moments}", measure(compact, directory, num_steps), "float32", exact, target))
    return rows


def compressed_moments(base: Setup, directory: Path, num_steps: int) -> Row:
    """Where the drive is the bound: to gain at least 0.95 of what the bytes promise that crossed it."""
    setup = replace(base, compute_s=0.3 * base.ssd_s)
    compressed, whole = (
        measure(replace(setup, compress_moments=compress), directory, num_steps) for compress in (True, False)
    )
    return Row("moments compressed", compressed, "not compressed", whole, 0.95 * whole.ssd_bytes / compressed.ssd_bytes)


def weights_that_stay(base: Setup, directory: Path, num_steps: int) -> Row:
    """On the device, where the drive is the bound: to gain at least 0.95 of what the bytes promise."""
    setup = replace(base, compute_s=0.3 * base.ssd_s)
    staying = replace(setup, weights_stay=True)
    gain = setup.bytes_per_param / staying.bytes_per_param
    stayed, fetched = (measure(each, directory, num_steps) for each in (staying, setup))
    return Row("weights stay on the device", stayed, "fetched", fetched, 0.95 * gain)


def layers_in_pairs(base: Setup, directory: Path, num_steps: int) -> Row:
    """Where activations wait on the drive and take 0.6 of the bytes that the state takes: a pair keeps one for both
    layers, which is to gain at least 0.95 of what the bytes promise."""
    state_bytes = base.num_layers * base.params_per_layer * base.bytes_per_param
    granules = round(0.6 * state_bytes / (2 * base.num_layers * base.micro_batches) / 4096)
    alone = replace(base, width=granules * 4096 // (2 * ROWS))
    alone = replace(alone, compute_s=0.3 * alone.ssd_s)
    pairs = replace(alone, layers_per_block=2)
    measured, other = (measure(each, directory, num_steps) for each in (pairs, alone))
    return Row("layers in pairs", measured, "one by one", other, 0.95 * alone.ssd_s / pairs.ssd_s)


def knee_on_ssd(base: Setup, directory: Path, num_steps: int) -> Row:
    """SSD and compute take equally long, and what the next step needs first lives on SSD like the rest."""
    setup = replace(base, compute_s=base.ssd_s)
    return Row("knee, all on SSD", measure(setup, directory, num_steps), "bytes / rate", setup.ssd_s, 0.92)


def knee(base: Setup, directory: Path, num_steps: int) -> tuple[Row, dict[float, Measured]]:
    """SSD and compute take equally long. Without late updates the SSD idles in most of the forward."""
    base = replace(base, first_in_ram=True)
    setup = replace(base, compute_s=base.ssd_s)
    steps = {alpha: measure(replace(setup, alpha=alpha), directory, num_steps) for alpha in ALPHAS}
    best = min(steps, key=lambda alpha: steps[alpha].step_s)
    return Row(f"knee, alpha={best:g}", steps[best], "alpha=0", steps[0.0], 1.12), steps


def clipping(base: Setup, directory: Path, num_steps: int, unclipped: Measured) -> list[Row]:
    """The same knee with a norm that is computed and never reached: updates that wait for it have the forward only."""
    base = replace(base, first_in_ram=True, alpha=0.2, max_grad_norm=1e9)
    setup = replace(base, compute_s=base.ssd_s)
    waiting = measure(setup, directory, num_steps)
    optimistic = measure(replace(setup, optimistic=True), directory, num_steps)
    return [
        Row("knee, clipping, optimistic", optimistic, "no clipping", unclipped, 0.95),
        Row("knee, clipping, optimistic", optimistic, "waiting", waiting, 1.4),
    ]


def tracing_share(base: Setup, directory: Path) -> float:
    """Share of a step that goes into recording it: the cost of one record times their number. Two runs differ by
    more than that, so the cost is measured by itself."""
    setup = replace(base, compute_s=base.ssd_s)
    measured = measure(setup, directory, 1)
    op = Op(Kind.FORWARD, 3, 1)
    kept: list[Record] = []
    number = 20_000
    cost_s = timeit.timeit(lambda: kept.append(Record(1, op, Lane.COMPUTE, 0.0, 1.0, 0)), number=number) / number
    return cost_s * measured.num_records / measured.step_s


def table(rows: Sequence[Row], knee_steps: Mapping[float, Measured], share: float) -> str:
    lines = [f"{'':<26}{'step s':>8}{'expected':>10}  {'against':<14}{'s':>8}{'expected':>10}{'ratio':>8}{'target':>8}"]
    for row in rows:
        expected = f"{row.other.simulated_s:.3f}" if isinstance(row.other, Measured) else ""
        lines.append(
            f"{row.name:<26}{row.measured.step_s:>8.3f}{row.measured.simulated_s:>10.3f}  {row.against:<14}"
            f"{row.against_s:>8.3f}{expected:>10}{row.ratio:>8.3f}{row.target:>8.3f}{'' if row.reached else '  missed'}"
        )
    at_knee = (f"alpha={alpha:g} {step.step_s:.3f} ({step.simulated_s:.3f})" for alpha, step in knee_steps.items())
    lines.append(f"at the knee, s (and as the simulator expects): {', '.join(at_knee)}")
    lines.append(f"recording the trace takes {share:.2%} of a step")
    return "\n".join(lines)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=6, help="steps that are measured in each run")
    parser.add_argument("--layers", type=count, default=16)
    parser.add_argument("--params", type=count, default=65_536, help="parameters of a layer")
    parser.add_argument("--chunks", type=count, default=8, help="chunks of a layer")
    parser.add_argument("--rate", type=positive, default=22e6, help="bytes per second of the drive")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where the drive is")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(given)
    if arguments.params % arguments.chunks:
        parser.error(f"--chunks {arguments.chunks} with --params {arguments.params}: give a number that divides it")
    if not arguments.directory.is_dir():
        parser.error(f"--directory {arguments.directory} is no directory: give one that exists")
    return arguments  # type: ignore[no-any-return]


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    base = Setup(arguments.layers, arguments.params, arguments.chunks, 2, 0.0, arguments.rate)
    makers = [ssd_bound, compute_bound, knee_on_ssd, vertical_or_horizontal, weights_that_stay, layers_in_pairs]
    makers += [compressed_moments]
    rows = [make(base, arguments.directory, arguments.steps) for make in makers]
    rows += compact_moments(base, arguments.directory, arguments.steps)
    row, knee_steps = knee(base, arguments.directory, arguments.steps)
    rows += [row, *clipping(base, arguments.directory, arguments.steps, knee_steps[0.2])]
    share = tracing_share(base, arguments.directory)
    if arguments.json:
        result = {
            "setup": asdict(base),
            "rows": [
                {**asdict(row), "against_s": row.against_s, "ratio": row.ratio, "reached": row.reached} for row in rows
            ],
            "knee": {alpha: asdict(step) for alpha, step in knee_steps.items()},
            "tracing_share": share,
        }
        print(json.dumps(result, indent=2))
        return
    print(table(rows, knee_steps, share))


if __name__ == "__main__":
    main()
