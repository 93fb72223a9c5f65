"""Which directories a store takes, and which checkpoints it resumes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_writer
from store_writer import Buffer, check_step, open_store, write_step

from greedysnake.errors import ConfigError, StorageError
from greedysnake.runtime.directory import EXTENTS
from greedysnake.runtime.io import IoEngine
from greedysnake.runtime.store import ExtentSpec, Store

SPECS = [ExtentSpec((4096, 8192, 4096)), ExtentSpec((8192,))]


@pytest.fixture(scope="module")
def io() -> Iterator[IoEngine]:
    with IoEngine("threads") as engine:
        yield engine


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
            r"extent 3 has parts of \[8192, 65536, 8192, 8192\] bytes in the checkpoint, \[4096\] in this run",
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
