"""What a run will take of device, RAM and drives, computed from shapes before anything is allocated or written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from greedysnake.errors import PlanError, StorageError, explained
from greedysnake.models.sequential import Model
from greedysnake.ops import Plan
from greedysnake.placement import Home, Placement, Slots, ram_bytes
from greedysnake.runtime.directory import EXTENTS, SCRATCH, own_directories, refuse_foreign_files
from greedysnake.runtime.filling import fill_device, fill_ram
from greedysnake.runtime.fitting import (
    MOST_CHUNK_PARAMS,
    choose_chunk_params,
    fit_gradients,
    make_plan,
    require_ram,
    slot_bytes,
)
from greedysnake.runtime.flat import FlatBlock, decays_by_default, survey
from greedysnake.runtime.layout import Layout
from greedysnake.runtime.memory import page_aligned
from greedysnake.runtime.opening import Stored
from greedysnake.runtime.state import extent_specs
from greedysnake.runtime.store import count_slots
from greedysnake.shapes import Precision, Share, precision_of, total_params
from greedysnake.sizes import format_size
from greedysnake.verify import step_ssd_bytes


@dataclass(frozen=True)
class Footprint:
    """Bytes by what and where; the plan is that of a step with these micro-batches."""

    plan: Plan
    num_params: int
    """All ranks' together; the bytes are one rank's."""
    homes: Mapping[str, Mapping[Home, int]]
    """What lives where between uses: weights, optimizer state, activations, gradients; and buffers."""
    ram_bytes: int
    ram_budget_bytes: int
    disk_bytes: tuple[int, ...]
    """Bytes of the store's files in each directory, all slots and scratch included."""
    slot_bytes: tuple[int, ...] = ()
    """Of these, what one slot takes."""
    num_slots: int = 0
    stored_slots: int = 0
    """How many of the slots a checkpoint that is continued has already."""
    step_ssd_bytes: int = 0
    """What a step reads from SSD and writes there."""
    waits: str = ""
    """With clipping: why the updates wait for the norm, if that could be helped."""

    @property
    def device_bytes(self) -> int:
        """In buffers and homes, besides what computing needs."""
        return sum(row.get(Home.DEVICE, 0) for row in self.homes.values())


def outline(
    model: Model,
    *,
    precision: Precision,
    ram: int,
    chunk_params: int | None,
    stored: Stored | None = None,
    share: Share | None = None,
) -> list[FlatBlock]:
    """The blocks of a model, cut into chunks as a run with this budget cuts them, or as the one that is continued."""
    chunk_params = choose_chunk_params(chunk_params, (stored or Stored()).chunk_params, ram, precision)
    return survey(model, chunk_params, decays_by_default, needs_values=False, share=share)


def foresee(
    blocks: Sequence[FlatBlock],
    *,
    precision: Precision,
    ram: int,
    num_directories: int,
    alpha: float,
    clipping: bool,
    placement: Placement,
    slots: Slots,
    single_slot: bool,
    vertical: bool,
    num_micro_batches: int,
    activation_bytes: int,
    fill: bool = False,
    more_slots: bool = True,
    vram: int = 0,
    optimistic: bool = False,
    stored: Stored | None = None,
) -> Footprint:
    """PlanError, with the numbers, when the RAM budget is too small. With `fill`, what fits into it stays there, and
    with `more_slots` a part of it goes into more slots than asked for; before that, `vram` bytes of the device are
    filled.

    A store that is continued keeps the slots that are `stored`, if those are more than are needed."""
    stored = stored or Stored()
    has_ssd = num_directories > 0

    def plan_with(placement: Placement, slots: Slots) -> Plan:
        return make_plan(
            blocks,
            precision,
            placement,
            slots,
            alpha=alpha,
            clipping=clipping,
            has_ssd=has_ssd,
            tentative=optimistic,
        )

    if vram and vertical:
        placement = fill_device(
            lambda tried: plan_with(tried, slots),
            placement,
            vram=vram,
            num_micro_batches=num_micro_batches,
            activation_bytes=activation_bytes,
        )
    plan = plan_with(placement, slots)
    if fill and vertical and has_ssd:
        plan = fill_ram(
            plan_with,
            placement,
            slots,
            ram=ram,
            num_micro_batches=num_micro_batches,
            activation_bytes=activation_bytes,
            more_slots=more_slots,
        )
    require_ram(plan, ram)
    fixed = sum(slot_bytes(plan).values()) + sum(_in_ram(plan).values())
    plan, kept = fit_gradients(
        plan, num_micro_batches, activation_bytes, ram - fixed, vertical=vertical, has_ssd=has_ssd
    )
    step = _step_bytes(plan, set(kept), num_micro_batches if vertical else 1, activation_bytes)
    scratch = [*step.ssd_activations, *step.spilled]
    homes = _homes(plan, step)
    disk: tuple[int, ...] = ()
    slot: tuple[int, ...] = ()
    num_slots = 0
    if has_ssd:
        num_slots = count_slots(single_slot=single_slot, checkpoints=True, spare_slot=plan.may_be_tentative)
        num_slots = max(num_slots, stored.num_slots)
        layout = Layout.build(
            extent_specs(plan, checkpoints=True),
            scratch,
            num_members=num_directories,
            num_slots=num_slots,
        )
        slot = layout.slot_bytes
        disk = tuple(layout.extents_bytes(member) + layout.scratch_bytes[member] for member in range(num_directories))
    used = sum(row.get(Home.RAM, 0) for row in homes.values())
    traffic = sum(step_ssd_bytes(replace(plan, tentative=plan.may_be_tentative), num_micro_batches))
    traffic += 2 * sum(step.ssd_activations)
    return Footprint(
        plan, total_params(plan.blocks), homes, used, ram, disk, slot, num_slots, stored.num_slots, traffic
    )


