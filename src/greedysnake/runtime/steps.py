"""One list of ops after another: writes and runs them, the next step's while the device computes this one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from greedysnake import schedule
from greedysnake.errors import ConfigError
from greedysnake.ops import Cursor, Op, Plan
from greedysnake.runtime.lanes import Wait
from greedysnake.runtime.runner import Linked, Runner

Schedule = Callable[[Plan, Cursor, int], list[Op]]
SCHEDULES: dict[str, Schedule] = {"vertical": schedule.vertical, "horizontal": schedule.horizontal}
Action = Callable[[Op], int | Wait]


@dataclass(frozen=True)
class _List:
    """A list of ops that was written and linked ahead, and the cursor to go back to if it is not run."""

    cursor: Cursor
    ops: list[Op]
    linked: Linked


@dataclass(frozen=True)
class _Next:
    """A step that was written ahead of its call. After one with tentative updates, what comes in between is a list of
    its own, run when that step is confirmed."""

    num_micro_batches: int
    step: _List
    between: _List | None


def find_schedule(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise ConfigError(f"schedule is {name!r}: use 'vertical' or 'horizontal'")
    return SCHEDULES[name]


class Steps:
    """What is written follows on what was written before: the cursor goes from list to list."""

    def __init__(self, runner: Runner, plan: Plan, name: str) -> None:
        self._runner = runner
        self._plan = plan
        self._write = find_schedule(name)
        self._vertical = name == "vertical"
        self._cursor = Cursor(plan)
        self._next: _Next | None = None
        self._ahead: list[Op] = []
        self.tentative = False
        """Whether the next step that is written has tentative updates."""
        self.is_open = False
        """Whether the last step had, and they are neither confirmed nor revoked."""

    def use(self, plan: Plan) -> None:
        """Starts anew with another plan. Nothing may be pending or under way."""
        self._plan = plan
        self._cursor = Cursor(plan)

    def train(self, step: int, num_micro_batches: int, action: Action) -> list[Op]:
        """Runs a training step; returns the ops whose bytes belong to it."""
        this = self._take_next(num_micro_batches)
        self.is_open = any(op.tentative for op in this.ops)
        self._runner.run(this.linked, step, action, lambda: self._write_next(num_micro_batches))
        return self._moved(this.ops)

    def settle(self, step: int, action: Action, *, confirmed: bool) -> None:
        """The norm of a step with tentative updates is known: goes on with what the next step needs first. Revoked
        updates are done like all late ones, in the next forward."""
        self.is_open = False
        between = self._next.between if self._next and confirmed else None
        if between is None:
            self.drop_next()
            if confirmed:
                self._cursor.confirm()
            else:
                self._cursor.revoke()
            between = self._write_between()
        elif self._next:
            self._next = replace(self._next, between=None)
        self._runner.run(between.linked, step, action)
        self._ahead = between.ops

    def evaluate(self, step: int, num_micro_batches: int, action: Action) -> None:
        self.drop_next()
        ops = schedule.evaluation(self._plan, self._cursor, num_micro_batches, vertical=self._vertical)
        self._runner.run(self._runner.link(ops), step, action)
        self._moved(ops)

    def flush(self, step: int, action: Action) -> None:
        """Starts all pending late updates."""
        self.drop_next()
        self._runner.run(self._runner.link(schedule.flush(self._plan, self._cursor)), step, action)

    def drop_next(self) -> None:
        """Goes back to before the next step was written: something else comes first."""
        if self._next:
            self._cursor, self._next = (self._next.between or self._next.step).cursor, None
            self._runner.unlink()

    def _take_next(self, num_micro_batches: int) -> _List:
        following = self._next
        if following and following.num_micro_batches == num_micro_batches:
            self._next = None
            return following.step
        self.drop_next()
        return self._write_step(num_micro_batches)

    def _write_next(self, num_micro_batches: int) -> None:
        """While the device computes: writes and links the next step, which most likely is like this one."""
        with _no_garbage_collection():  # of everything that torch has loaded: 0.2 s in which nothing is launched
            between = None
            if self.is_open:
                before = self._cursor.copy()
                self._cursor.confirm()
                between = replace(self._write_between(), cursor=before)
            self._next = _Next(num_micro_batches, self._write_step(num_micro_batches), between)

    def _write_step(self, num_micro_batches: int) -> _List:
        cursor = self._cursor.copy()
        ops = self._write(replace(self._plan, tentative=self.tentative), self._cursor, num_micro_batches)
        return _List(cursor, ops, self._runner.link(ops))

    def _write_between(self) -> _List:
        cursor = self._cursor.copy()
        ops = schedule.ahead(self._plan, self._cursor)
        return _List(cursor, ops, self._runner.link(ops))

    def _moved(self, ops: list[Op]) -> list[Op]:
        """What was done ahead counts in the list that it was done for."""
        moved = self._ahead + [op for op in ops if not op.ahead]
        self._ahead = [op for op in ops if op.ahead]
        return moved


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
