"""Uses budgets: decides what stays on the device and in RAM, by how many SSD bytes of a step each byte there saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from greedysnake.ops import Plan
from greedysnake.placement import Home, Placement, Slots, ram_bytes
from greedysnake.runtime.fitting import slot_bytes
from greedysnake.runtime.memory import page_aligned

MOST_UPDATES, MOST_STAGING = 48, 16
"""More slots than these gained nothing where it was measured (docs/performance.md)."""
SLOTS_SHARE = 1 / 16
"""Of the budget, at most, for more slots than asked for."""
PARTS = 256
"""What a share is tried in, unless it has parts of its own."""
ORDER = ("weights_ram", "activations_ram", "optimizer_ram")
"""A byte of RAM saves three bytes of SSD traffic in every step when it holds weights, and two for activations,
gradients that wait for a late update, or optimizer state. The gradients get theirs before the optimizer state. Weights
that stay on the device come last: they are only written, so that a byte of RAM saves one."""


def fill_ram(
    make_plan: Callable[[Placement, Slots], Plan],
    placement: Placement,
    slots: Slots,
    *,
    ram: int,
    num_micro_batches: int,
    activation_bytes: int,
    more_slots: bool = True,
) -> Plan:
    """The plan with as much in RAM as fits, after more slots if there may be. Shares that `placement` sets to something
    else than their defaults stay."""
    default = Placement(activations_device=placement.activations_device)
    free = [name for name in ORDER if getattr(placement, name) == getattr(default, name)]
    chosen = replace(placement, **dict.fromkeys(free, 0.0))
    more = _more_slots(slots, slot_bytes(make_plan(chosen, slots)), ram) if more_slots else slots
    if _needed(make_plan(chosen, more), num_micro_batches, activation_bytes, late=False) <= ram:
        slots = more  # else the shares that stay as they are leave no room for more

    def needed(name: str, share: float, late: bool) -> int:
        plan = make_plan(replace(chosen, **{name: share}), slots)
        return _needed(plan, num_micro_batches, activation_bytes, late=late)

    most = {"activations_ram": default.activations_ram, "weights_ram": _share_fetched(make_plan(chosen, slots))}
    passes = [(name, most.get(name, 1.0), name == "optimizer_ram") for name in free]
    if "weights_ram" in free and most["weights_ram"] < 1.0:
        passes.append(("weights_ram", 1.0, True))
    for name, limit, late in passes:
        tries = partial(needed, name, late=late)
        share = limit * largest_share(lambda tried, tries=tries, limit=limit: tries(limit * tried), ram)  # type: ignore[misc]
        chosen = replace(chosen, **{name: max(getattr(chosen, name), share)})
    return make_plan(chosen, slots)


def _share_fetched(plan: Plan) -> float:
    """Of the chunks, those whose weights do not stay on the device."""
    fetched = [not plan.keeps_weights(number) for number, block in enumerate(plan.blocks) for _ in block.chunks]
    return sum(fetched) / len(fetched)


def fill_device(
    make_plan: Callable[[Placement], Plan],
    placement: Placement,
    *,
    vram: int,
    num_micro_batches: int,
    activation_bytes: int,
) -> Placement:
    """The placement with as much on the device as fits into `vram`: activations first, which leave their RAM to state,
    then weights of the last layers, which are then fetched no more. Shares that are not 0 stay, and count."""

    def taken(placement: Placement) -> int:
        return homes_bytes(make_plan(placement), num_micro_batches, activation_bytes)

    num_layers = make_plan(placement).num_compute - 2
    axes = (("activations_device", 1.0 - _set_by_hand(placement), PARTS), ("weights_device", 1.0, num_layers))
    for name, most, num_parts in axes:
        if getattr(placement, name) == 0.0 and num_parts > 0:
            tries = partial(_with_share, placement, name, most)
            share = largest_share(lambda tried, tries=tries: taken(tries(tried)), vram, num_parts)  # type: ignore[misc]
            placement = tries(share)
    return placement


def homes_bytes(plan: Plan, num_micro_batches: int, activation_bytes: int) -> int:
    """What lives on the device: activations from forward to backward, and weights of layers that stay."""
    kept = [block.num_params for block in plan.blocks if block.pool == "kept"]
    on_device = plan.count_homes(num_micro_batches)[Home.DEVICE] * page_aligned(activation_bytes)
    return on_device + len(kept) * max(kept, default=0) * plan.precision.weight_bytes


def _with_share(placement: Placement, name: str, most: float, share: float) -> Placement:
    return replace(placement, **{name: most * share})


def _set_by_hand(placement: Placement) -> float:
    """The share of the activations that are to be in RAM, if that is not simply the rest."""
    return placement.activations_ram if placement.activations_ram < 1.0 else 0.0


def _needed(plan: Plan, num_micro_batches: int, activation_bytes: int, *, late: bool) -> int:
    """Bytes of RAM that a plan takes; with `late`, late gradients wait where it says, else they may all be spilled."""
    size, counts = page_aligned(activation_bytes), plan.count_homes(num_micro_batches)
    homes = ram_bytes(plan.blocks, plan.homes, plan.precision)
    activations = (counts[Home.RAM] + (plan.slots.transfers if counts[Home.SSD] else 0)) * size
    largest = max(chunk.num_params for block in plan.blocks for chunk in block.chunks)
    spill = plan.slots.transfers * largest * plan.precision.gradient_bytes
    for_good = homes["weights"] + homes["optimizer state"] + homes["tentative weights"]
    fixed = sum(slot_bytes(plan).values()) + for_good + activations
    spills = any(home.late and home.gradient is Home.SSD for block in plan.homes for home in block)
    return fixed + (homes["gradients"] if late else 0) + (spill if spills or not late else 0)


def _more_slots(slots: Slots, taken: dict[str, int], ram: int) -> Slots:
    """As many as the share of the budget allows, and never fewer than there are."""
    times = int(ram * SLOTS_SHARE) // sum(taken.values())
    return replace(
        slots,
        updates=max(slots.updates, min(MOST_UPDATES, times * slots.updates)),
        staging=max(slots.staging, min(MOST_STAGING, times * slots.staging)),
    )


def largest_share(needed: Callable[[float], int], most: int, num_parts: int = PARTS) -> float:
    """The largest one that needs no more than `most`, in whole parts; 0 when none does. What is needed grows with it,
    mostly in proportion: so it is looked for where it would be then, as each try takes a plan of all chunks. Every
    third try is in the middle, whatever is expected."""
    low, high = 0, num_parts
    least, largest = needed(0.0), needed(1.0)
    if largest <= most:
        return 1.0
    tries = 0
    while high - low > 1 and least <= most:
        tries += 1
        share = (most - least) / (largest - least) if tries % 3 else 0.5
        part = min(max(low + int((high - low) * share), low + 1), high - 1)
        tried = needed(part / num_parts)
        if tried <= most:
            low, least = part, tried
        else:
            high, largest = part, tried
    return low / num_parts
