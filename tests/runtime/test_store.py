from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import store_writer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_writer import Buffer, check_step, contents, write_step

import greedysnake.runtime.io as io_module
from greedysnake.errors import ConfigError, StorageError
from greedysnake.runtime.directory import EXTENTS
from greedysnake.runtime.io import IoEngine, io_uring_available
from greedysnake.runtime.layout import Layout
from greedysnake.runtime.store import ExtentSpec, Store

BACKENDS = ["threads", *(["io_uring"] if io_uring_available()[0] else [])]
SPECS = [ExtentSpec((4096, 8192, 4096)), ExtentSpec((8192,)), ExtentSpec((4096, 4096))]
PAGE = 4096


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, IoEngine]]:
    made = {backend: IoEngine(backend) for backend in BACKENDS}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture
def io(engines: dict[str, IoEngine]) -> IoEngine:
    return engines["threads"]


def open_store(path: Path, io: IoEngine, **options: object) -> Store:
    return Store([path], store_writer.EXTENTS, io=io, fingerprint="writer", **options)  # type: ignore[arg-type]


def read_all(store: Store, extent: int, spec: ExtentSpec) -> np.ndarray:
    buffer = Buffer(spec.num_bytes)
    store.wait(store.read(extent, buffer.address))
    return buffer.array


# Against a model

Model = dict[tuple[int, int], int]
"""(extent, part) -> the version of its contents."""


