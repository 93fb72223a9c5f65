"""The schedule as data: one step as a list of small ops, written in program order.

An op names what it reads and writes (slots, homes, tensors). Its lane runs ops in list order, and two ops on
different lanes are ordered wherever they touch the same thing and one of them writes it: so a buffer's reuse is
a dependency like any other, every dependency points backwards in the list, and no schedule can deadlock. Nobody
writes `block + 2` by hand: lanes run ahead as far as the slots allow. Knows no torch and no addresses.
"""

from __future__ import annotations

from collections.abc import Iterable

from greedysnake.errors import PlanError
from greedysnake.maker import Maker
from greedysnake.ops import Cursor, Op, Plan
from greedysnake.placement import Home


def vertical(plan: Plan, cursor: Cursor, num_micro_batches: int) -> list[Op]:
    """One step: all micro-batches go through a block before the next block starts, in snake order."""
    make = Maker(plan, cursor, num_micro_batches)
    last = plan.num_compute - 1
    make.bring_shared()
    for block in range(last):
        make.bring(block)
        for position, index in enumerate(snake(block, num_micro_batches)):
            make.forward(block, index, position)
        make.release_weights(block)
    for block in range(last, plan.lowest - 1, -1):
        make.bring(block)
        if block == last:
            make.preload()
        gradients = make.gradient_slot(block)
        for position, index in enumerate(snake(2 * last - block, num_micro_batches)):
            make.backward(block, index, position, gradients)
        if block == last:
            make.loss()
        make.finish(block, gradients)
    make.finish_shared()
    make.norm()
    if not plan.tentative:
        make.prefetch()
    return make.ops


def ahead(plan: Plan, cursor: Cursor) -> list[Op]:
    """What a step with tentative updates leaves to be done when its norm is known: starts what the next forward needs
    first, now that it is certain what that is."""
    make = Maker(plan, cursor, 0)
    make.prefetch()
    return make.ops


def horizontal(plan: Plan, cursor: Cursor, num_micro_batches: int) -> list[Op]:
    """One step of plain gradient accumulation: each micro-batch goes through all blocks, which are fetched for
    it again; gradients add up in RAM. What ZeRO-Infinity does; here for comparison."""
    if any(home.late and home.gradient is Home.SSD for homes in plan.homes for home in homes):
        raise PlanError("a horizontal step adds gradients up in RAM: set placement.gradients_ram to 1")
    if any(block.pool == "kept" for block in plan.blocks):
        raise PlanError("a horizontal step keeps no layers: set placement.graphs_device and weights_device to 0")
    make = Maker(plan, cursor, num_micro_batches, vertical=False)
    last = plan.num_compute - 1
    make.bring_shared()
    for index in range(num_micro_batches):
        final = index == num_micro_batches - 1
        for block in range(last):
            make.bring(block)
            make.forward(block, index, 0)
            make.release_weights(block)
        for block in range(last, plan.lowest - 1, -1):
            make.bring(block)
            gradients = make.gradient_slot(block)
            make.backward(block, index, 0, gradients)
            if block == last and final:
                make.loss()
            make.accumulate(block, index, gradients, final)
    make.finish_shared()
    make.norm()
    make.prefetch()
    return make.ops


def evaluation(plan: Plan, cursor: Cursor, num_micro_batches: int, *, vertical: bool = True) -> list[Op]:
    """A forward that keeps nothing but the loss. Late updates are done on the way, as in any forward. Without
    `vertical` it needs room for one micro-batch only, as a horizontal step does."""
    make = Maker(plan, cursor, num_micro_batches, vertical=vertical)
    last = plan.num_compute - 1
    make.bring_shared()
    passes = [range(num_micro_batches)] if vertical else [range(index, index + 1) for index in range(num_micro_batches)]
    for indices in passes:
        for block in range(last + 1):
            make.bring(block)
            for position, index in enumerate(reversed(indices) if block % 2 else indices):
                if block < last:
                    make.forward(block, index, position, save=False)
                else:
                    make.evaluate(block, index)
            make.release_weights(block)
    make.loss(verdict=False)
    make.release_shared()
    make.prefetch()
    return make.ops


def flush(plan: Plan, cursor: Cursor) -> list[Op]:
    """Does every pending late update, without a forward."""
    make = Maker(plan, cursor, 0)
    for block, chunk in sorted(cursor.pending):
        update = make.late_update(block, chunk)
        if plan.keeps_weights(block):
            make.upload(block, chunk, update)
        make.give(update)
    return make.ops


def snake(block: int, num_micro_batches: int) -> Iterable[int]:
    """The order of the micro-batches in a block: the one that ends a block starts the next."""
    order = range(num_micro_batches)
    return reversed(order) if block % 2 else order
