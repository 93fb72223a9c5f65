"""What one directory offers: filesystem, drive, O_DIRECT, free space, bandwidth. States facts; `doctor` judges them.

Its one file has no name from the moment it is open, so even a killed process leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import random
import re
import secrets
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from greedysnake.errors import StorageError
from greedysnake.runtime.io import File, IoEngine, Kind, Ticket
from greedysnake.sizes import format_size

MIN_FREE_BYTES = 1 << 30
"""Less than this is no room to train in, nor to measure in."""
FILE_BYTES = 512 << 20
PHASE_S = 0.5
"""Four phases make two seconds: fill, write, read, mix."""
BLOCK_BYTES = 1 << 20
NUM_PENDING = 64

Transfers = Iterator[tuple[Kind, int]]


@dataclass(frozen=True)
class Bandwidth:
    """Measured with blocks of 1 MiB in random order."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    """Half reads, half writes; the sum of both."""


@dataclass(frozen=True)
class Drive:
    """One directory and the drive under it. None means unknown."""

    path: str
    exists: bool
    """It is there, and a directory."""
    write_error: str | None = None
    """Why no file could be made and written there."""
    filesystem: str | None = None
    mount_point: str | None = None
    device_number: int | None = None
    """Directories with the same number share a filesystem."""
    drive: str | None = None
    """Name of the block device, with its model where the kernel knows it."""
    rotational: bool | None = None
    free_bytes: int | None = None
    direct: bool | None = None
    """O_DIRECT works."""
    memory_alignment: int | None = None
    offset_alignment: int | None = None
    bandwidth: Bandwidth | None = None
    why_no_bandwidth: str | None = None


def look_at_drive(path: str | os.PathLike[str], *, phase_s: float = PHASE_S) -> Drive:
    """Examine and measure one directory; takes four times `phase_s`."""
    directory = Path(path)
    if not directory.is_dir():
        return Drive(str(path), exists=False, why_no_bandwidth="there is no such directory")
    status = os.statvfs(directory)
    filesystem, mount_point = _mount(directory)
    device_number = directory.stat().st_dev
    drive, rotational = _block_device(device_number)
    facts = Drive(
        path=str(path),
        exists=True,
        filesystem=filesystem,
        mount_point=mount_point,
        device_number=device_number,
        drive=drive,
        rotational=rotational,
        free_bytes=status.f_bavail * status.f_frsize,
    )
    try:
        with IoEngine() as engine, _nameless_file(engine, directory) as file:
            facts = replace(
                facts,
                direct=file.direct,
                memory_alignment=file.memory_alignment,
                offset_alignment=file.offset_alignment,
            )
            return _with_bandwidth(facts, file, phase_s)
    except StorageError as error:
        return replace(facts, write_error=str(error), why_no_bandwidth="it cannot be written to")


def _with_bandwidth(facts: Drive, file: File, phase_s: float) -> Drive:
    free_bytes = facts.free_bytes or 0
    if free_bytes < MIN_FREE_BYTES:
        why = f"{format_size(free_bytes)} are free, measuring asks for {format_size(MIN_FREE_BYTES)}"
        return replace(facts, why_no_bandwidth=why)
    return replace(facts, bandwidth=_measure(file, min(FILE_BYTES, free_bytes // 2), phase_s))


@contextmanager
def _nameless_file(engine: IoEngine, directory: Path) -> Iterator[File]:
    path = directory / f".greedysnake-doctor-{secrets.token_hex(8)}"
    try:  # from before it is made: a signal may come at any time
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "unknown")
            raise StorageError(f"no file can be made there: {error.strerror} ({code})", errno_name=code) from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a refusal of O_DIRECT is one of the findings
            file = engine.open(path)
    finally:
        if path.exists():
            path.unlink()
    with file:
        yield file


def _measure(file: File, file_bytes: int, phase_s: float) -> Bandwidth:
    """Fills as much of the file as one phase allows, then works in the part that was filled."""
    memory = mmap.mmap(-1, NUM_PENDING * BLOCK_BYTES)
    pattern = random.Random(0).randbytes(BLOCK_BYTES)  # drives that compress must find nothing to gain
    for start in range(0, len(memory), BLOCK_BYTES):
        memory[start : start + BLOCK_BYTES] = pattern
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    addresses = [first + index * BLOCK_BYTES for index in range(NUM_PENDING)]
    in_order: Transfers = (("write", offset) for offset in range(0, file_bytes, BLOCK_BYTES))
    num_blocks, _ = _transfer(file, addresses, in_order, phase_s)
    _, write = _transfer(file, addresses, _random_transfers(num_blocks, ("write",)), phase_s)
    _, read = _transfer(file, addresses, _random_transfers(num_blocks, ("read",)), phase_s)
    _, mixed = _transfer(file, addresses, _random_transfers(num_blocks, ("read", "write")), phase_s)
    return Bandwidth(read, write, mixed)


def _random_transfers(num_blocks: int, kinds: tuple[Kind, ...]) -> Transfers:
    draw = random.Random(0)
    for kind in itertools.cycle(kinds):
        yield kind, draw.randrange(num_blocks) * BLOCK_BYTES


def _transfer(file: File, addresses: list[int], transfers: Transfers, seconds: float) -> tuple[int, float]:
    """Keeps transfers pending until the time is over; returns (how many ended in order, bytes per second).

    What is pending then is cancelled, so a slow drive does not make the phase longer.
    """
    free = deque(addresses)
    pending: deque[tuple[Ticket, int]] = deque()
    num_ended = 0
    with IoEngine() as engine:
        begin = time.perf_counter()
        while True:
            for kind, offset in itertools.islice(transfers, len(free)):
                address = free.popleft()
                pending.append((engine.submit(kind, file, offset, address, BLOCK_BYTES), address))
            if not pending:
                break
            ticket, address = pending.popleft()
            engine.wait(ticket)
            free.append(address)
            num_ended += 1
            if time.perf_counter() - begin >= seconds:
                break
        elapsed_s = time.perf_counter() - begin
        counters = engine.counters()
        engine.close(cancel=True)
    return num_ended, (counters.read_bytes + counters.write_bytes) / elapsed_s


def _mount(directory: Path) -> tuple[str | None, str | None]:
    """(type, mount point) of the filesystem that holds a directory; of two on one mount point the later counts."""
    real = directory.resolve()
    found: tuple[str | None, str | None] = (None, None)
    for line in os.fsdecode(Path("/proc/self/mounts").read_bytes()).splitlines():
        _, raw_point, filesystem, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), raw_point)
        if real.is_relative_to(point) and len(point) >= len(found[1] or ""):
            found = (filesystem, point)
    return found


def _block_device(device_number: int) -> tuple[str | None, bool | None]:
    """(name and model, rotational) of the drive behind a device number; a partition answers for its drive."""
    link = Path(f"/sys/dev/block/{os.major(device_number)}:{os.minor(device_number)}")
    if not link.exists():
        return None, None
    device = link.resolve()
    if not (device / "queue").is_dir():
        device = device.parent
    rotational = _text_in(device / "queue" / "rotational")
    model = _text_in(device / "device" / "model")
    name = f"{device.name} ({model})" if model else device.name
    return name, None if rotational is None else rotational == "1"


def _text_in(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