def device_bytes(plan: Plan, num_micro_batches: int, activation_bytes: int) -> int:
    """What the device holds in buffers and homes, besides what computing needs."""
    counts = plan.count_homes(num_micro_batches)
    num_tensors = plan.num_between(num_micro_batches) + counts[Home.DEVICE]
    return _device_slots(plan) + num_tensors * page_aligned(activation_bytes)


def require_disk(footprint: Footprint, directories: Sequence[str | Path], share: Share | None = None) -> None:
    """PlanError unless every drive has room for the stores of all ranks on this host, StorageError unless it can be
    written and is nobody's.

    Files of an earlier run of the same store count as room. Nothing is left behind.
    """
    share = share or Share()
    own = own_directories(directories, share)
    for directory in own:
        _require_writable(directory, nearest_existing(directory))
        if directory.is_dir():
            refuse_foreign_files(directory)
    for drive in _drives(footprint, own, share.num_here):
        nbytes, free = drive.needed_bytes, drive.free_bytes
        if nbytes > free:
            raise PlanError(
                f"the store needs {format_size(nbytes)} more in {', '.join(map(str, drive.directories))}, "
                f"{format_size(free)} are free there: free {format_size(nbytes - free)}, "
                f"add a directory on another drive, or {_smaller(footprint)}"
            )


def _smaller(footprint: Footprint) -> str:
    if footprint.plan.may_be_tentative and footprint.num_slots > footprint.stored_slots:
        return "set optimistic to false, which takes a third off"
    if footprint.stored_slots:
        return "keep more of the activations and gradients in RAM"
    ways = ["single_slot, which halves it"] if footprint.num_slots > 1 else []
    precision = footprint.plan.precision
    compact = precision_of(precision.name, "int8")
    if precision != compact:
        saved = 1 - compact.chunk_bytes(MOST_CHUNK_PARAMS) / precision.chunk_bytes(MOST_CHUNK_PARAMS)
        ways.append(f"adam_moments to int8, which takes {saved:.0%} off and rounds moments")
    return f"set {', or '.join(ways)}" if ways else "train a smaller model"


def missing_room(footprint: Footprint, directories: Sequence[str | Path], share: Share | None = None) -> int:
    """Bytes that would have to be freed so that every drive has room for the stores of all ranks on this host, and for
    as much as one slot of them besides: an export, and other people's files. What the drives already gave it does not
    count."""
    share = share or Share()
    return sum(
        max(0, drive.needed_bytes + drive.slot_bytes - drive.free_bytes)
        for drive in _drives(footprint, own_directories(directories, share), share.num_here)
        if drive.needed_bytes
    )


@dataclass
class _Drive:
    directories: list[Path]
    free_bytes: int
    needed_bytes: int = 0
    """Besides what the store has there already."""
    slot_bytes: int = 0


