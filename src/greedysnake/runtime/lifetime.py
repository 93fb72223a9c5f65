"""The life of an engine: one call at a time, closed by what fails in it, freed once and by its own process."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from os import getpid
from typing import TypeVar

from greedysnake.errors import GreedySnakeError, RankError
from greedysnake.runtime.calls import Call, Calls
from greedysnake.runtime.ranks import Ranks

Result = TypeVar("Result")


class Lifetime:
    """Open until something closes it, for a reason that every later call is told."""

    def __init__(self, owner: object, ranks: Ranks) -> None:
        """What is put into `resources` is freed with the `owner`, if nothing has closed it before."""
        self.resources = ExitStack()
        self.resources.callback(ranks.close)
        self._ranks = ranks
        self._process = getpid()
        self._calls = Calls()
        self._closed: str | None = None
        self._stop: Callable[[BaseException], None] | None = None
        # Also when the interpreter ends: the threads of an engine that is still open must not outlive it.
        weakref.finalize(owner, _free_in_this_process, self.resources, self._process)

    @property
    def is_open(self) -> bool:
        """Whether there is something to close; never in a forked child, whose parent does that."""
        return self._closed is None and getpid() == self._process

    def stop_by(self, stop: Callable[[BaseException], None]) -> None:
        """Lanes are there from now on, and are stopped so when something fails."""
        self._stop = stop

    def alone(self, name: str) -> Call:
        """A call of the open engine by the method that asks; until it ends none can close it."""
        caller = getattr(inspect.currentframe(), "f_back", None)  # a frame that knows itself would stay in memory
        call = self._calls.begin(name, caller)
        try:
            self._require_open()
        except GreedySnakeError:
            call.end()
            raise
        return call

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """What fails in a call of all ranks is told to the others; when one of them is gone, the engine is closed."""
        try:
            with self._ranks.together(call):
                yield
        except BaseException as error:
            # After a Ctrl-C, or an exception of a signal handler, it is not known what the others have heard.
            heard = isinstance(error, GreedySnakeError) and not (isinstance(error, RankError) and error.is_gone)
            if not heard and self._ranks.count > 1:
                self._fail(error)
            raise

    def guard(
        self, call: Callable[..., Result], *values: object, spare: tuple[type[GreedySnakeError], ...] = ()
    ) -> Result:
        """Any failure closes the engine, but a `spare` one: what is stored is that of the last checkpoint."""
        try:
            return call(*values)
        except spare:
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def free(self, why: str) -> None:
        self._closed = why
        self.resources.close()

    def _fail(self, error: BaseException) -> None:
        if self._stop is not None:
            self._stop(error)
        if self._closed is None:
            self.free(f"{type(error).__name__}: {error}".removesuffix(": "))

    def _require_open(self) -> None:
        if getpid() != self._process:
            raise GreedySnakeError(f"the engine belongs to process {self._process}: a forked child cannot use it")
        if self._closed is not None:
            raise GreedySnakeError(f"the engine is closed ({self._closed}): make a new one, with resume=True to go on")


def _free_in_this_process(resources: ExitStack, process: int) -> None:
    """A forked child has the engine's memory and files, but they are its parent's to free."""
    if getpid() == process:
        resources.close()
