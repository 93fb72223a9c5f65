"""Asynchronous file transfers between drives and host memory, over the native engine.

Knows files, addresses and byte counts; nothing of tensors, blocks or chunks. The caller owns the memory of a
transfer, and the file, and keeps both until `wait` has returned for its ticket (or the engine is closed).
"""

from __future__ import annotations

import errno
import os
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from greedysnake import _native
from greedysnake.errors import ConfigError, StorageError

Kind = Literal["read", "write"]

DEFAULT_ALIGNMENT = 4096
"""For kernels older than 6.1, which do not tell what O_DIRECT asks for; no drive in use asks for more."""

_CURES = {
    errno.ENOSPC: "free space on that drive or choose another directory",
    errno.EDQUOT: "raise the disk quota of this user or choose another directory",
    errno.EROFS: "remount the file system writable or choose another directory",
    errno.EIO: "the drive or its connection failed: look at dmesg, then restore from a checkpoint",
    errno.EACCES: "give this user read and write permission or choose another directory",
    errno.EPERM: "give this user read and write permission or choose another directory",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give the path of a file",
    errno.EMFILE: "raise the limit on open files with ulimit -n",
    errno.EFBIG: "the file system or ulimit -f caps the file size, choose another directory",
    errno.ENOMEM: "free memory on this host or lower queue_depth",
    errno.EBADF: "keep the file open until wait has returned for all of its transfers",
    errno.EFAULT: "keep the memory alive until wait has returned for the transfer",
    errno.EINVAL: "check the alignment of address, offset and size against what the file asks for",
    errno.ECANCELED: "the engine was closed before this transfer started",
}


@dataclass(frozen=True)
class IoCounters:
    """Totals since the engine was made; bytes count when a piece has ended, requests when submitted."""

    read_bytes: int
    write_bytes: int
    read_requests: int
    write_requests: int
    busy_s: float
    """Time with at least one request that waits, also for a rate limit, or is in flight."""