class Run:
    """A store and a model of it, driven by the same operations."""

    def __init__(self, root: Path, io: IoEngine, num_directories: int, single_slot: bool) -> None:
        self.options = dict(io=io, fingerprint="model", single_slot=single_slot)
        self.directories = [root / str(index) for index in range(num_directories)]
        self.single_slot = single_slot
        self.model: Model = {}
        self.published: Model | None = None
        self.step = 0
        self.clean = True
        self.store = self.open(resume=False)

    def open(self, *, resume: bool) -> Store:
        return Store(self.directories, SPECS, resume=resume, **self.options)  # type: ignore[arg-type]

    def write(self, extent: int, start: int, length: int, version: int) -> None:
        parts = range(len(SPECS[extent].parts))[start : start + length]
        if not parts:
            return
        sizes = SPECS[extent].parts[parts.start : parts.stop]
        buffer = Buffer(sum(sizes))
        buffer.array[:] = np.concatenate(
            [contents(extent, part, version, size) for part, size in zip(parts, sizes, strict=True)]
        )
        self.store.wait(self.store.write(extent, buffer.address, parts))
        self.model.update({(extent, part): version for part in parts})
        self.clean = False

    def publish(self) -> None:
        self.step += 1
        self.store.publish(self.step, {"loss": self.step / 3})
        self.published, self.clean = dict(self.model), True

    def crash(self, write_first: bool) -> None:
        if write_first:  # a write that nobody waited for
            buffer = Buffer(SPECS[0].num_bytes)
            self.store.write(0, buffer.address)
            self.clean = False
        self.store.close()
        lost = self.published is None or (self.single_slot and not self.clean)
        if lost:
            with pytest.raises(StorageError, match="resume"):
                self.open(resume=True)
            self.store = self.open(resume=False)
            self.model, self.published, self.clean = {}, None, True
            return
        assert self.published is not None
        with pytest.raises(StorageError, match=rf"step {self.step}: continue .* resume=True\), .* overwrite=True"):
            self.open(resume=False)
        self.store = self.open(resume=True)
        assert (self.store.step, self.store.metadata) == (self.step, {"loss": self.step / 3})
        self.model, self.clean = dict(self.published), True

    def check(self) -> None:
        for extent, spec in enumerate(SPECS):
            for part, size in enumerate(spec.parts):
                one = slice(part, part + 1)
                buffer = Buffer(size)
                if (extent, part) not in self.model:
                    with pytest.raises(StorageError, match="never written"):
                        self.store.read(extent, buffer.address, one)
                    continue
                self.store.wait(self.store.read(extent, buffer.address, one))
                assert np.array_equal(buffer.array, contents(extent, part, self.model[extent, part], size))
            if all((extent, part) in self.model for part in range(len(spec.parts))):
                wanted = [contents(extent, p, self.model[extent, p], n) for p, n in enumerate(spec.parts)]
                assert np.array_equal(read_all(self.store, extent, spec), np.concatenate(wanted))


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2), st.integers(0, 2), st.integers(1, 3), st.integers(0, 99)),
    st.tuples(st.just("publish")),
    st.tuples(st.just("crash"), st.booleans()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore:single_slot")
@given(
    operations=st.lists(OPERATIONS, max_size=20),
    backend=st.sampled_from(BACKENDS),
    num_directories=st.integers(1, 3),
    single_slot=st.booleans(),
)
def test_store_agrees_with_a_model_over_writes_checkpoints_and_crashes(
    engines: dict[str, IoEngine],
    operations: list[tuple],  # type: ignore[type-arg]
    backend: str,
    num_directories: int,
    single_slot: bool,
) -> None:
    with tempfile.TemporaryDirectory() as root:
        run = Run(Path(root), engines[backend], num_directories, single_slot)
        try:
            for name, *values in operations:
                getattr(run, name)(*values)
                run.check()
            run.crash(False)
            run.check()
        finally:
            run.store.close()


def test_pinned_slot_is_not_written_between_checkpoints(tmp_path: Path, io: IoEngine) -> None:
    spec = ExtentSpec((8192,))
    buffer = Buffer(8192)
    with Store([tmp_path], [spec], io=io, fingerprint="x") as store:
        data = tmp_path / "greedysnake.extents"
        slots = [slice(0, 8192), slice(8192, 16384)]
        for step in range(1, 5):
            pinned = data.read_bytes()[slots[step % 2]]
            for value in range(3):
                buffer.array[:] = 10 * step + value
                store.wait(store.write(0, buffer.address))
                assert data.read_bytes()[slots[step % 2]] == pinned, "the checkpoint before must stay"
                assert data.read_bytes()[slots[1 - step % 2]] == bytes([10 * step + value]) * 8192
            store.publish(step, {})


def test_parts_in_one_slot_are_one_request(tmp_path: Path, io: IoEngine) -> None:
    spec = ExtentSpec((4096,) * 6)
    buffer = Buffer(spec.num_bytes)
    with Store([tmp_path], [spec], io=io, fingerprint="x") as store:

        def requests() -> int:
            counters = io.counters()
            return counters.read_requests + counters.write_requests

        before = requests()
        store.wait(store.write(0, buffer.address))
        store.wait(store.read(0, buffer.address, slice(1, 4)))
        assert requests() - before == 2
        store.publish(1, {})
        store.wait(store.write(0, buffer.address, range(2, 4)))
        before = requests()
        store.wait(store.read(0, buffer.address))
        assert requests() - before == 3, "0-1 pinned, 2-3 new, 4-5 pinned"


def test_threads_may_work_on_different_extents(tmp_path: Path, io: IoEngine) -> None:
    specs = [ExtentSpec((65536, 4096))] * 8
    errors: list[BaseException] = []
    with Store([tmp_path / "a", tmp_path / "b"], specs, io=io, fingerprint="x") as store:

        def work(extent: int) -> None:
            try:
                buffer = Buffer(specs[extent].num_bytes)
                for value in range(20):
                    buffer.array[:] = value * 8 + extent
                    store.wait(store.write(extent, buffer.address))
                    buffer.array[:] = 0
                    store.wait(store.read(extent, buffer.address))
                    assert (buffer.array == value * 8 + extent).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(extent,)) for extent in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        store.publish(1, {})


