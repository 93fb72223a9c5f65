"""The I/O engine against fio on one directory: python benchmarks/io.py DIR [--json].

Everyone moves random 1 MiB blocks of the same written-out file with O_DIRECT at depth 32. The contenders take
turns within each round and the ratio is taken within a round, because drives drift over minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from greedysnake.runtime.io import File, IoEngine, Kind, Ticket, io_uring_available

BLOCK_BYTES = 1 << 20
DEPTH = 32
# More requests wait than are in flight, as in training; they share buffers, whose content nobody checks.
QUEUED_PER_SLOT = 2
# Starting threads and filling the queue is not counted, for anyone.
RAMP_S = 0.3
WRITE_SHARES = {"read": 0.0, "write": 1.0, "mix": 0.5}
FIO_MODES = {"read": "randread", "write": "randwrite", "mix": "randrw"}
TARGETS = {"io_uring": 0.95, "threads": 0.90}


@dataclass(frozen=True)
class Result:
    """One contender in one case; rates are bytes/s, one per round."""

    case: str
    contender: str
    rates: list[float]
    ratio_to_fio: float

    @property
    def rate(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rates)


class Buffers:
    """One block of memory per piece in flight, in a file of /dev/shm that fio can map as well.

    All contenders must use the same physical pages: how scattered they are changes the rate by up to half
    (1 MiB in 4 KiB pages is 256 segments, more than many drives take in one command).
    """

    def __init__(self) -> None:
        self.path = Path("/dev/shm") / f"greedysnake-io-benchmark-{os.getpid()}"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, DEPTH * BLOCK_BYTES)
        self._memory = mmap.mmap(descriptor, DEPTH * BLOCK_BYTES)
        os.close(descriptor)
        self._memory[:] = os.urandom(len(self._memory))
        self.addresses = [
            ctypes.addressof(ctypes.c_char.from_buffer(self._memory, i * BLOCK_BYTES)) for i in range(DEPTH)
        ]

    def __enter__(self) -> Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)


def write_out(path: Path, file_bytes: int, buffers: Buffers) -> None:
    """Allocate and write the whole file, so that no contender pays for new or unwritten extents."""
    with IoEngine() as engine, engine.open(path, create=True) as file:
        os.posix_fallocate(file.fd, 0, file_bytes)
        tickets = [
            engine.submit("write", file, offset, buffers.addresses[0], BLOCK_BYTES)
            for offset in range(0, file_bytes, BLOCK_BYTES)
        ]
        for ticket in tickets:
            engine.wait(ticket)
        file.sync()


def run_ours(backend: str, file: File, file_bytes: int, case: str, seconds: float, buffers: Buffers) -> float:
    """Bytes per second of our engine with its default settings."""
    draw = random.Random(0)
    with IoEngine(backend, queue_depth=DEPTH) as engine:
        free = deque(buffers.addresses * QUEUED_PER_SLOT)
        pending: deque[tuple[Ticket, int]] = deque()

        def keep_busy(duration_s: float) -> float:
            """Keep the engine's queue full; returns the bytes per second that ended meanwhile."""
            begin_s, begin_bytes = time.perf_counter(), bytes_moved(engine)
            while (elapsed_s := time.perf_counter() - begin_s) < duration_s:
                while free:
                    kind: Kind = "write" if draw.random() < WRITE_SHARES[case] else "read"
                    offset = draw.randrange(file_bytes // BLOCK_BYTES) * BLOCK_BYTES
                    address = free.popleft()
                    pending.append((engine.submit(kind, file, offset, address, BLOCK_BYTES), address))
                wait_oldest(engine, pending, free)
            return (bytes_moved(engine) - begin_bytes) / elapsed_s

        keep_busy(RAMP_S)
        return keep_busy(seconds)


def bytes_moved(engine: IoEngine) -> int:
    """Both directions."""
    counters = engine.counters()
    return counters.read_bytes + counters.write_bytes


def wait_oldest(engine: IoEngine, pending: deque[tuple[Ticket, int]], free: deque[int]) -> None:
    """Wait for the oldest transfer and collect those behind it that have ended as well."""
    while True:
        ticket, address = pending.popleft()
        engine.wait(ticket)
        free.append(address)
        if not pending or not engine.poll(pending[0][0]):
            return


def run_fio(path: Path, file_bytes: int, case: str, seconds: float, buffers: Buffers) -> float:
    """Bytes per second of fio on the same file and memory."""
    command = [
        "fio",
        "--name=case",
        f"--filename={path}",
        f"--size={file_bytes}",
        f"--rw={FIO_MODES[case]}",
        "--rwmixread=50",
        f"--bs={BLOCK_BYTES}",
        f"--iodepth={DEPTH}",
        "--ioengine=io_uring",
        "--direct=1",
        f"--iomem=mmapshared:{buffers.path}",
        "--fallocate=none",
        "--overwrite=1",
        "--norandommap",
        "--time_based",
        f"--ramp_time={round(RAMP_S * 1000)}ms",
        f"--runtime={round(seconds * 1000)}ms",
        "--output-format=json",
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    total_bytes = int(job["read"]["io_bytes"]) + int(job["write"]["io_bytes"])
    run_s = max(int(job["read"]["runtime"]), int(job["write"]["runtime"])) / 1000
    return total_bytes / run_s


def measure(path: Path, file_bytes: int, num_rounds: int, seconds: float, buffers: Buffers) -> list[Result]:
    """All contenders in all cases, interleaved."""
    contenders = ["fio", *(["io_uring"] if io_uring_available()[0] else []), "threads"]
    rates: dict[tuple[str, str], list[float]] = {}
    with IoEngine("threads") as opener, opener.open(path) as file:
        for round_index in range(num_rounds):
            for case in WRITE_SHARES:
                # Whoever goes first in a round may find the drive rested, so the order rotates.
                turn = round_index % len(contenders)
                for contender in contenders[turn:] + contenders[:turn]:
                    if contender == "fio":
                        rate = run_fio(path, file_bytes, case, seconds, buffers)
                    else:
                        rate = run_ours(contender, file, file_bytes, case, seconds, buffers)
                    rates.setdefault((case, contender), []).append(rate)
    results = []
    for (case, contender), own in rates.items():
        ratios = [rate / fio for rate, fio in zip(own, rates[case, "fio"], strict=True)]
        results.append(Result(case, contender, own, statistics.median(ratios)))
    return sorted(results, key=lambda r: (list(WRITE_SHARES).index(r.case), contenders.index(r.contender)))


def print_table(results: list[Result]) -> None:
    """One line per case and contender."""
    print(f"{'case':<6} {'contender':<10} {'GB/s':>6}  {'of fio':>6}  {'target':>6}")
    for result in results:
        line = f"{result.case:<6} {result.contender:<10} {result.rate / 1e9:6.2f}  {result.ratio_to_fio:6.3f}"
        target = TARGETS.get(result.contender)
        if target is not None:
            line += f"  {target:6.2f}  {'met' if result.ratio_to_fio >= target else 'MISSED'}"
        print(line)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="on the drive to measure; one file is made there and removed")
    parser.add_argument("--file-gib", type=float, default=2.0, help="size of the file")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="per contender, case and round")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("this benchmark compares with fio, which is not installed: apt install fio")
    if not options.directory.is_dir():
        sys.exit(f"{options.directory} is not a directory: give one on the drive to measure")
    file_bytes = int(options.file_gib * (1 << 30)) // BLOCK_BYTES * BLOCK_BYTES
    path = options.directory / f"greedysnake-io-benchmark-{os.getpid()}"
    try:
        with Buffers() as buffers:
            write_out(path, file_bytes, buffers)
            results = measure(path, file_bytes, options.rounds, options.seconds, buffers)
    finally:
        path.unlink(missing_ok=True)
    if options.json:
        rows = [{**asdict(result), "rate": result.rate} for result in results]
        print(json.dumps({"file_bytes": file_bytes, "seconds": options.seconds, "results": rows}))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
