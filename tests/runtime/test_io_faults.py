"""What the I/O engine does when drives, file systems and kernels misbehave.

Three sources of faults: rules planted in the engine (both backends), system calls changed by strace, and a
small file system of our own on a loop device.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from io_memory import KIB, MIB, Memory, file_of, random_bytes

from greedysnake.errors import StorageError
from greedysnake.runtime.io import IoEngine, Kind

HERE = Path(__file__).parent
PIECE = 16 * KIB
NUM_REQUESTS = 6
REQUEST = 3 * PIECE + 4 * KIB

CURES = {"ENOSPC": "free space", "EIO": "dmesg", "EROFS": "writable", "EDQUOT": "quota"}


@pytest.fixture(params=["auto", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    with IoEngine(str(request.param), piece_bytes=PIECE) as engine:
        yield engine


def transfer_all(engine: IoEngine, kind: Kind, path: Path, memory: Memory) -> list[StorageError | None]:
    """Submit all requests at once; one outcome per request."""
    outcomes: list[StorageError | None] = []
    with engine.open(path) as file:
        tickets = [
            engine.submit(kind, file, i * REQUEST, memory.address + i * REQUEST, REQUEST) for i in range(NUM_REQUESTS)
        ]
        for ticket in tickets:
            try:
                engine.wait(ticket)
                outcomes.append(None)
            except StorageError as error:
                outcomes.append(error)
    return outcomes


def prepare(kind: Kind, path: Path) -> tuple[bytes, Memory]:
    """The file before the transfer, and memory that holds what is to be written."""
    new = random_bytes(NUM_REQUESTS * REQUEST, seed=4)
    path.write_bytes(bytes(len(new)) if kind == "write" else new)
    return new, Memory(len(new), new if kind == "write" else None)


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("nth", range(1, NUM_REQUESTS + 1))
@pytest.mark.parametrize("name", ["ENOSPC", "EIO", "EROFS", "EDQUOT"])
def test_only_the_nth_request_fails(engine: IoEngine, tmp_path: Path, kind: Kind, nth: int, name: str) -> None:
    new, memory = prepare(kind, tmp_path / "file")
    engine._inject("error", getattr(errno, name), direction=kind, nth=nth, piece=nth % 4)
    outcomes = transfer_all(engine, kind, tmp_path / "file", memory)
    error = outcomes.pop(nth - 1)
    assert outcomes == [None] * (NUM_REQUESTS - 1)
    assert error is not None
    assert error.path == str(tmp_path / "file")
    assert (error.offset, error.wanted, error.errno_name) == ((nth - 1) * REQUEST, REQUEST, name)
    assert error.got is not None and 0 <= error.got < REQUEST
    for part in (kind, str(REQUEST), str((nth - 1) * REQUEST), str(tmp_path), name, CURES[name]):
        assert part in str(error)
    moved = (tmp_path / "file").read_bytes() if kind == "write" else memory.bytes()
    for index in set(range(NUM_REQUESTS)) - {nth - 1}:
        assert moved[index * REQUEST : (index + 1) * REQUEST] == new[index * REQUEST : (index + 1) * REQUEST]


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("reported", [1, 511, 512, 4095, 4096, 5000, PIECE - 1])
@pytest.mark.parametrize("piece", [0, 1, 3])
def test_short_transfers_are_continued(engine: IoEngine, tmp_path: Path, kind: Kind, reported: int, piece: int) -> None:
    # The fault moves fewer bytes than it reports (aligned down), so a wrong continuation shows in the data.
    new, memory = prepare(kind, tmp_path / "file")
    for nth in range(1, NUM_REQUESTS + 1):
        engine._inject("short", reported, nth=nth, piece=piece)
    assert transfer_all(engine, kind, tmp_path / "file", memory) == [None] * NUM_REQUESTS
    assert memory.bytes() == new
    assert (tmp_path / "file").read_bytes() == new


@pytest.mark.parametrize("nth", range(1, NUM_REQUESTS + 1))
def test_zero_bytes_read_is_the_end_of_the_file(engine: IoEngine, tmp_path: Path, nth: int) -> None:
    _, memory = prepare("read", tmp_path / "file")
    engine._inject("eof", nth=nth, piece=1)
    outcomes = transfer_all(engine, "read", tmp_path / "file", memory)
    error = outcomes.pop(nth - 1)
    assert outcomes == [None] * (NUM_REQUESTS - 1)
    assert error is not None and error.errno_name == "EOF" and "file ends" in str(error)


def test_zero_bytes_written_is_an_error_not_a_loop(engine: IoEngine, tmp_path: Path) -> None:
    _, memory = prepare("write", tmp_path / "file")
    engine._inject("eof", direction="write", nth=1)
    error = transfer_all(engine, "write", tmp_path / "file", memory)[0]
    assert error is not None and error.errno_name == "EIO"


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("nth", [1, NUM_REQUESTS])
def test_flipped_bit_lands_in_the_data_and_nowhere_else(engine: IoEngine, tmp_path: Path, kind: Kind, nth: int) -> None:
    new, memory = prepare(kind, tmp_path / "file")
    engine._inject("flip", 8 * 100 + 3, direction=kind, nth=nth, piece=2)
    assert transfer_all(engine, kind, tmp_path / "file", memory) == [None] * NUM_REQUESTS
    damaged = bytearray(new)
    damaged[(nth - 1) * REQUEST + 2 * PIECE + 100] ^= 1 << 3
    on_drive = (tmp_path / "file").read_bytes()
    # A write leaves the caller's memory as it was.
    assert (on_drive, memory.bytes()) == ((damaged, new) if kind == "write" else (new, damaged))


def test_delayed_request_is_overtaken(engine: IoEngine, tmp_path: Path) -> None:
    memory = Memory(8 * KIB)
    engine._inject("delay", 150, direction="read", nth=1)
    with file_of(engine, tmp_path / "file", random_bytes(8 * KIB, seed=5)) as file:
        late = engine.submit("read", file, 0, memory.address, 4 * KIB)
        engine.wait(engine.submit("read", file, 4 * KIB, memory.address + 4 * KIB, 4 * KIB))
        assert not engine.poll(late)
        engine.wait(late)
    assert memory.bytes() == random_bytes(8 * KIB, seed=5)


@pytest.mark.parametrize("name", ["EINTR", "EAGAIN"])
def test_interrupted_transfers_are_tried_again(engine: IoEngine, tmp_path: Path, name: str) -> None:
    new, memory = prepare("read", tmp_path / "file")
    engine._inject("error", getattr(errno, name), probability=0.7, seed=1)
    assert transfer_all(engine, "read", tmp_path / "file", memory) == [None] * NUM_REQUESTS
    assert memory.bytes() == new


def test_probability_picks_the_same_requests_for_the_same_seed(tmp_path: Path) -> None:
    _, memory = prepare("read", tmp_path / "file")
    picks = []
    for seed in (7, 7, 8, 9, 10):
        with IoEngine("threads", piece_bytes=PIECE) as engine:
            engine._inject("error", errno.EIO, probability=0.5, seed=seed)
            outcomes = transfer_all(engine, "read", tmp_path / "file", memory)
            picks.append([outcome is None for outcome in outcomes])
            engine._clear_faults()
            assert transfer_all(engine, "read", tmp_path / "file", memory) == [None] * NUM_REQUESTS
    assert picks[0] == picks[1]
    assert len({tuple(pick) for pick in picks}) > 1


@pytest.mark.parametrize("keep", [0, 1, 5000, PIECE, REQUEST + 100, 2 * REQUEST - 1])
def test_truncated_file_says_how_much_there_was(engine: IoEngine, tmp_path: Path, keep: int) -> None:
    content = random_bytes(NUM_REQUESTS * REQUEST, seed=6)
    (tmp_path / "file").write_bytes(content[:keep])
    memory = Memory(2 * REQUEST)
    with engine.open(tmp_path / "file") as file:
        ticket = engine.submit("read", file, 0, memory.address, 2 * REQUEST)
        with pytest.raises(StorageError, match=r"file ends there.*checkpoint") as caught:
            engine.wait(ticket)
    assert (caught.value.wanted, caught.value.errno_name) == (2 * REQUEST, "EOF")
    # Pieces beyond the first that fell short are dropped, so fewer bytes may have been tried, never more.
    assert caught.value.got is not None and caught.value.got <= keep


def test_missing_file_and_forbidden_directory_are_named(engine: IoEngine, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"ENOENT.*check the path"):
        engine.open(tmp_path / "none")
    forbidden = tmp_path / "forbidden"
    forbidden.mkdir(mode=0o555)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        with pytest.raises(StorageError, match=r"EACCES.*permission") as caught:
            engine.open(forbidden / "file", create=True)
    finally:
        if was_root:
            os.seteuid(0)
    assert caught.value.path == str(forbidden / "file")


# System calls tampered with by strace.

SCRIPT = """
import os, sys, warnings
sys.path.insert(0, {here!r})
from pathlib import Path
from io_memory import KIB, MIB, Memory, file_of, random_bytes
from greedysnake.errors import ConfigError, StorageError
from greedysnake.runtime.io import IoEngine, io_uring_available
path = Path({path!r})
"""


def run_under_strace(options: list[str], script: str, path: Path) -> str:
    """Run a script in a process whose system calls strace changes; returns what it prints."""
    source = SCRIPT.format(here=str(HERE), path=str(path)) + textwrap.dedent(script)
    return strace(options, [sys.executable, "-c", source], path.parent)


def strace(options: list[str], command: list[str], directory: Path) -> str:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: apt install strace")
    log = directory / "strace.log"
    done = subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-o", str(log), *options, *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "PTRACE" in done.stderr:
        pytest.skip(f"this sandbox forbids ptrace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# One thread, because strace counts the calls of each thread for itself.
TRANSFER = """
content = random_bytes(64 * KIB, seed=9)
kind = {kind!r}
path.write_bytes(bytes(64 * KIB) if kind == "write" else content)
memory = Memory(64 * KIB, content if kind == "write" else None)
with IoEngine("threads", num_threads=1, piece_bytes=16 * KIB) as engine, engine.open(path) as file:
    try:
        engine.wait(engine.submit(kind, file, 0, memory.address, 64 * KIB))
        moved = path.read_bytes() if kind == "write" else memory.bytes()
        wrong = [i for i in range(64 * KIB) if moved[i] != content[i]]
        print("ok", file.direct, file.offset_alignment, max(wrong, default=-1) + 1)
    except StorageError as error:
        print(error.errno_name, error.got, error)