def test_scratch_holds_bytes_and_takes_no_part_in_checkpoints(tmp_path: Path, io: IoEngine) -> None:
    buffer = Buffer(8192)
    directories = [tmp_path / "a", tmp_path / "b"]
    with Store(directories, SPECS, io=io, fingerprint="x", scratch=[5000, 16384]) as store:
        assert store.disk_bytes == 2 * sum(spec.num_bytes for spec in SPECS) + 8192 + 16384
        for index, offset, value in [(0, 0, 1), (1, 8192, 2), (1, 0, 3)]:
            buffer.array[:] = value
            store.wait(store.write_scratch(index, buffer.address, 8192, offset))
        for index, offset, value in [(0, 0, 1), (1, 8192, 2), (1, 0, 3)]:
            store.wait(store.read_scratch(index, buffer.address, 8192, offset))
            assert (buffer.array == value).all()
        for index, nbytes, offset in [(0, 12288, 0), (1, 8192, 12288), (2, 4096, 0), (1, 4096, -4096)]:
            with pytest.raises(ConfigError, match="scratch range"):
                store.write_scratch(index, buffer.address, nbytes, offset)
        store.publish(1, {})
    with Store(directories, SPECS, io=io, fingerprint="x", resume=True) as store:  # without it
        assert store.disk_bytes == 2 * sum(spec.num_bytes for spec in SPECS)


def test_directories_share_the_bytes_evenly(tmp_path: Path, io: IoEngine) -> None:
    layout = Layout.build([ExtentSpec((1 << 20,))] * 30, [], num_members=3, num_slots=2)
    assert layout.slot_bytes == (10 << 20,) * 3
    assert [place.member for place in layout.extents[:4]] == [0, 1, 2, 0], "neighbours lie on different drives"
    directories = [tmp_path / "a", tmp_path / "b"]
    with Store(directories, [ExtentSpec((1 << 20,))] * 4, io=io, fingerprint="x") as store:
        sizes = [(directory / "greedysnake.extents").stat() for directory in directories]
        assert [size.st_size for size in sizes] == [4 << 20] * 2
        assert sum(size.st_blocks * 512 for size in sizes) >= store.disk_bytes, "backed by the drive, not sparse"


def test_buffered_files_are_correct_too(tmp_path: Path, io: IoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_module, "_open_direct", lambda name, flags: None)
    with (
        IoEngine("threads") as buffered,
        pytest.warns(UserWarning, match="refuses O_DIRECT"),
        open_store(tmp_path, buffered) as store,
    ):
        write_step(store, 1)
        store.publish(1, {"step": 1})
    monkeypatch.undo()
    with open_store(tmp_path, io, resume=True) as store:
        check_step(store, 1)


def test_verification_can_be_turned_off(tmp_path: Path, io: IoEngine) -> None:
    buffer = Buffer(4096)
    with Store([tmp_path], [ExtentSpec((4096,))], io=io, fingerprint="x", verify_reads=False) as store:
        store.wait(store.write(0, buffer.address))
        io._inject("flip", 0, direction="read", nth=1)
        store.wait(store.read(0, buffer.address))
        assert buffer.array.any()


# Opening


def published(path: Path, io: IoEngine, num_steps: int = 2, **options: object) -> None:
    with open_store(path, io, **options) as store:
        for step in range(1, num_steps + 1):
            write_step(store, step)
            store.publish(step, {"step": step})


def test_missing_directory_is_created_with_parents(tmp_path: Path, io: IoEngine) -> None:
    with open_store(tmp_path / "a" / "b", io) as store:
        assert store.directories == (tmp_path / "a" / "b",)
        assert not store.has_checkpoint and store.step is None and store.metadata == {}


