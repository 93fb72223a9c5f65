"""What the drives can do under the mix of a step. For benchmarks/step.py."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from step_options import rate_limits

BLOCK = 4096
BOUND_IO = {"backend": "threads", "queue_depth": 8, "num_threads": 6, "piece_bytes": 4 << 20}
"""How the bound is measured, whatever --io says: a bad setting must not lower the bar that it is held against."""


def bound_io(options: argparse.Namespace) -> dict[str, Any]:
    return {**BOUND_IO, **rate_limits(options)}


def mixed_bandwidth(options: argparse.Namespace, paths: list[Path], seconds: float) -> float:
    """Bytes/s of reads and writes together, 14 : 12 as in a step, a chunk per request, over all that `paths` hold; 0
    where they hold nothing.

    What is written is what was read there, so an engine's files may be measured between its steps. The memory is of the
    kind that the engine uses, and three reads and three writes are in flight as in a step. Holes are left alone.
    """
    from greedysnake.runtime.arena import Arena
    from greedysnake.runtime.io import IoEngine

    chunk_bytes = -(-options.chunk_params * 12 // BLOCK) * BLOCK
    num_buffers, depth = 8, 3
    with IoEngine(**bound_io(options)) as io, Arena(num_buffers * chunk_bytes) as arena, ExitStack() as opened:
        free = [arena.allocate(chunk_bytes, "drive").data_ptr() for _ in range(num_buffers)]
        files = [opened.enter_context(io.open(path)) for path in paths]
        places = [(file, *place) for file in files for place in written_places(file.fd, chunk_bytes)]
        if not places:
            return 0.0
        stride = stride_over(len(places))
        reads: deque[tuple[Any, int, Any]] = deque()  # ticket, address, place
        writes: deque[tuple[Any, int]] = deque()
        read_bytes = write_bytes = num_reads = 0

        def finish_read() -> None:
            nonlocal write_bytes
            ticket, address, (file, offset, num_bytes) = reads.popleft()
            io.wait(ticket)
            if write_bytes * 14 < read_bytes * 12:
                writes.append((io.submit("write", file, offset, address, num_bytes), address))
                write_bytes += num_bytes
            else:
                free.append(address)

        def finish_write() -> None:
            ticket, address = writes.popleft()
            io.wait(ticket)
            free.append(address)

        start_s = time.perf_counter()
        while time.perf_counter() - start_s < seconds:
            if not free or len(writes) > depth:
                finish_write()
            place = places[num_reads * stride % len(places)]
            file, offset, num_bytes = place
            address = free.pop()
            reads.append((io.submit("read", file, offset, address, num_bytes), address, place))
            num_reads += 1
            read_bytes += num_bytes
            if len(reads) > depth:
                finish_read()
        while reads:
            finish_read()
        while writes:
            finish_write()
        elapsed_s = time.perf_counter() - start_s
    return (read_bytes + write_bytes) / elapsed_s


def stride_over(num_places: int) -> int:
    """Comes to every place, and not in the order of the file."""
    stride = 7
    while math.gcd(stride, num_places) > 1:
        stride += 1
    return stride


def written_places(fd: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Offsets and lengths of what has been written to a file, cut into chunks: reading a hole costs no drive."""
    places: list[tuple[int, int]] = []
    position, end = 0, os.fstat(fd).st_size
    while position < end:
        try:
            first = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:  # a hole up to the end
            break
        position = os.lseek(fd, first, os.SEEK_HOLE)
        last = position // BLOCK * BLOCK
        first = -(-first // BLOCK) * BLOCK
        places += [(offset, min(chunk_bytes, last - offset)) for offset in range(first, last, chunk_bytes)]
    return places
