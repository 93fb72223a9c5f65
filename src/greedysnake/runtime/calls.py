"""One call of an engine at a time."""

from __future__ import annotations

import inspect
import threading
from contextlib import suppress
from types import FrameType

from greedysnake.errors import GreedySnakeError


class Calls:
    """Refuses a call while another is under way, which a second thread or a signal handler would make: it would hang,
    or save half a step."""

    def __init__(self) -> None:
        self._known: list[Call] = []

    def begin(self, name: str, frame: FrameType | None) -> Call:
        """The call that runs in `frame`, to be used by `with`."""
        call = Call(self._known, name, frame)
        self._known.append(call)
        for other in self._known[: self._known.index(call)]:
            if other.is_under_way():
                call.end()
                raise GreedySnakeError(
                    f"{name} was called while {other.name} is under way, by another thread or a signal handler: call "
                    "it when that has returned"
                )
            other.end()
        return call


class Call:
    """Under way until it says that it ended, or is no longer on the stack: an interrupt may keep it from saying so."""

    def __init__(self, known: list[Call], name: str, frame: FrameType | None) -> None:
        self.name = name
        self._known, self._frame, self._thread = known, frame, threading.get_ident()

    def is_under_way(self) -> bool:
        if self._thread != threading.get_ident():
            return any(thread.ident == self._thread for thread in threading.enumerate())
        frame = inspect.currentframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def end(self) -> None:
        with suppress(ValueError):  # another thread may have found out
            self._known.remove(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.end()