def test_foreign_files_are_named_and_left_alone(tmp_path: Path, io: IoEngine) -> None:
    for name in ["thesis.tex", "a.txt", "b.txt", "c.txt"]:
        (tmp_path / name).write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(StorageError, match=r"\(a.txt, b.txt, c.txt and 1 more\): give an empty"):
            open_store(tmp_path, io, overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt", "c.txt", "thesis.tex"], "not even a lock file"


def test_files_with_our_names_but_without_identity_are_foreign(tmp_path: Path, io: IoEngine) -> None:
    (tmp_path / "greedysnake.extents").write_text("precious")
    with pytest.raises(StorageError, match=r"greedysnake\.extents"):
        open_store(tmp_path, io, overwrite=True)
    assert (tmp_path / "greedysnake.extents").read_text() == "precious"


def test_foreign_file_beside_a_store_is_refused(tmp_path: Path, io: IoEngine) -> None:
    published(tmp_path, io)
    (tmp_path / "notes").write_text("precious")
    with pytest.raises(StorageError, match="notes"):
        open_store(tmp_path, io, overwrite=True)


def test_empty_lost_and_found_is_not_foreign(tmp_path: Path, io: IoEngine) -> None:
    (tmp_path / "lost+found").mkdir()
    open_store(tmp_path, io).close()


def test_path_that_is_a_file_is_refused(tmp_path: Path, io: IoEngine) -> None:
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="could not create the directory"):
            open_store(path, io)


def test_path_that_is_a_link_to_itself_is_refused(tmp_path: Path, io: IoEngine) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(StorageError, match=r"link: File exists \(EEXIST\): a file is there, or a link that leads"):
        open_store(tmp_path / "link", io)


def test_same_directory_twice_is_refused(tmp_path: Path, io: IoEngine) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="given twice"):
        Store([tmp_path / "a", tmp_path / "link"], SPECS, io=io, fingerprint="x")
    for directories in ([], str(tmp_path)):
        with pytest.raises(ConfigError, match="list of at least one path"):
            Store(directories, SPECS, io=io, fingerprint="x")


def test_directory_that_was_removed_in_use_is_not_saved_to_and_a_new_run_there_is_left_alone(
    tmp_path: Path, io: IoEngine
) -> None:
    """The old store published into the new one's directory, over its checkpoint."""
    old = open_store(tmp_path / "a", io)
    write_step(old, 1)
    old.publish(1, {})
    shutil.rmtree(tmp_path / "a")
    for make in ((tmp_path / "a").mkdir, lambda: open_store(tmp_path / "a", io)):
        with pytest.raises(StorageError, match=r"was removed or replaced while it was in use"):
            old.publish(2, {})
        found = make()
    assert isinstance(found, Store)
    write_step(found, 3)
    found.publish(3, {})
    with pytest.raises(StorageError, match=r"was removed or replaced while it was in use"):
        old.publish(4, {})
    with pytest.raises(StorageError, match=r"was removed or replaced while it was in use"):
        old.require_scratch([4096])
    old.close()
    found.close()
    with open_store(tmp_path / "a", io, resume=True) as resumed:
        assert resumed.step == 3


def test_data_that_were_removed_in_use_are_no_checkpoint(tmp_path: Path, io: IoEngine) -> None:
    with open_store(tmp_path / "a", io) as store:
        write_step(store, 1)
        (tmp_path / "a" / EXTENTS).unlink()
        with pytest.raises(StorageError, match=r"greedysnake\.extents was removed or replaced while it was in use"):
            store.publish(1, {})


@pytest.mark.parametrize("order", [1, -1])
def test_directory_within_another_is_refused_before_anything_is_made(order: int, tmp_path: Path, io: IoEngine) -> None:
    """It worked, and the checkpoint could not be resumed: the inner one is a foreign file in the outer one."""
    with pytest.raises(ConfigError, match=r"b lies in .*a, which may hold nothing but files of the store"):
        Store([tmp_path / "a", tmp_path / "a" / "b"][::order], SPECS, io=io, fingerprint="x")
    assert not list(tmp_path.iterdir())