class File:
    """An open file; whoever opened it closes it, after waiting for all of its transfers."""

    def __init__(
        self,
        fd: int,
        path: str,
        *,
        direct: bool,
        writable: bool,
        memory_alignment: int,
        offset_alignment: int,
    ) -> None:
        self.fd = fd
        self.path = path
        self.direct = direct
        self.writable = writable
        self.memory_alignment = memory_alignment
        self.offset_alignment = offset_alignment

    def sync(self) -> None:
        """Make written data survive a power cut (fdatasync); blocks. Wait for the writes first."""
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise _open_error("fdatasync", self.path, error) from error

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A transfer under way; give it to `wait` once."""

    number: int
    kind: Kind
    path: str
    offset: int
    nbytes: int


class IoEngine:
    """Moves bytes between files and memory in the background.

    Requests are cut into pieces of `piece_bytes`, of which at most `queue_depth` (with threads: at most
    `num_threads`) are in flight. Pieces of urgent requests go first, otherwise in order of submission.
    Requests that overlap have no order among each other: wait for one before submitting the next. The rate
    limits make the drive look slower. All methods may be called from any thread.
    """

    def __init__(
        self,
        backend: str = "auto",
        *,
        queue_depth: int = 32,
        num_threads: int = 8,
        piece_bytes: int = 1 << 20,
        read_bytes_per_s: float | None = None,
        write_bytes_per_s: float | None = None,
        total_bytes_per_s: float | None = None,
    ) -> None:
        _check_sizes(queue_depth, num_threads, piece_bytes)
        limits = [_checked_limit(limit) for limit in (read_bytes_per_s, write_bytes_per_s, total_bytes_per_s)]
        self.backend = _choose_backend(backend)
        try:
            self._native = _native.IoEngine(self.backend == "io_uring", queue_depth, num_threads, piece_bytes, *limits)
        except OSError as error:
            raise StorageError(
                f"the {self.backend} I/O backend could not start: {_words(error.errno or 0)};"
                " lower queue_depth or num_threads, or raise this user's limits (ulimit -a)",
                errno_name=_errno_name(error.errno or 0),
            ) from error
        self._buffered_devices: set[int] = set()

    def open(self, path: str | os.PathLike[str], *, create: bool = False, writable: bool = True) -> File:
        """Open a file past the page cache (O_DIRECT), or through it where the file system refuses that.

        The second case gives one warning per file system, because it costs memory and speed.
        """
        name = os.fspath(path)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0) | os.O_CLOEXEC
        try:
            fd = _open_direct(name, flags)
            direct = fd is not None
            if fd is None:
                fd = os.open(name, flags, 0o644)
        except OSError as error:
            raise _open_error("open", name, error) from error
        memory, offset = _direct_alignment(fd) if direct else (1, 1)
        file = File(fd, name, direct=direct, writable=writable, memory_alignment=memory, offset_alignment=offset)
        if not direct:
            self._warn_buffered(file)
        return file

    def submit(self, kind: Kind, file: File, offset: int, address: int, nbytes: int, urgent: bool = False) -> Ticket:
        """Start a transfer and return at once; the caller keeps memory and file until `wait` returns."""
        _check_transfer(kind, file, offset, address, nbytes)
        number = self._native.submit(kind == "write", file.fd, offset, address, nbytes, urgent, file.offset_alignment)
        if number is None:
            raise StorageError(f"{kind} of {file.path} was refused: the I/O engine is closed", path=file.path)
        return Ticket(number, kind, file.path, offset, nbytes)

    def wait(self, ticket: Ticket) -> None:
        """Block until the transfer has ended, without holding the GIL; raise StorageError if it failed.

        Nothing touches the memory after this returns or raises. Ctrl-C is served afterwards, for that reason.
        """
        try:
            error, got = self._native.wait(ticket.number)
        except IndexError as unknown:
            raise _unknown_ticket(ticket) from unknown
        if error != 0 or got < ticket.nbytes:
            raise _transfer_error(ticket, error, got)

    def poll(self, ticket: Ticket) -> bool:
        """Tell whether `wait` would return at once."""
        try:
            return self._native.poll(ticket.number)
        except IndexError as unknown:
            raise _unknown_ticket(ticket) from unknown

    def counters(self) -> IoCounters:
        """Totals since the engine was made."""
        return IoCounters(*self._native.counters()[:5])

    def close(self, *, cancel: bool = False) -> None:
        """Finish what was submitted, then end all threads; with `cancel`, finish only the pieces in flight.

        Afterwards no memory is touched any more and outcomes that nobody waited for are gone.
        """
        self._native.close(cancel)

    def __enter__(self) -> IoEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    def _inject(
        self,
        fault: Literal["error", "short", "eof", "delay", "flip"],
        value: int = 0,
        *,
        direction: Literal["any", "read", "write"] = "any",
        nth: int = 0,
        probability: float = 0.0,
        seed: int = 0,
        piece: int = 0,
    ) -> None:
        """For tests: make the nth matching request from now on (or a share of them) misbehave.

        `value` is the errno, the bytes reported by one short transfer, the delay in ms, or the bit to flip.
        """
        self._native.add_fault(fault, value, direction, nth, probability, seed, piece)

    def _clear_faults(self) -> None:
        """For tests: forget all planted faults that have not picked a request yet."""
        self._native.clear_faults()

    def _peak_in_flight(self) -> int:
        """For tests: the most pieces that were ever in flight at once."""
        return self._native.counters()[5]

    def _warn_buffered(self, file: File) -> None:
        device = os.fstat(file.fd).st_dev
        if device in self._buffered_devices:
            return
        self._buffered_devices.add(device)
        warnings.warn(
            f"the file system of {file.path} refuses O_DIRECT: transfers go through the page cache, at the"
            " cost of RAM and speed; use a directory on a local ext4 or xfs drive to avoid this",
            stacklevel=3,
        )


def io_uring_available() -> tuple[bool, str]:
    """Ask the kernel whether io_uring can be used here, and why not if not."""
    error, step = _native.probe_uring()
    if error == 0:
        return True, "io_uring reads and writes work"
    cure = {
        errno.ENOSYS: "the kernel lacks it or a sandbox hides it: needs Linux 5.11, and in a container"
        " docker run --security-opt seccomp=unconfined",
        errno.EPERM: "it is blocked: in a container use docker run --security-opt seccomp=unconfined,"
        " else sysctl kernel.io_uring_disabled=0",
        errno.ENOMEM: "too little lockable memory: raise ulimit -l",
    }.get(error, "the kernel does not offer what is needed: use Linux 5.11 or newer")
    return False, f"{step} ({_errno_name(error)}); {cure}"


def _choose_backend(backend: str) -> str:
    if backend not in ("auto", "io_uring", "threads"):
        raise ConfigError(f'I/O backend is {backend!r}: use "auto", "io_uring" or "threads"')
    if backend == "threads":
        return "threads"
    available, reason = io_uring_available()
    if available:
        return "io_uring"
    if backend == "io_uring":
        raise ConfigError(f'io_uring was asked for but cannot be used: {reason}; or set backend="threads"')
    return "threads"


def _check_sizes(queue_depth: int, num_threads: int, piece_bytes: int) -> None:
    if not 1 <= queue_depth <= 4096:
        raise ConfigError(f"queue_depth is {queue_depth}: use 1 to 4096")
    if not 1 <= num_threads <= 1024:
        raise ConfigError(f"num_threads is {num_threads}: use 1 to 1024")
    if piece_bytes % DEFAULT_ALIGNMENT or not DEFAULT_ALIGNMENT <= piece_bytes <= 1 << 30:
        raise ConfigError(
            f"piece_bytes is {piece_bytes}: use a multiple of {DEFAULT_ALIGNMENT} up to {1 << 30},"
            " because O_DIRECT transfers start at aligned offsets"
        )


def _checked_limit(bytes_per_s: float | None) -> float:
    if bytes_per_s is None:
        return 0.0
    if not bytes_per_s > 0:
        raise ConfigError(f"a rate limit is {bytes_per_s} bytes/s: use a positive number, or None for no limit")
    return float(bytes_per_s)


def _open_direct(name: str, flags: int) -> int | None:
    """Open with O_DIRECT; None where the file system refuses it."""
    try:
        fd = os.open(name, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    # Some files (encrypted, inline data) open with O_DIRECT and then refuse every transfer.
    if _direct_alignment(fd)[1] == 0:
        os.close(fd)
        return None
    return fd


def _direct_alignment(fd: int) -> tuple[int, int]:
    known, memory, offset = _native.direct_alignment(fd)
    return (memory, offset) if known else (DEFAULT_ALIGNMENT, DEFAULT_ALIGNMENT)


def _check_transfer(kind: str, file: File, offset: int, address: int, nbytes: int) -> None:
    if kind not in ("read", "write"):
        raise ConfigError(f'transfer kind is {kind!r}: use "read" or "write"')
    if file.fd < 0:
        raise ConfigError(f"{kind} of {file.path}: the file was closed, open it again")
    if kind == "write" and not file.writable:
        raise ConfigError(f"write to {file.path}: it was opened read-only, open it with writable=True")
    if nbytes <= 0 or offset < 0 or address <= 0:
        raise ConfigError(
            f"{kind} of {nbytes} bytes at offset {offset} of {file.path}, memory at {address:#x}:"
            " sizes and addresses must be positive and offsets not negative"
        )
    if offset % file.offset_alignment or nbytes % file.offset_alignment or address % file.memory_alignment:
        raise ConfigError(
            f"{kind} of {nbytes} bytes at offset {offset} of {file.path}, memory at {address:#x}: O_DIRECT"
            f" wants offset and size in multiples of {file.offset_alignment},"
            f" memory in multiples of {file.memory_alignment}"
        )


def _transfer_error(ticket: Ticket, error: int, got: int) -> StorageError:
    if error == 0:
        problem = "the file ends there, truncated or never written in full; restore it from a checkpoint"
    else:
        problem = f"{_words(error)}; {_CURES.get(error, 'see dmesg for what the kernel says')}"
    return StorageError(
        f"{ticket.kind} of {ticket.nbytes} bytes at offset {ticket.offset} of {ticket.path}"
        f" stopped after {got} bytes: {problem}",
        path=ticket.path,
        offset=ticket.offset,
        wanted=ticket.nbytes,
        got=got,
        errno_name=_errno_name(error) if error else "EOF",
    )


def _open_error(action: str, path: str, error: OSError) -> StorageError:
    number = error.errno or 0
    cure = _CURES.get(number, "see dmesg for what the kernel says")
    return StorageError(
        f"{action} of {path} failed: {_words(number)}; {cure}", path=path, errno_name=_errno_name(number)
    )


def _unknown_ticket(ticket: Ticket) -> ConfigError:
    return ConfigError(
        f"ticket {ticket.number} ({ticket.kind} of {ticket.path}) is unknown:"
        " it was waited for before, or its engine is closed"
    )


def _words(number: int) -> str:
    return f"{_errno_name(number)} ({os.strerror(number)})"


def _errno_name(number: int) -> str:
    return errno.errorcode.get(number, f"errno {number}")
