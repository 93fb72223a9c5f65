"""What the store promises when processes die, drives fail, power goes and files are damaged."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import store_writer
from store_writer import EXTENTS, Buffer, check_step, open_store, write_step

from greedysnake.errors import PlanError, StorageError
from greedysnake.runtime.io import IoEngine, io_uring_available
from greedysnake.runtime.store import ExtentSpec, Store

BACKENDS = ["threads", *(["io_uring"] if io_uring_available()[0] else [])]
NUM_REQUESTS = sum(len(spec.parts) for spec in EXTENTS)
"""Write requests of the first step, which writes part by part."""

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture(params=BACKENDS)
def io(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    with IoEngine(request.param) as engine:
        yield engine


def publish_steps(path: Path, io: IoEngine, num_steps: int) -> None:
    with open_store(path, io) as store:
        for step in range(1, num_steps + 1):
            write_step(store, step)
            store.publish(step, {"step": step})


def assert_resumes_at(path: Path, io: IoEngine, step: int) -> None:
    with open_store(path, io, resume=True) as store:
        check_step(store, step)


# Transfers that fail


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("nth", [1, 4, NUM_REQUESTS])
def test_failed_write_cannot_be_published_and_the_checkpoint_stays(
    tmp_path: Path, io: IoEngine, error: int, nth: int
) -> None:
    publish_steps(tmp_path, io, 2)
    with open_store(tmp_path, io, resume=True) as store:
        write_step(store, 3)  # so that some writes are in place in the working slot, and some are not
        io._inject("error", error, direction="write", nth=nth)
        with pytest.raises(StorageError, match=errno.errorcode[error]):
            write_step(store, 1)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"cannot publish step 4: .* written without success"):
                store.publish(4, {})
    assert_resumes_at(tmp_path, io, 2)


def test_write_can_be_repeated_after_a_failure(tmp_path: Path, io: IoEngine) -> None:
    with open_store(tmp_path, io) as store:
        io._inject("error", errno.EIO, direction="write", nth=2)
        with pytest.raises(StorageError, match="EIO"):
            write_step(store, 1)
        write_step(store, 1)
        store.publish(1, {"step": 1})
    assert_resumes_at(tmp_path, io, 1)


def test_short_transfers_lose_nothing(tmp_path: Path, io: IoEngine) -> None:
    io._inject("short", 4096, probability=0.5, seed=7)
    publish_steps(tmp_path, io, 3)
    assert_resumes_at(tmp_path, io, 3)


@pytest.mark.parametrize("bit", [0, 12345])
def test_bit_flipped_on_read_is_found_and_located(tmp_path: Path, io: IoEngine, bit: int) -> None:
    publish_steps(tmp_path, io, 1)
    with open_store(tmp_path, io, resume=True) as store:
        io._inject("flip", bit, direction="read", nth=1)
        buffer = Buffer(EXTENTS[0].num_bytes)
        ticket = store.read(0, buffer.address)
        with pytest.raises(StorageError) as caught:
            store.wait(ticket)
        place = r"extents: part 0 of extent 0 \(offset 0, 4096 bytes\)" if bit == 0 else r"part \d of extent 0"
        assert re.search(place + r".* has CRC32C [0-9a-f]{8}, expected [0-9a-f]{8}", str(caught.value))
        assert caught.value.path == str(tmp_path / "greedysnake.extents")
        store.wait(store.read(0, buffer.address))  # the drive was right, the transfer was not


def test_bit_flipped_on_write_is_found_by_the_next_read(tmp_path: Path, io: IoEngine) -> None:
    with open_store(tmp_path, io) as store:
        io._inject("flip", 99, direction="write", nth=1)
        write_step(store, 1)
        with pytest.raises(StorageError, match=r"part 0 of extent 0 .*CRC32C"):
            check_extent(store, 0)
        check_extent(store, 1)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_bit_flipped_in_scratch_is_found(tmp_path: Path, io: IoEngine, direction: str) -> None:
    buffer = Buffer(4096)
    buffer.array[:] = 7
    with open_store(tmp_path, io) as store:
        store.resize_scratch([4096, 4096])
        io._inject("flip", 99, direction=direction, nth=1)
        for index in range(2):
            store.wait(store.write_scratch(index, buffer.address, 4096))
        with pytest.raises(StorageError, match=r"greedysnake.scratch: scratch \(offset 0, 4096 bytes\) has CRC32C"):
            store.wait(store.read_scratch(0, buffer.address, 4096))
        store.wait(store.read_scratch(1, buffer.address, 4096))


def check_extent(store: Store, extent: int) -> None:
    buffer = Buffer(EXTENTS[extent].num_bytes)
    store.wait(store.read(extent, buffer.address))


@pytest.mark.parametrize("function", ["fsync", "rename", "write", "open"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_error_while_publishing_keeps_the_checkpoint_before(
    tmp_path: Path, io: IoEngine, monkeypatch: pytest.MonkeyPatch, function: str, error: int
) -> None:
    publish_steps(tmp_path, io, 2)
    with open_store(tmp_path, io, resume=True) as store:
        write_step(store, 3)

        def fail(*_: object) -> int:
            raise OSError(error, os.strerror(error))

        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail)
            with pytest.raises(StorageError, match=errno.errorcode[error]):
                store.publish(3, {"step": 3})
        assert store.step == 2
        if function != "rename":  # nothing was put in place: a second try may succeed
            store.publish(3, {"step": 3})
    assert_resumes_at(tmp_path, io, 2 if function == "rename" else 3)


def test_after_a_failed_sync_nothing_more_is_written(
    tmp_path: Path, io: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_steps(tmp_path, io, 2)
    with open_store(tmp_path, io, resume=True) as store:
        write_step(store, 3)

        def fail(_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(StorageError, match="EIO"):
                store.publish(3, {"step": 3})
        for attempt in (lambda: store.publish(3, {}), lambda: write_step(store, 3)):
            with pytest.raises(StorageError, match="unknown what the drive keeps: close the store and resume"):
                attempt()
    assert_resumes_at(tmp_path, io, 2)


def test_when_the_directory_sync_fails_neither_checkpoint_is_overwritten(
    tmp_path: Path, io: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_steps(tmp_path, io, 2)
    real_fsync, calls = os.fsync, []

    def fail_second(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:  # the first is of the manifest, the second of its directory
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(fd)

    with open_store(tmp_path, io, resume=True) as store:
        write_step(store, 3)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_second)
            with pytest.raises(StorageError, match=r"sync the directory .*EIO"):
                store.publish(3, {"step": 3})
        with pytest.raises(StorageError, match="close the store and resume"):
            write_step(store, 4)
    assert_resumes_at(tmp_path, io, 3)  # no power was lost, so the rename did last


# Processes that die


def start_writer(directories: list[Path], *options: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, store_writer.__file__, *map(str, directories), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def last_acknowledged(output: str, before: int) -> int:
    """The last step that the writer printed as a complete line."""
    steps = [int(line) for line in output.split("\n")[:-1] if line != "open"]
    return steps[-1] if steps else before


def run_for_a_while(child: subprocess.Popen[str], chance: random.Random) -> int:
    """Return at a random moment, after at least one step; the last step that was printed by then."""
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline() == "open\n", child.stderr.read()
    for _ in range(chance.randint(1, 4)):
        start_s = time.monotonic()
        step = int(child.stdout.readline())
    # Somewhere in the next two steps, however fast this machine is; nothing depends on where.
    time.sleep(chance.uniform(0, 2) * (time.monotonic() - start_s))
    return step


def rest_of(child: subprocess.Popen[str]) -> tuple[str, str]:
    """What an ending process has printed. communicate() would leave out what was read together with earlier lines."""
    assert child.stdout is not None and child.stderr is not None
    return child.stdout.read(), child.stderr.read()


@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_process_leaves_its_last_published_step(tmp_path: Path, backend: str) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    chance = random.Random(backend)
    with IoEngine(backend) as io:
        for round_number in range(6):
            options = ["--backend", backend, *(["--resume"] if round_number else [])]
            with start_writer(directories, *options) as child:
                acknowledged = run_for_a_while(child, chance)
                child.kill()
                acknowledged = last_acknowledged(rest_of(child)[0], acknowledged)
            with Store(directories, EXTENTS, io=io, fingerprint="writer", resume=True) as store:
                assert store.step in (acknowledged, acknowledged + 1), "published, perhaps not yet printed"
                check_step(store, store.step)


@needs_strace
@pytest.mark.parametrize(
    ("syscall", "nth"),
    [
        ("fdatasync", 3),
        ("fdatasync", 4),
        ("fsync", 9),
        ("fsync", 10),
        ("fsync", 11),
        ("rename", 3),
        ("rename", 4),
    ],
)
def test_kill_at_each_system_call_of_a_publish(tmp_path: Path, syscall: str, nth: int) -> None:
    prefix = ("strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", f"trace={syscall}")
    prefix += ("-e", f"inject={syscall}:signal=KILL:when={nth}")
    with start_writer([tmp_path / "store"], "--backend", "threads", "--num-steps", "6", prefix=prefix) as child:
        output, errors = child.communicate()
    acknowledged = last_acknowledged(output, 0)
    assert 0 < acknowledged < 6, errors
    with IoEngine("threads") as io, open_store(tmp_path / "store", io, resume=True) as store:
        assert store.step in (acknowledged, acknowledged + 1)
        check_step(store, store.step or 0)


@needs_strace
def test_publish_syncs_data_then_manifest_then_renames_then_syncs_the_directory(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    prefix = ("strace", "-f", "-qq", "-y", "-o", str(trace), "-e", "fdatasync,fsync,rename,write,pwrite64")
    directories = [tmp_path / "a", tmp_path / "b"]
    with start_writer(directories, "--backend", "threads", "--num-steps", "2", prefix=prefix) as child:
        _, errors = child.communicate()
    assert child.returncode == 0, errors
    second = re.split(r'write\(1<pipe[^"]*"1', trace.read_text())[1]
    names = {f"<{directories[0]}>": "directory", "greedysnake.manifest.new>": "manifest", "extents>": "data"}
    calls = [
        (match[1], next((name for key, name in names.items() if key in match[2]), ""))
        for match in re.finditer(r"^\d+ +(\w+)\((.*)$", second, re.M)
    ]
    calls = [call for call in calls if call[1] or call[0] == "rename"]
    writes = [call for call in calls if call == ("pwrite64", "data")]
    assert writes and calls[: len(writes)] == writes, "all data is written before the first sync"
    assert calls[len(writes) :] == [
        ("fdatasync", "data"),
        ("fdatasync", "data"),
        ("write", "manifest"),
        ("fsync", "manifest"),
        ("rename", ""),
        ("fsync", "directory"),
    ]


# Power that goes


def cut_power(point: Path) -> None:
    """Stop an ext4 as a power cut would: what is not on the drive yet, its journal included, is lost."""
    fd = os.open(point, os.O_RDONLY)
    fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))  # EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH
    os.close(fd)


@pytest.mark.root
@pytest.mark.parametrize("backend", BACKENDS)
def test_power_cut_leaves_the_last_published_step(mount: Callable[[int], Path], backend: str) -> None:
    point = mount(16)
    chance = random.Random(backend)
    for round_number in range(5):
        options = ["--backend", backend, *(["--resume"] if round_number else [])]
        with start_writer([point / "store"], *options) as child:
            acknowledged = run_for_a_while(child, chance)
            cut_power(point)
            output, errors = rest_of(child)
            assert "StorageError" in errors, "the writer must notice"
            acknowledged = last_acknowledged(output, acknowledged)
        subprocess.run(["umount", point], check=True)
        subprocess.run(["mount", "-o", "loop", point.with_name("image0"), point], check=True)
        with IoEngine(backend) as io, open_store(point / "store", io, resume=True) as store:
            assert store.step in (acknowledged, acknowledged + 1), "an acknowledged step must survive"
            check_step(store, store.step)


# Drives that are full or read-only


@pytest.mark.root
def test_full_filesystem_is_refused_before_anything_is_written(mount: Callable[[int], Path]) -> None:
    point = mount(16)
    extents = [ExtentSpec((1 << 20,))] * 10
    with IoEngine("threads") as io:
        with pytest.raises(PlanError) as error:
            Store([point / "a", point / "b"], extents, io=io, fingerprint="x")
        needed, free = (int(number) for number in re.findall(r"\((\d+) bytes\)", str(error.value)))
        assert needed > 20 << 20 and 0 < free < 16 << 20
        assert f"in {point / 'a'}, {point / 'b'}" in str(error.value), "both lie on one filesystem: their sum counts"
        cure = r"free \S+ MiB, add a directory on another drive, or set engine\.single_slot=true"
        assert re.search(cure, str(error.value))
        written = {name for directory in ("a", "b") for name in os.listdir(point / directory)}
        assert written == {"greedysnake.lock"}
        with (
            pytest.warns(RuntimeWarning),
            Store([point / "a"], extents, io=io, fingerprint="x", single_slot=True),
        ):
            pass


@pytest.mark.root
def test_a_store_that_fits_never_runs_out_of_space(mount: Callable[[int], Path]) -> None:
    point = mount(16)
    with IoEngine("threads") as io, open_store(point / "store", io) as store:
        free = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize
        with open(point / "hog", "wb") as hog:
            os.posix_fallocate(hog.fileno(), 0, free - (256 << 10))
        write_step(store, 1)
        write_step(store, 2)
        store.publish(2, {"step": 2})
        check_step(store, 2)


@pytest.mark.root
def test_manifest_that_does_not_fit_keeps_the_one_before_and_publish_can_be_repeated(
    mount: Callable[[int], Path],
) -> None:
    point = mount(16)
    with IoEngine("threads") as io:
        with open_store(point / "store", io) as store:
            write_step(store, 1)
            store.publish(1, {"step": 1})
            manifest_before = (point / "store" / "greedysnake.manifest").read_bytes()
            write_step(store, 2)
            free = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize
            with pytest.raises(StorageError, match=r"could not write .*manifest\.new.*ENOSPC.*free space there"):
                store.publish(2, {"step": "x" * free})
            assert (point / "store" / "greedysnake.manifest").read_bytes() == manifest_before
            after = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize
            assert free - after < 64 << 10, "the torn manifest must not fill the drive"
            store.publish(2, {"step": 2})
        assert_resumes_at(point / "store", io, 2)


@pytest.mark.root
def test_a_store_that_grows_by_a_slot_leaves_room_for_manifests(mount: Callable[[int], Path]) -> None:
    point = mount(32)
    with IoEngine("threads") as io:
        publish_steps(point / "store", io, 1)
        slot = (point / "store" / "greedysnake.extents").stat().st_size // 2
        free = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize
        with open(point / "hog", "wb") as hog:
            os.posix_fallocate(hog.fileno(), 0, free - slot - (16 << 10))
        with pytest.raises(PlanError, match=r"or set engine\.optimistic=false \(in Python optimistic=False\)$"):
            open_store(point / "store", io, resume=True, spare_slot=True)
        os.truncate(point / "hog", free - slot - (160 << 10))
        with open_store(point / "store", io, resume=True, spare_slot=True) as store:
            write_step(store, 2)
            store.publish(2, {"step": "x" * (48 << 10)})
        with open_store(point / "store", io, resume=True) as store:
            assert store.step == 2


@pytest.mark.root
def test_read_only_filesystem_is_refused(mount: Callable[[int], Path]) -> None:
    point = mount(16)
    with IoEngine("threads") as io:
        publish_steps(point / "store", io, 1)
        subprocess.run(["mount", "-o", "remount,ro", point], check=True)
        with pytest.raises(StorageError, match=r"could not open .*greedysnake\.lock.*EROFS.*mounted read-only"):
            open_store(point / "store", io, resume=True)
        with pytest.raises(StorageError, match=r"could not create the directory .*EROFS"):
            open_store(point / "new", io)


# Files that were damaged


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    with IoEngine("threads") as made:
        yield made


def test_manifest_torn_at_any_length_is_refused(tmp_path: Path, engine: IoEngine) -> None:
    publish_steps(tmp_path, engine, 2)
    path = tmp_path / "greedysnake.manifest"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(
            StorageError, match=r"manifest is damaged: .* \(overwrite_output_dir=true; in Python overwrite=True\)"
        ):
            open_store(tmp_path, engine, resume=True)
    with pytest.raises(StorageError, match="manifest is damaged"):
        open_store(tmp_path, engine)
    path.write_bytes(whole)
    assert_resumes_at(tmp_path, engine, 2)


def test_manifest_with_any_byte_altered_is_refused(tmp_path: Path, engine: IoEngine) -> None:
    publish_steps(tmp_path, engine, 1)
    path = tmp_path / "greedysnake.manifest"
    whole = path.read_bytes()
    for position in range(0, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(StorageError, match="manifest is damaged"):
            open_store(tmp_path, engine, resume=True)


def test_manifest_torn_while_being_written_does_not_matter(tmp_path: Path, engine: IoEngine) -> None:
    publish_steps(tmp_path, engine, 2)
    whole = (tmp_path / "greedysnake.manifest").read_bytes()
    for length in range(0, len(whole), 50):
        (tmp_path / "greedysnake.manifest.new").write_bytes(whole[:length])
        assert_resumes_at(tmp_path, engine, 2)


def test_newer_format_is_refused(tmp_path: Path, engine: IoEngine) -> None:
    publish_steps(tmp_path, engine, 1)
    path = tmp_path / "greedysnake.store"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    for options in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(StorageError, match="version 2, this program reads"):
            open_store(tmp_path, engine, **options)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "greedysnake-store", "version": 1}'])
def test_damaged_identity_is_refused(tmp_path: Path, engine: IoEngine, text: str) -> None:
    publish_steps(tmp_path, engine, 1)
    (tmp_path / "greedysnake.store").write_text(text)
    for options in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(StorageError, match=r"greedysnake\.store (is damaged|has format None)"):
            open_store(tmp_path, engine, **options)


@pytest.mark.parametrize("lost_bytes", [1, 4096, 10**9])
def test_truncated_data_file_is_refused_at_open(tmp_path: Path, engine: IoEngine, lost_bytes: int) -> None:
    publish_steps(tmp_path, engine, 1)
    path = tmp_path / "greedysnake.extents"
    size = path.stat().st_size
    left = max(0, size - lost_bytes)
    os.truncate(path, left)
    with pytest.raises(StorageError, match=f"truncated: it has {left} bytes, the checkpoint of step 1 needs {size}"):
        open_store(tmp_path, engine, resume=True)


def test_byte_altered_on_the_drive_is_found(tmp_path: Path, engine: IoEngine) -> None:
    publish_steps(tmp_path, engine, 1)
    positions = np.random.default_rng(0).integers(0, sum(spec.num_bytes for spec in EXTENTS), 10)
    for position in map(int, positions):
        with open(tmp_path / "greedysnake.extents", "r+b") as file:
            byte = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), position)
        with open_store(tmp_path, engine, resume=True) as store, pytest.raises(StorageError, match="CRC32C"):
            check_step(store, 1)
        with open(tmp_path / "greedysnake.extents", "r+b") as file:
            os.pwrite(file.fileno(), byte, position)
    assert_resumes_at(tmp_path, engine, 1)
