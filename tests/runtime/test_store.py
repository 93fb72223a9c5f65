from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import store_writer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_writer import Buffer, check_step, contents, open_store, write_step

import greedysnake.runtime.io as io_module
from greedysnake.errors import ConfigError, StorageError
from greedysnake.runtime.io import IoEngine, io_uring_available
from greedysnake.runtime.layout import Layout, Words
from greedysnake.runtime.manifest import crc32c_of
from greedysnake.runtime.store import ExtentSpec, Store, StoreTicket
from greedysnake.runtime.transfers import Transfers

BACKENDS = ["threads", *(["io_uring"] if io_uring_available()[0] else [])]
SPECS = [
    ExtentSpec((4096, 36864, 4096), words=Words(1, 4096, 4)),
    ExtentSpec((8192,)),
    ExtentSpec((4096, 32768), words=Words(1, 0, 4)),
]
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


def read_all(store: Store, extent: int, spec: ExtentSpec) -> np.ndarray:
    buffer = Buffer(spec.num_bytes)
    store.wait(store.read(extent, buffer.address))
    return buffer.array


# Against a model

Model = dict[tuple[int, int], int]
"""(extent, part) -> the version of its contents."""


class Run:
    """A store and a model of it, driven by the same operations."""

    def __init__(self, root: Path, io: IoEngine, num_directories: int, single_slot: bool, compress: bool) -> None:
        self.compress = compress
        self.options = dict(io=io, fingerprint="model", single_slot=single_slot)
        self.directories = [root / str(index) for index in range(num_directories)]
        self.single_slot = single_slot
        self.model: Model = {}
        self.published: Model | None = None
        self.step = 0
        self.clean = True
        self.store = self.open(resume=False)

    def open(self, *, resume: bool) -> Store:
        self.compress = (
            not self.compress
        )  # what was compressed is read by stores that compress nothing, and the other way round
        return Store(self.directories, SPECS, resume=resume, compress=self.compress, **self.options)  # type: ignore[arg-type]

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
    compress=st.booleans(),
)
def test_store_agrees_with_a_model_over_writes_checkpoints_and_crashes(
    engines: dict[str, IoEngine],
    operations: list[tuple],  # type: ignore[type-arg]
    backend: str,
    num_directories: int,
    single_slot: bool,
    compress: bool,
) -> None:
    with tempfile.TemporaryDirectory() as root:
        run = Run(Path(root), engines[backend], num_directories, single_slot, compress)
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


@pytest.mark.parametrize("verify_reads", [True, False])
def test_compressed_words_cross_the_drive_in_fewer_bytes_and_come_back_to_the_bit(
    verify_reads: bool, tmp_path: Path, io: IoEngine
) -> None:
    spec = ExtentSpec((4096, 69632, 4096), words=Words(1, 4096, 4))
    values = np.random.default_rng(0).normal(size=16384).astype(np.float32)
    whole = np.concatenate([np.full(8192, 7, np.uint8), values.view(np.uint8), np.full(4096, 9, np.uint8)])
    buffer = Buffer(spec.num_bytes)
    options = {"io": io, "fingerprint": "x", "verify_reads": verify_reads}

    def moved(run: Callable[[], StoreTicket]) -> tuple[StoreTicket, int]:
        before = io.counters()
        ticket = run()
        store.wait(ticket)
        after = io.counters()
        return ticket, after.read_bytes + after.write_bytes - before.read_bytes - before.write_bytes

    with Store([tmp_path], [spec], compress=True, **options) as store:  # type: ignore[arg-type]
        buffer.array[:] = whole
        ticket, written = moved(lambda: store.write(0, buffer.address))
        assert written == ticket.nbytes < 0.9 * spec.num_bytes
        assert len(ticket.pieces) == 2, "there is a gap behind what was compressed"
        buffer.array[:] = 1
        assert moved(lambda: store.read(0, buffer.address))[1] == written
        assert np.array_equal(buffer.array, whole)
        assert store.disk_bytes == 2 * spec.num_bytes, "whatever comes has room"
        store.publish(1, {})
    for compress in (False, True):
        with Store([tmp_path], [spec], compress=compress, resume=True, **options) as store:  # type: ignore[arg-type]
            buffer.array[:] = 2
            assert moved(lambda: store.read(0, buffer.address, slice(1, 3)))[1] == written - 4096
            assert np.array_equal(buffer.array[: 69632 + 4096], whole[4096:])
            buffer.array[:] = whole
            ticket, nbytes = moved(lambda: store.write(0, buffer.address))
            assert nbytes == (written if compress else spec.num_bytes)


