"""What `plan` found, for people and for programs. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from greedysnake.placement import Home
from greedysnake.report.progress import count_text, home_table
from greedysnake.sizes import format_size

if TYPE_CHECKING:
    from greedysnake.config import Config
    from greedysnake.measuring import Machine
    from greedysnake.planner import Option, Planned

DAY_S = 86400
UNUSED_RAM = 0.1
"""Of the budget: less is not worth a word."""
LINKS = (("compute", ("compute",)), ("ssd", ("ssd",)), ("pcie", ("h2d", "d2h")), ("cpu", ("cpu",)))
"""Columns, and the links whose busiest they show."""


def print_plan(console: Console, planned: Planned, config: Config, *, with_homes: bool = True) -> None:
    """`config` is the one that was planned."""
    homes = [home_table(planned.chosen.footprint, planned.chosen.num_ranks), ""] if with_homes else []
    text = "\n".join([plan_text(planned), *_unused_ram(planned, config)])
    for part in (machine_text(planned.machine, config), "", *homes, plan_table(planned), text):
        console.print(part, highlight=False, soft_wrap=True)


def machine_text(machine: Machine, config: Config) -> str:
    """What was measured."""
    rates, training = machine.rates, config.training
    alone = f"{_giga(rates.ssd_read_bytes_per_s)} and {_giga(rates.ssd_write_bytes_per_s)} in one direction alone"
    layers = machine.times[1:-1] or machine.times
    forward_s, backward_s = (max(getattr(each, name) for each in layers) for name in ("forward_s", "backward_s"))
    shape = f"{training.per_device_train_batch_size} x {training.sequence_length}"
    what = "a layer" if machine.layers_per_block == 1 else f"{machine.layers_per_block} layers"
    return "\n".join(
        [
            f"drives: {_giga(rates.ssd_bytes_per_s)} GB/s reading and writing, {alone}",
            f"device: {machine.device}; {_giga(rates.h2d_bytes_per_s)} GB/s there, {_giga(rates.d2h_bytes_per_s)} back",
            f"{what}: {1e3 * forward_s:.3g} ms forward, {1e3 * backward_s:.3g} ms backward for {shape} tokens",
            f"updates: {_giga(rates.cpu_params_per_s)} billion parameters per second",
        ]
    )


def plan_table(planned: Planned) -> Table:
    """The run as configured, as planned, and with larger steps."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("batches", "tokens", "step", "tokens/s", *(name for name, _ in LINKS)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, option in _rows(planned):
        training, found = option.config.training, option.forecast
        shares = (max(found.least_s.get(link, 0.0) for link in links) / found.step_s for _, links in LINKS)
        table.add_row(
            name,
            str(training.gradient_accumulation_steps),
            count_text(option.num_tokens),
            f"{found.step_s:.3g} s",
            count_text(round(option.tokens_per_s)),
            *(f"{share:.0%}" for share in shares),
        )
    return table


def plan_text(planned: Planned) -> str:
    """What follows from it."""
    given, chosen = planned.given, planned.chosen
    changes = list(_changes(given, chosen))
    last = planned.larger[-1] if planned.larger else chosen
    lines = [
        f"batches: micro-batches of a step{_of_each(chosen)}; last columns: share of the step that a resource needs, "
        "the bound has 100%",
        f"best with {', '.join(changes)}" if changes else "no other alpha or number of slots was found to be faster",
        f"{format_size(chosen.disk_bytes)} of disk, room for checkpoints included; "
        f"{chosen.written_bytes / 1e9:.3g} GB are written to SSD per step, "
        f"{chosen.written_bytes / chosen.forecast.step_s * DAY_S / 1e12:.3g} TB per day",
    ]
    if chosen.clipped and chosen.clipped.step_s > 1.01 * chosen.forecast.step_s:
        lines.insert(2, f"a step that is clipped waits for the norm and takes {chosen.clipped.step_s:.3g} s")
    room, needed = planned.machine.room_bytes, chosen.footprint.device_bytes
    if room is not None and needed > room:
        lines.append(
            f"it will not fit: the device has {format_size(max(0, room))} beside what computing needs, and buffers and "
            f"homes there take {format_size(needed)}: lower placement.gradients_device, slots.weights or the batch"
        )
    count = last.config.training.gradient_accumulation_steps
    if not planned.is_saturated(last):
        lines.append(f"the device is not busy all the time with {count} micro-batches either")
    elif last is chosen:
        lines.append("the device is busy all the time: larger steps would be no faster")
    else:
        tokens = count_text(last.num_tokens)
        lines.append(f"the device is busy all the time from {count} micro-batches on, {tokens} tokens per step")
    return "\n".join(lines)


