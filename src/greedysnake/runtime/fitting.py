"""Fits a plan into the memory there is, and says so in numbers when it does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from greedysnake.errors import ConfigError, PlanError
from greedysnake.ops import Plan
from greedysnake.placement import Home, Placement, Slots, chunk_homes, keep_on_device, ram_bytes
from greedysnake.runtime.flat import FlatBlock
from greedysnake.runtime.memory import page_aligned
from greedysnake.shapes import GRANULE, Precision
from greedysnake.sizes import format_size

MOST_CHUNK_PARAMS = 4 << 20
"""48 MB that are read or written at once."""


def make_plan(
    blocks: Sequence[FlatBlock],
    precision: Precision,
    placement: Placement,
    slots: Slots,
    *,
    alpha: float,
    clipping: bool,
    has_ssd: bool,
    tentative: bool = False,
) -> Plan:
    shapes = keep_on_device([block.shape for block in blocks], placement)
    trained = {place.name for place in blocks[-1].places if place.trainable}
    return Plan(
        shapes,
        chunk_homes(
            shapes, placement, alpha=alpha, clipping=clipping, has_ssd=has_ssd, tentative=clipping and tentative
        ),
        precision,
        placement,
        slots,
        clipping,
        frozenset(number for number, block in enumerate(blocks) if block.shared),
        trainers_of_shared=frozenset(
            number for number, block in enumerate(blocks) if not trained.isdisjoint(block.shared.values())
        ),
    )


def net_order(plan: Plan) -> dict[str, object]:
    """What the order follows from in which weights and gradients pass between ranks."""
    return {
        "the blocks of the model": [(block.name, block.num_params, block.num_trainable) for block in plan.blocks],
        "the blocks that stay on the device": [plan.keeps_weights(number) for number in range(plan.num_compute)],
        "slots.weights": plan.slots.weights,
        "dtype": plan.precision.name,
    }


def choose_chunk_params(wanted: int | None, stored: int | None, ram: int, precision: Precision) -> int:
    """Parameters in a chunk, a multiple of GRANULE: as wanted, as in the checkpoint that is continued, or as many as
    let the usual buffers fit into a quarter of the budget."""
    if wanted is None and stored is None:
        wanted = MOST_CHUNK_PARAMS
        while _usual_bytes(wanted, precision) > ram / 4 and wanted > GRANULE:
            wanted //= 2
    chosen = max(GRANULE, (wanted or stored or 0) // GRANULE * GRANULE)
    if stored is not None and chosen != stored:
        raise ConfigError(f"chunk_params is {wanted}, the checkpoint has chunks of {stored}: give that or leave it out")
    return chosen


def _usual_bytes(chunk_params: int, precision: Precision) -> int:
    """Of the usual buffers."""
    slots = Slots()
    staging = slots.staging * chunk_params * precision.weight_bytes
    return staging + slots.updates * precision.update_bytes(chunk_params)


def require_ram(plan: Plan, budget_bytes: int) -> None:
    """PlanError with the numbers unless the buffers that every step needs fit. Nothing is allocated yet."""
    needed = slot_bytes(plan)
    homes = ram_bytes(plan.blocks, plan.homes, plan.precision)
    needed["weights that live in RAM"] = homes["weights"]
    needed["optimizer state that lives in RAM"] = homes["optimizer state"]
    needed["weights of tentative updates"] = homes["tentative weights"]
    total = sum(needed.values())
    if total > budget_bytes:
        raise PlanError(
            f"needs {format_size(total)} of RAM before any activation ({_listed(needed)}), the budget is "
            f"{format_size(budget_bytes)}: raise ram, lower chunk_params or slots, or keep less in RAM by placement"
        )


def slot_bytes(plan: Plan) -> dict[str, int]:
    largest = max(chunk.num_params for block in plan.blocks for chunk in block.chunks)
    precision = plan.precision
    return {
        "staging of weights": plan.slots.staging * largest * precision.weight_bytes,
        "update slots": plan.slots.updates * precision.update_bytes(largest),
    }


def fit_gradients(
    plan: Plan, num_micro_batches: int, activation_bytes: int, free_bytes: int, *, vertical: bool, has_ssd: bool
) -> tuple[Plan, list[tuple[int, int]]]:
    """Gives late gradients what RAM the activations leave, and spills the rest to SSD.

    Returns the plan, and the chunks whose gradient waits in RAM.
    """
    counts = plan.count_homes(num_micro_batches if vertical else 1)
    size = page_aligned(activation_bytes)
    needed = {"activations": counts[Home.RAM] * size}
    needed["transfer of activations"] = plan.slots.transfers * size if counts[Home.SSD] else 0
    left = free_bytes - sum(needed.values())
    if left < 0:
        raise PlanError(
            f"needs {format_size(sum(needed.values()))} of RAM for {counts[Home.RAM]} activations of "
            f"{format_size(size)}, {format_size(free_bytes)} are left of the budget: raise ram, use fewer or smaller "
            "micro-batches or more layers_per_block, or lower placement.activations_ram"
        )
    if not vertical:
        return plan, _keep_all(plan, left)
    late = _sizes(plan, only_late=True)
    spill_bytes = plan.slots.transfers * max(late.values(), default=0)
    if sum(late.values()) <= left and (plan.placement.gradients_ram == 1.0 or not has_ssd):
        return _waiting_in_ram(plan, late), list(late)
    if not has_ssd:
        raise PlanError(
            f"needs {format_size(sum(late.values()))} of RAM for the gradients of late updates, "
            f"{format_size(max(0, left))} are left of the budget: raise ram, lower alpha or switch clipping off, "
            "or give a storage directory to spill them to"
        )
    return _spill(plan, late, left - spill_bytes)


def _keep_all(plan: Plan, left: int) -> list[tuple[int, int]]:
    """Horizontally the gradients of all micro-batches add up in RAM."""
    sizes = _sizes(plan, only_late=False)
    if sum(sizes.values()) > left:
        raise PlanError(
            f"the horizontal schedule needs {format_size(sum(sizes.values()))} of RAM for gradients, "
            f"{format_size(max(0, left))} are left of the budget: raise ram, or use schedule='vertical'"
        )
    return list(sizes)


def _spill(plan: Plan, late: Mapping[tuple[int, int], int], left: int) -> tuple[Plan, list[tuple[int, int]]]:
    if left < 0:
        raise PlanError(
            f"{format_size(-left)} of RAM are missing for the buffers that spill late gradients to SSD: raise ram, "
            "lower chunk_params, or set alpha=0 without clipping"
        )
    wanted = plan.placement.gradients_ram * sum(late.values())
    kept: list[tuple[int, int]] = []
    used = 0
    for key, nbytes in late.items():
        if used + nbytes <= min(left, wanted):
            kept.append(key)
            used += nbytes
    return _waiting_in_ram(plan, kept), kept


def _waiting_in_ram(plan: Plan, kept: Collection[tuple[int, int]]) -> Plan:
    """The plan in which the late gradients of these chunks wait in RAM, and all others on SSD."""
    in_ram = set(kept)
    homes = tuple(
        tuple(
            replace(home, gradient=Home.RAM if not home.late or (number, index) in in_ram else Home.SSD)
            for index, home in enumerate(block_homes)
        )
        for number, block_homes in enumerate(plan.homes)
    )
    return replace(plan, homes=homes)


def _sizes(plan: Plan, *, only_late: bool) -> dict[tuple[int, int], int]:
    return {
        (number, index): chunk.num_params * plan.precision.gradient_bytes
        for number, block in enumerate(plan.blocks)
        for index, chunk in enumerate(block.chunks)
        if chunk.trainable and (plan.homes[number][index].late or not only_late)
    }


def _listed(needed: Mapping[str, int]) -> str:
    rows = sorted(needed.items(), key=lambda row: -row[1])
    return ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in rows if nbytes)
