"""Transfers of a store that are under way: several requests to the I/O engine each, waited for and checked together.

Knows files, addresses and checksums; what the bytes are, and which of them are newest, is the store's business.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from greedysnake import _native
from greedysnake.errors import GreedySnakeError, StorageError
from greedysnake.runtime.io import File, IoEngine, Ticket
from greedysnake.runtime.manifest import Contents
from greedysnake.runtime.slots import Attempt

Kind = Literal["read", "write"]


class Sum(NamedTuple):
    """What is known of some of the bytes of a piece."""

    begin: int
    """From the start of the piece."""
    contents: Contents


@dataclass(frozen=True)
class Piece:
    """Bytes that lie together in a file: one request to the I/O engine."""

    file: File
    offset: int
    address: int
    nbytes: int
    sums: Mapping[int, Sum]
    """By the part of the extent; scratch has one, or none where it is not known what was written."""
    slot: int = 0
    """Of the extent, which its parts are in."""


@dataclass(frozen=True, eq=False)
class StoreTicket:
    """A transfer under way. Its memory must stay untouched until `Store.wait` returns; wait for it once."""

    kind: Kind
    extent: int | None
    """None for scratch."""
    pieces: tuple[Piece, ...]
    io_tickets: tuple[Ticket, ...]
    attempt: Attempt | None = None
    """What a tentative write belongs to."""

    @property
    def nbytes(self) -> int:
        """Bytes that cross the drives."""
        return sum(piece.nbytes for piece in self.pieces)


class Transfers:
    """Any thread may submit, poll and wait."""

    def __init__(self, io: IoEngine) -> None:
        self._io = io
        self._lock = threading.Lock()
        self._under_way: set[StoreTicket] = set()

    def submit(
        self,
        kind: Kind,
        extent: int | None,
        pieces: Iterable[Piece],
        *,
        urgent: bool,
        attempt: Attempt | None = None,
    ) -> StoreTicket:
        pieces, io_tickets = tuple(pieces), list[Ticket]()
        for piece in pieces:
            try:
                io_tickets.append(
                    self._io.submit(kind, piece.file, piece.offset, piece.address, piece.nbytes, urgent=urgent)
                )
            except BaseException:
                self._drain(io_tickets)  # memory of the caller must not be in flight when this raises
                raise
        ticket = StoreTicket(kind, extent, pieces, tuple(io_tickets), attempt)
        with self._lock:
            self._under_way.add(ticket)
        return ticket

    def poll(self, ticket: StoreTicket) -> bool:
        """Whether `wait` would return, or raise, without blocking."""
        return all(map(self._io.poll, ticket.io_tickets))

    def wait(self, ticket: StoreTicket) -> None:
        """Blocks until all of it has ended, then raises the first error."""
        try:
            self._drain(ticket.io_tickets)
        finally:
            with self._lock:
                self._under_way.discard(ticket)

    def drain(self) -> None:
        """Blocks until nothing is under way."""
        try:
            for ticket in list(self._under_way):
                with suppress(GreedySnakeError):  # nobody waited for it
                    self._drain(ticket.io_tickets)
        finally:
            self._under_way.clear()

    def _drain(self, io_tickets: Sequence[Ticket]) -> None:
        """Waits for all, then raises the first error: not even then is anything left in flight."""
        first_error: BaseException | None = None
        for io_ticket in io_tickets:
            try:
                self._io.wait(io_ticket)
            except BaseException as error:  # Ctrl-C too: wait serves it when its own transfer has ended
                first_error = first_error or error
        if first_error:
            raise first_error


def verify(ticket: StoreTicket) -> None:
    """StorageError unless what was read has the checksums of what was written."""
    for piece in ticket.pieces:
        for part, (begin, (expected, nbytes)) in piece.sums.items():
            found = _native.crc32c(piece.address + begin, nbytes)
            if found != expected:
                what = "scratch" if ticket.extent is None else f"part {part} of extent {ticket.extent}"
                raise StorageError(
                    f"{piece.file.path}: {what} (offset {piece.offset + begin}, {nbytes} bytes) has CRC32C "
                    f"{found:08x}, expected {expected:08x}: what was read is not what was written; check the drive, "
                    "then resume from a checkpoint",
                    path=str(piece.file.path),
                    offset=piece.offset + begin,
                    wanted=nbytes,
                )