def _unused_ram(planned: Planned, config: Config) -> list[str]:
    """A configuration that a plan wrote is one of these."""
    footprint = planned.chosen.footprint
    unused = footprint.ram_budget_bytes - footprint.ram_bytes
    on_ssd = any(footprint.homes[name].get(Home.SSD) for name in ("weights", "optimizer state"))
    if config.engine.fill_ram or not on_ssd or unused < UNUSED_RAM * footprint.ram_budget_bytes:
        return []
    return [
        f"{format_size(unused)} of engine.ram are not used, as engine.fill_ram is false: engine.fill_ram=true "
        "engine.placement={} lets what fits live there"
    ]


def _of_each(option: Option) -> str:
    return "" if option.num_ranks == 1 else f" on each of {option.num_ranks} ranks"


def as_json(planned: Planned) -> dict[str, object]:
    return {
        "device": planned.machine.device,
        "ranks": planned.given.num_ranks,
        "device_room_bytes": planned.machine.room_bytes,
        "rates": {name: _finite(value) for name, value in vars(planned.machine.rates).items()},
        "times": [vars(each) for each in planned.machine.times],
        **{
            name.replace(" ", "_"): _option_json(option)
            for name, option in (("as configured", planned.given), ("as planned", planned.chosen))
        },
        "larger": [_option_json(option) for option in planned.larger],
        "compact": [_option_json(option) for option in planned.compact],
    }


def _option_json(option: Option) -> dict[str, object]:
    engine, plan = option.config.engine, option.footprint.plan
    return {
        "micro_batches": option.config.training.gradient_accumulation_steps,
        "tokens_per_step": option.num_tokens,
        "step_s": option.forecast.step_s,
        "tokens_per_s": option.tokens_per_s,
        "clipped_step_s": option.clipped.step_s if option.clipped else None,
        "bound": option.forecast.bound,
        "least_s": dict(option.forecast.least_s),
        "ssd_written_bytes": round(option.written_bytes),
        "device_bytes": option.footprint.device_bytes,
        "optimistic": plan.may_be_tentative,
        "ram_bytes": option.footprint.ram_bytes,
        "disk_bytes": option.disk_bytes,
        "alpha": engine.alpha,
        "layers_per_block": engine.layers_per_block,
        "moments": option.config.training.adam_moments,
        "slots": vars(plan.slots),
        "placement": vars(plan.placement),
    }


def _rows(planned: Planned) -> Iterator[tuple[str, Option]]:
    yield "as configured", planned.given
    yield "as planned", planned.chosen
    for option in planned.compact:
        yield f"moments {option.config.training.adam_moments}", option
    for option in planned.larger:
        yield "larger steps" if option is planned.larger[0] else "", option


def _changes(given: Option, chosen: Option) -> Iterator[str]:
    before, after = given.config.engine, chosen.config.engine
    if before.alpha != after.alpha:
        yield f"engine.alpha {after.alpha:g} instead of {before.alpha:g}"
    if before.layers_per_block != after.layers_per_block:
        yield f"engine.layers_per_block {after.layers_per_block} instead of {before.layers_per_block}"
    if chosen.footprint.plan.may_be_tentative and not given.footprint.plan.may_be_tentative:
        yield "engine.optimistic true"
    for name in ("activations_device", "weights_device", "graphs_device"):
        had, has = getattr(before.placement, name), getattr(after.placement, name)
        if had != has:
            yield f"engine.placement.{name} {has:.3g} instead of {had:.3g}"
    for name in ("updates", "staging"):
        had, has = getattr(before.slots, name), getattr(after.slots, name)
        if had != has:
            yield f"engine.slots.{name} {has} instead of {had}"


def _giga(per_s: float | None) -> str:
    return "-" if per_s is None or math.isinf(per_s) else f"{per_s / 1e9:.3g}"


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return None if value is None or math.isinf(value) else value