def test_second_process_is_told_who_holds_the_directory(tmp_path: Path, io: IoEngine) -> None:
    command = [sys.executable, store_writer.__file__, str(tmp_path), "--num-steps", "1", "--hold"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        assert [child.stdout.readline() for _ in range(2)] == ["open\n", "1\n"]
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(StorageError, match=f"{tmp_path} is in use by process {child.pid} "):
                open_store(tmp_path, io, **options)
        child.stdin.close()
        assert child.wait() == 0
    with open_store(tmp_path, io, resume=True) as store:
        check_step(store, 1)
        with pytest.raises(StorageError, match=f"in use by process {os.getpid()} "):
            open_store(tmp_path, io, resume=True)


def test_failed_open_gives_the_lock_up(tmp_path: Path, io: IoEngine) -> None:
    open_store(tmp_path, io).close()
    with pytest.raises(StorageError, match="no checkpoint"):
        open_store(tmp_path, io, resume=True)
    open_store(tmp_path, io).close()


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path, io: IoEngine) -> None:
    with pytest.raises(StorageError, match=r"holds no checkpoint to resume, it is empty.*resume=False"):
        open_store(tmp_path, io, resume=True)
    open_store(tmp_path, io).close()
    with pytest.raises(
        StorageError, match=r"its first one; start anew \(overwrite_output_dir=true; in Python resume=False\)"
    ):
        open_store(tmp_path, io, resume=True)


def test_leftovers_without_a_checkpoint_are_reused_also_with_another_layout(tmp_path: Path, io: IoEngine) -> None:
    with open_store(tmp_path, io) as store:
        write_step(store, 1)
    identity = (tmp_path / "greedysnake.store").read_bytes()
    open_store(tmp_path, io).close()
    assert (tmp_path / "greedysnake.store").read_bytes() == identity
    with Store([tmp_path], [ExtentSpec((4096,))], io=io, fingerprint="small") as store:
        assert (tmp_path / "greedysnake.extents").stat().st_size == store.disk_bytes == 8192


def test_overwrite_discards_the_checkpoint(tmp_path: Path, io: IoEngine) -> None:
    published(tmp_path, io)
    with open_store(tmp_path, io, overwrite=True) as store:
        assert not store.has_checkpoint
        with pytest.raises(StorageError, match="never written"):
            store.read(0, Buffer(16384).address)
    with pytest.raises(StorageError, match="no checkpoint"):
        open_store(tmp_path, io, resume=True)
    with pytest.raises(ConfigError, match="contradict"):
        open_store(tmp_path, io, overwrite=True, resume=True)


@pytest.mark.filterwarnings("ignore:single_slot")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "llama"}, "the checkpoint was written for 'writer', this run is 'llama'"),
        ({"extents": store_writer.EXTENTS[:-1]}, "the checkpoint has 4 extents, this run has 3"),
        (
            {"extents": [*store_writer.EXTENTS[:-1], ExtentSpec((4096,))]},
            r"extent 3 has parts of \[8192, 8192, 8192, 8192\] bytes in the checkpoint, \[4096\] in this run",
        ),
        ({"single_slot": True}, "the checkpoint has single_slot=False, this run single_slot=True"),
    ],
)
def test_resume_of_another_run_says_what_differs(
    tmp_path: Path, io: IoEngine, change: dict[str, object], message: str
) -> None:
    published(tmp_path, io)
    options = {"extents": store_writer.EXTENTS, "fingerprint": "writer", **change}
    with pytest.raises(StorageError, match=f"step 2 .*is of another run: {message}"):
        Store([tmp_path], io=io, resume=True, **options)  # type: ignore[arg-type]
    with open_store(tmp_path, io, resume=True) as store:
        check_step(store, 2)


# Several directories


@pytest.fixture
def pair(tmp_path: Path, io: IoEngine) -> list[Path]:
    directories = [tmp_path / "a", tmp_path / "b"]
    with Store(directories, store_writer.EXTENTS, io=io, fingerprint="writer") as store:
        write_step(store, 1)
        store.publish(1, {"step": 1})
    return directories


def resume(directories: list[Path], io: IoEngine) -> Store:
    return Store(directories, store_writer.EXTENTS, io=io, fingerprint="writer", resume=True)


def test_swapped_directories_are_refused_with_the_right_order(pair: list[Path], io: IoEngine) -> None:
    with pytest.raises(StorageError, match=f"give {pair[0]}, {pair[1]}"):
        resume(pair[::-1], io)
    with resume(pair, io) as store:
        check_step(store, 1)