"""


@pytest.mark.parametrize(("kind", "call"), [("read", "pread64"), ("write", "pwrite64")])
@pytest.mark.parametrize("name", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("nth", [1, 4])
def test_thread_backend_reports_the_error_of_the_system_call(
    tmp_path: Path, kind: str, call: str, name: str, nth: int
) -> None:
    options = ["-e", f"trace={call}", "-P", str(tmp_path / "file"), "-e"]
    output = run_under_strace(
        [*options, f"inject={call}:error={name}:when={nth}"], TRANSFER.format(kind=kind), tmp_path / "file"
    )
    assert output.startswith(f"{name} {(nth - 1) * 16 * KIB} ")
    assert str(tmp_path / "file") in output and CURES[name] in output


@pytest.mark.parametrize(("kind", "call"), [("read", "pread64"), ("write", "pwrite64")])
@pytest.mark.parametrize("name", ["EINTR", "EAGAIN"])
def test_thread_backend_retries_interrupted_calls(tmp_path: Path, kind: str, call: str, name: str) -> None:
    options = [
        "-e",
        f"trace={call}",
        "-P",
        str(tmp_path / "file"),
        "-e",
        f"inject={call}:error={name}:when=1..3",
    ]
    output = run_under_strace(options, TRANSFER.format(kind=kind), tmp_path / "file")
    assert output.startswith("ok") and output.split()[-1] == "0"


@pytest.mark.parametrize(("kind", "call"), [("read", "pread64"), ("write", "pwrite64")])
@pytest.mark.parametrize("reported", [511, 8191])
def test_thread_backend_continues_short_calls_at_an_aligned_offset(
    tmp_path: Path, kind: str, call: str, reported: int
) -> None:
    # strace only claims the bytes; what was not moved again shows as stale data before the aligned position.
    options = ["-e", f"trace={call}", "-P", str(tmp_path / "file"), "-e"]
    output = run_under_strace(
        [*options, f"inject={call}:retval={reported}:when=1"], TRANSFER.format(kind=kind), tmp_path / "file"
    )
    status, _, alignment, stale_bytes = output.split()
    step = int(alignment)
    assert (status, int(stale_bytes)) == ("ok", reported // step * step)


def test_auto_falls_back_to_threads_where_io_uring_is_blocked(tmp_path: Path) -> None:
    script = """
    print(io_uring_available())
    with IoEngine() as engine:
        print(engine.backend)
    try:
        IoEngine("io_uring")
    except ConfigError as error:
        print(error)
    """
    options = ["-e", "trace=io_uring_setup", "-e", "inject=io_uring_setup:error=EPERM"]
    report, chosen, refusal = run_under_strace(options, script, tmp_path / "file").splitlines()
    assert report.startswith("(False") and "EPERM" in report
    assert chosen == "threads"
    for part in ("EPERM", "--security-opt seccomp=unconfined", 'backend="threads"'):
        assert part in refusal


def test_the_engine_tests_pass_where_io_uring_is_blocked(tmp_path: Path) -> None:
    subset = "auto and not rate_limit and not overtake"
    strace(
        ["-e", "trace=io_uring_setup", "-e", "inject=io_uring_setup:error=ENOSYS"],
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "test_io.py"), "-k", subset],
        tmp_path,
    )


def test_a_ring_that_breaks_fails_its_requests_and_still_closes(tmp_path: Path) -> None:
    script = """
    path.write_bytes(bytes(4 * MIB))
    memory = Memory(4 * MIB)
    with IoEngine() as engine, engine.open(path) as file:
        names = set()
        for _ in range(10):
            ticket = engine.submit("read", file, 0, memory.address, 4 * MIB)
            try:
                engine.wait(ticket)
            except StorageError as error:
                names.add(error.errno_name)
        print(engine.backend, *names)
    """
    # The probe enters the ring twice; strace counts the ring's own thread from one again.
    options = ["-e", "trace=io_uring_enter", "-e", "inject=io_uring_enter:error=ENXIO:when=3+"]
    backend, *names = run_under_strace(options, script, tmp_path / "file").split()
    assert backend == "threads" or names == ["ENXIO"]


def test_refused_o_direct_gives_one_warning_and_buffered_transfers(tmp_path: Path) -> None:
    script = """
    other = path.with_name("other")
    for name in (path, other):
        name.write_bytes(random_bytes(10000, seed=1))
    with warnings.catch_warnings(record=True) as caught, IoEngine() as engine:
        warnings.simplefilter("always")
        for name in (path, other):
            file = engine.open(name)
            memory = Memory(10000)
            engine.wait(engine.submit("read", file, 1, memory.address + 1, 9999))
            print(file.direct, memory.bytes(1) == random_bytes(10000, seed=1)[1:])
    print(len(caught), caught[0].message)
    """
    # The script itself opens both files first; then each is tried with O_DIRECT (calls 3 and 5) and without.
    paths = ["-P", str(tmp_path / "file"), "-P", str(tmp_path / "other")]
    options = ["-e", "trace=openat", *paths, "-e", "inject=openat:error=EINVAL:when=3+2"]
    first, second, warned = run_under_strace(options, script, tmp_path / "file").splitlines()
    assert (first, second) == ("False True", "False True")
    assert warned.startswith("1 ") and "refuses O_DIRECT" in warned and str(tmp_path / "file") in warned


# A small file system of our own.


@pytest.fixture
def small_drive(mount: Callable[[int], Path]) -> Path:
    """A mounted ext4 of 16 MiB."""
    return mount(16)


@pytest.mark.root
def test_full_drive_raises_and_keeps_what_it_has(engine: IoEngine, small_drive: Path) -> None:
    content = random_bytes(4 * MIB, seed=11)
    memory, target = Memory(4 * MIB, content), Memory(4 * MIB)
    with engine.open(small_drive / "kept", create=True) as kept:
        engine.wait(engine.submit("write", kept, 0, memory.address, 4 * MIB))
        kept.sync()
        with engine.open(small_drive / "too-much", create=True) as file:
            tickets = [engine.submit("write", file, i * 4 * MIB, memory.address, 4 * MIB) for i in range(5)]
            errors = []
            for ticket in tickets:
                try:
                    engine.wait(ticket)
                except StorageError as error:
                    errors.append(error)
        assert errors
        assert {error.errno_name for error in errors} == {"ENOSPC"}
        assert "free space" in str(errors[0])
        engine.wait(engine.submit("read", kept, 0, target.address, 4 * MIB))
    assert target.bytes() == content


@pytest.mark.root
def test_read_only_drive_is_named_when_opening(engine: IoEngine, small_drive: Path) -> None:
    (small_drive / "file").write_bytes(random_bytes(4 * KIB, seed=12))
    subprocess.run(["mount", "-o", "remount,ro", str(small_drive)], check=True)
    with pytest.raises(StorageError, match=r"EROFS.*remount"):
        engine.open(small_drive / "file")
    memory = Memory(4 * KIB)
    with engine.open(small_drive / "file", writable=False) as file:
        engine.wait(engine.submit("read", file, 0, memory.address, 4 * KIB))
    assert memory.bytes() == random_bytes(4 * KIB, seed=12)