def _drives(footprint: Footprint, directories: Sequence[Path], num_stores: int) -> list[_Drive]:
    """What so many stores like this take of each drive, however many of their directories lie there."""
    drives: dict[int, _Drive] = {}
    for directory, nbytes, slot in zip(directories, footprint.disk_bytes, footprint.slot_bytes, strict=True):
        existing = nearest_existing(directory)
        status = os.statvfs(existing)
        drive = drives.setdefault(os.stat(existing).st_dev, _Drive([], status.f_bavail * status.f_frsize))
        drive.directories.append(directory)
        drive.needed_bytes += max(0, nbytes - _taken(directory)) * num_stores
        drive.slot_bytes += slot * num_stores
    return list(drives.values())


@dataclass(frozen=True)
class _Step:
    """Bytes that depend on the micro-batches."""

    device: int
    device_activations: int
    ram_activations: int
    transfers: int
    kept: int
    ssd_activations: list[int]
    spilled: list[int]


def _step_bytes(plan: Plan, kept: set[tuple[int, int]], num_micro_batches: int, activation_bytes: int) -> _Step:
    size = page_aligned(activation_bytes)
    counts = plan.count_homes(num_micro_batches)
    gradient_bytes = plan.precision.gradient_bytes
    kept_bytes, spilled = 0, []
    for number, homes in enumerate(plan.homes):
        for index, home in enumerate(homes):
            nbytes = plan.blocks[number].chunks[index].num_params * gradient_bytes
            if (number, index) in kept:
                kept_bytes += nbytes
            elif home.late:
                spilled.append(nbytes)
    transfers = (size if counts[Home.SSD] else 0) + max(spilled, default=0)
    return _Step(
        device=plan.num_between(num_micro_batches) * size,
        device_activations=counts[Home.DEVICE] * size,
        ram_activations=counts[Home.RAM] * size,
        transfers=plan.slots.transfers * transfers,
        kept=kept_bytes,
        ssd_activations=[size] * counts[Home.SSD],
        spilled=spilled,
    )


def _homes(plan: Plan, step: _Step) -> dict[str, dict[Home, int]]:
    in_ram = _in_ram(plan)
    precision = plan.precision
    weights = sum(block.num_own for block in plan.blocks) * precision.weight_bytes
    state = sum(
        precision.state_bytes(chunk.num_params, trainable=chunk.trainable)
        for block in plan.blocks
        for chunk in block.chunks
    )
    return {
        "weights": {Home.RAM: in_ram["weights"], Home.SSD: weights - in_ram["weights"]},
        "optimizer state": {Home.RAM: in_ram["optimizer state"], Home.SSD: state - in_ram["optimizer state"]},
        "activations": {
            Home.DEVICE: step.device_activations,
            Home.RAM: step.ram_activations,
            Home.SSD: sum(step.ssd_activations),
        },
        "gradients": {Home.RAM: step.kept, Home.SSD: sum(step.spilled)},
        "buffers": {
            Home.DEVICE: _device_slots(plan) + step.device,
            Home.RAM: sum(slot_bytes(plan).values()) + step.transfers + in_ram["tentative weights"],
        },
    }


def _in_ram(plan: Plan) -> dict[str, int]:
    homes = ram_bytes(plan.blocks, plan.homes, plan.precision)
    return {name: homes[name] for name in ("weights", "optimizer state", "tentative weights")}


def _device_slots(plan: Plan) -> int:
    """Weights and gradients of the blocks that are on the device at once."""
    num_slots = {"layers": (plan.slots.weights, plan.slots.gradients), "ends": (1, 1), "shared": (1, 1)}
    num_slots["kept"] = (sum(block.pool == "kept" for block in plan.blocks), 0)
    total = 0
    for pool, (num_weights, num_gradients) in num_slots.items():
        largest = max((block.num_params for block in plan.blocks if block.pool == pool), default=0)
        trainable = [
            block.num_trainable for number, block in enumerate(plan.blocks) if plan.gradient_pool(number) == pool
        ]
        total += num_weights * largest * plan.precision.weight_bytes
        total += num_gradients * max(trainable, default=0) * plan.precision.gradient_bytes
    return total


def nearest_existing(path: Path) -> Path:
    """The path, or the folder that it would be made in."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _require_writable(directory: Path, existing: Path) -> None:
    if not existing.is_dir():
        raise StorageError(f"{directory} cannot be made: {existing} is a file: give another directory")
    with explained("write in", existing), tempfile.TemporaryFile(dir=existing):
        pass


def _taken(directory: Path) -> int:
    """Bytes that the store's files already have."""
    files = [directory / name for name in (EXTENTS, SCRATCH)]
    return sum(file.stat().st_blocks * 512 for file in files if file.exists())