def test_a_manifest_with_compressed_parts_is_of_its_own_version(tmp_path: Path, io: IoEngine) -> None:
    """Programs that know no compressed parts must not take what is stored of one for all of it."""
    spec, buffer = ExtentSpec((65536,), words=Words(0, 0, 4)), Buffer(65536)
    path = tmp_path / "greedysnake.manifest"
    rng = np.random.default_rng(0)
    with Store([tmp_path], [spec], io=io, fingerprint="x", compress=True) as store:
        for step, (values, version) in enumerate([(rng.bytes(65536), 1), (bytes(65536), 2), (rng.bytes(65536), 1)]):
            buffer.array[:] = np.frombuffer(values, np.uint8)
            store.wait(store.write(0, buffer.address))
            store.publish(step, {})
            fields = json.loads(path.read_text().splitlines()[0])
            assert fields["version"] == version
            assert len(fields["parts"][0][0]) == 1 + version


@pytest.mark.parametrize("moment", ["submit", "wait"])
def test_a_write_that_fails_leaves_its_memory_as_it_was(
    moment: str, tmp_path: Path, io: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What publish says then is to repeat it."""
    spec = ExtentSpec((4096, 65536), words=Words(1, 4096, 4))
    buffer = Buffer(spec.num_bytes)
    buffer.array[:8192] = 7
    buffer.array[8192:] = np.random.default_rng(0).normal(size=15360).astype(np.float32).view(np.uint8)
    before = buffer.array.copy()

    def fail(*_: object, **__: object) -> None:
        raise StorageError("the drive is gone")

    with Store([tmp_path], [spec], io=io, fingerprint="x", compress=True) as store:
        ticket = store.write(0, buffer.address)
        assert not np.array_equal(buffer.array, before), "it is compressed in place"
        with monkeypatch.context() as patch, pytest.raises(StorageError, match="the drive is gone"):
            if moment == "wait":
                patch.setattr(Transfers, "_drain", fail)
                store.wait(ticket)
            else:
                store.wait(ticket)
                store.wait(store.read(0, buffer.address))
                patch.setattr(IoEngine, "submit", fail)
                store.write(0, buffer.address)
        assert np.array_equal(buffer.array, before)
        with pytest.raises(StorageError, match="repeat those that failed"):
            store.publish(1, {})
        store.wait(store.write(0, buffer.address))
        store.publish(1, {})
        buffer.array[:] = 0
        store.wait(store.read(0, buffer.address))
        assert np.array_equal(buffer.array, before)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("nbytes", [0, 4096, 8192, 69632, 1 << 40, -4096, 61441, 57344.0, True, "12", None, [4096]])
def test_a_manifest_with_lengths_that_cannot_be_is_refused(
    part: int, nbytes: object, tmp_path: Path, io: IoEngine
) -> None:
    spec = ExtentSpec((4096, 65536), words=Words(1, 8192, 4))
    buffer = Buffer(spec.num_bytes)
    buffer.array[:] = np.random.default_rng(0).normal(size=17408).astype(np.float32).view(np.uint8)
    with Store([tmp_path], [spec], io=io, fingerprint="x", compress=True) as store:
        store.wait(store.write(0, buffer.address))
        store.publish(1, {})
    path = tmp_path / "greedysnake.manifest"
    fields = json.loads(path.read_text().splitlines()[0])
    fields["parts"][0][part] = [*fields["parts"][0][part][:2], nbytes]
    line = json.dumps(fields, separators=(",", ":")).encode()
    path.write_bytes(b"%s\n%08x\n" % (line, crc32c_of(line)))
    if (part, nbytes) == (0, 4096):
        Store([tmp_path], [spec], io=io, fingerprint="x", resume=True).close()
        return
    wanted = rf"cannot be what is stored of part {part} of extent 0, which has {spec.parts[part]}: restore the file"
    with pytest.raises(StorageError, match=wanted):
        Store([tmp_path], [spec], io=io, fingerprint="x", resume=True)


def test_what_cannot_be_decompressed_is_said(tmp_path: Path, io: IoEngine) -> None:
    spec, buffer = ExtentSpec((65536,), words=Words(0, 0, 4)), Buffer(65536)
    with Store([tmp_path], [spec], io=io, fingerprint="x", compress=True, verify_reads=False) as store:
        buffer.array[:] = np.random.default_rng(0).normal(size=16384).astype(np.float32).view(np.uint8)
        store.wait(store.write(0, buffer.address))
        data = tmp_path / "greedysnake.extents"
        data.write_bytes(b"\xff" * data.stat().st_size)
        with pytest.raises(
            StorageError, match=r"part 0 of extent 0 \(offset 0\) cannot be decompressed: .*check the drive"
        ):
            store.wait(store.read(0, buffer.address))


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
