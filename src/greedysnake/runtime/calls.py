"""One call of an engine at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from greedysnake.errors import GreedySnakeError


class Calls:
    """Refuses a call while another is under way, which a second thread or a signal handler would make: it would hang,
    or save half a step. A list, not a lock: an interrupt at any place in here leaves it as it was."""

    def __init__(self) -> None:
        self._names: list[tuple[object, str]] = []
        """Of the one that is under way, and of those behind it that are about to be refused."""

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        call = (object(), name)
        try:
            self._names.append(call)
            first = self._names[0]
            if first is not call:
                raise GreedySnakeError(
                    f"{name} was called while {first[1]} is under way, by another thread or a signal handler: call it "
                    "when that has returned"
                )
            yield
        finally:
            if call in self._names:
                self._names.remove(call)
