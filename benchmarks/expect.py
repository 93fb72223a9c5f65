"""What the simulator expects of the runs of benchmarks/rows.py, on a machine known by a few rates. Needs no GPU.

    python benchmarks/expect.py --drive 2.5e9
    python benchmarks/expect.py alpha clipping --drive 3e9 -- --micro-batches 32

Runs of greedysnake alone are expected; a run that holds its drive at a rate has that one instead of --drive. Compute is
modelled by operations: layers at --flops, the head at --head-flops. The defaults are those of the H200 in
docs/performance.md. What stands behind -- goes to every run, as with rows.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import rows
import step
from step_options import Parser, positive, rate_limits
from step_systems import tokens_per_step

from greedysnake.ops import Plan
from greedysnake.placement import Placement, Slots, chunk_homes, keep_on_device
from greedysnake.planning.costs import BlockTimes, Costs, Rates
from greedysnake.planning.simulate import Forecast, forecast
from greedysnake.shapes import block_shape, precision_of

FLOPS, HEAD_FLOPS = 580e12, 400e12
"""docs/performance.md: a layer's backward, 3.4e12 operations for a micro-batch, takes 5.95 ms; the head's 3.2e12 take
0.13 s / 16."""
PCIE_BYTES_PER_S, CPU_PARAMS_PER_S, CPU_BYTES_PER_S = 55e9, 3.3e9, 40e9
"""Of the same machine: 0.53 s of updates for 1.742 billion parameters; 0.17 s for the squares of their gradients."""

STATE_SHARES = {"float32": 0.885, "bfloat16": 0.81, "int8": 1.0}
"""What compressed moments leave of the optimizer state's bytes, in a training's third to fifth step: docs/benchmarks.md
has how much crosses the drives in all."""


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that the engine would make for the model of step.py."""
    from step_options import placement_values, slot_values

    placement, slots = Placement(**placement_values(options)), Slots(**slot_values(options))
    end, chunk = options.vocab * options.hidden, options.chunk_params
    shapes = [
        block_shape("embed", end, 0, chunk, "ends"),
        *(
            block_shape(f"layers.{number}", count * layer_params(options), 0, chunk, "layers")
            for number, count in enumerate(layers_of_blocks(options))
        ),
        block_shape("head", end + options.hidden, 0, chunk, "ends"),
    ]
    blocks = keep_on_device(shapes, placement)
    clips = options.clip is not None
    homes = chunk_homes(
        blocks,
        placement,
        alpha=options.alpha,
        clipping=clips,
        has_ssd=bool(options.storage),
        tentative=options.optimistic,
    )
    return Plan(blocks, homes, precision_of("bfloat16", options.moments), placement, slots, clips)


def layers_of_blocks(options: argparse.Namespace) -> list[int]:
    most = options.layers_per_block
    return [min(most, options.layers - first) for first in range(0, options.layers, most)]


def layer_params(options: argparse.Namespace) -> int:
    hidden, of_groups = options.hidden, options.hidden // options.heads * options.kv_heads
    return int(2 * hidden * hidden + 2 * hidden * of_groups + 3 * hidden * options.mlp + 2 * hidden)


def times_of(options: argparse.Namespace, flops: float, head_flops: float) -> list[BlockTimes]:
    """By operations. A recompute leaves out the block's last product, which only its output needs."""
    tokens = options.micro_batch * options.sequence
    forward = tokens * (2 * layer_params(options) + 4 * options.hidden * options.sequence)
    last_product = tokens * 2 * options.hidden * options.mlp
    layers = [
        BlockTimes(count * forward / flops, (3 * count * forward - last_product) / flops)
        for count in layers_of_blocks(options)
    ]
    head = tokens * 6 * options.vocab * options.hidden / head_flops
    return [BlockTimes(0.0, 0.0), *layers, BlockTimes(head / 3, head)]


def expected(options: argparse.Namespace, machine: argparse.Namespace) -> Forecast:
    plan = plan_of(options)
    drive = rate_limits(options).get("total_bytes_per_s", machine.drive)
    share = 1.0 if options.no_compress_moments else STATE_SHARES[options.moments]
    rates = Rates(drive, PCIE_BYTES_PER_S, PCIE_BYTES_PER_S, CPU_PARAMS_PER_S, CPU_BYTES_PER_S, state_share=share)
    activation_bytes = 2 * options.micro_batch * options.sequence * options.hidden
    times = times_of(options, machine.flops, machine.head_flops)
    costs = Costs(plan, rates, times, activation_bytes=activation_bytes)
    return forecast(plan, costs, options.micro_batches, kind=options.schedule)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(rows.ROWS)}; all of them by default")
    parser.add_argument("--drive", type=positive, required=True, help="bytes per second, reads and writes together")
    parser.add_argument("--flops", type=positive, default=FLOPS, help="operations per second of the layers")
    parser.add_argument("--head-flops", type=positive, default=HEAD_FLOPS, help="and of the head")
    mine, more = rows.split(arguments)
    options: argparse.Namespace = parser.parse_args(mine)
    unknown = [name for name in options.rows if name not in rows.ROWS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no row: give some of {', '.join(rows.ROWS)}")
    options.rows, options.more = options.rows or list(rows.ROWS), more
    return options


def main(arguments: Sequence[str]) -> None:
    machine = parse(arguments)
    print(f"{'run':<22}{'drive GB/s':>11}{'step s':>9}{'tokens/s':>10}{'compute':>9}{'SSD':>6}{'SSD GB':>8}")
    for name in machine.rows:
        row = rows.ROWS[name]
        for run in row.runs:
            options = step.parse(rows.arguments_of(run, row, more=machine.more))
            if "greedysnake" not in options.systems:
                continue
            found = expected(options, machine)
            drive = rate_limits(options).get("total_bytes_per_s", machine.drive)
            gigabytes = found.least_s.get("ssd", 0.0) * drive / 1e9
            shares = [found.least_s.get(link, 0.0) / found.step_s for link in ("compute", "ssd")]
            print(
                f"{run:<22}{drive / 1e9:>11.2f}{found.step_s:>9.2f}{tokens_per_step(options) / found.step_s:>10.0f}"
                f"{shares[0]:>9.1%}{shares[1]:>6.0%}{gigabytes:>8.1f}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