def test_missing_directories_are_refused(pair: list[Path], io: IoEngine, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="has 2 directories and 1 were given"):
        resume(pair[:1], io)
    new = tmp_path / "new"
    with pytest.raises(StorageError, match="new holds no checkpoint to resume, it is missing: mount its drive"):
        resume([pair[0], new], io)
    assert not new.exists()
    new.mkdir()  # as a place to mount a drive is
    with pytest.raises(StorageError, match="new holds no checkpoint to resume, it is empty: mount its drive"):
        resume([pair[0], new], io)
    assert os.listdir(new) == []
    with pytest.raises(StorageError, match="directory 2 of 2 of another store, which may hold a checkpoint"):
        Store([pair[1]], SPECS, io=io, fingerprint="x")


def test_directory_of_another_store_is_refused(pair: list[Path], io: IoEngine, tmp_path: Path) -> None:
    other = [tmp_path / "c", tmp_path / "d"]
    with Store(other, store_writer.EXTENTS, io=io, fingerprint="writer") as store:
        write_step(store, 1)
        store.publish(1, {"step": 1})
    with pytest.raises(StorageError, match="give those"):
        resume([pair[0], other[1]], io)
    shutil.copy(other[0] / "greedysnake.manifest", pair[0])
    with pytest.raises(StorageError, match="belongs to another store than the directory it lies in"):
        resume(pair, io)


# Single slot


def test_single_slot_says_what_it_gives_up_and_resumes_only_from_a_clean_end(tmp_path: Path, io: IoEngine) -> None:
    with pytest.warns(RuntimeWarning, match="a run that ends between checkpoints cannot be resumed"):
        store = open_store(tmp_path, io, single_slot=True)
    with pytest.warns(RuntimeWarning), store:
        assert store.disk_bytes == sum(spec.num_bytes for spec in store_writer.EXTENTS)
        for step in (1, 2):
            write_step(store, step)
            assert not store.has_checkpoint
            store.publish(step, {"step": step})
            assert store.has_checkpoint
        store.close()
        store = open_store(tmp_path, io, single_slot=True, resume=True)
        check_step(store, 2)
        write_step(store, 3)
        store.close()
        with pytest.raises(StorageError, match="checkpoint of step 2 in place, so what is there mixes two steps"):
            open_store(tmp_path, io, single_slot=True, resume=True)
        open_store(tmp_path, io, single_slot=True).close()


# Misuse


def test_wrong_numbers_are_refused(tmp_path: Path, io: IoEngine) -> None:
    for parts in [(), (4095,), (0,), (4096, -4096)]:
        with pytest.raises(ConfigError, match="part"):
            ExtentSpec(parts)
    buffer = Buffer(16384)
    with Store([tmp_path], SPECS, io=io, fingerprint="x") as store:
        for extent, parts in [
            (3, slice(None)),
            (-1, slice(None)),
            (0, slice(2, 1)),
            (0, range(0, 4)),
            (0, range(0, 3, 2)),
        ]:
            with pytest.raises(ConfigError, match="extent"):
                store.write(extent, buffer.address, parts)
        with pytest.raises(ConfigError, match="plain JSON"):
            store.publish(1, {"bad": object()})


def test_publish_refuses_writes_that_nobody_waited_for(tmp_path: Path, io: IoEngine) -> None:
    buffer = Buffer(16384)
    with Store([tmp_path], SPECS, io=io, fingerprint="x") as store:
        ticket = store.write(0, buffer.address)
        with pytest.raises(StorageError, match=r"cannot publish step 1: 3 parts .*0\.0, 0\.1, 0\.2\): wait"):
            store.publish(1, {})
        with pytest.raises(StorageError, match="its last write has not succeeded"):
            store.read(0, buffer.address)
        while not store.poll(ticket):
            pass
        store.wait(ticket)
        store.publish(1, {})
