"""One directory of a store: its lock, its identity, its files. Knows names and sizes, not contents.

It never removes a file that this format did not create, and writes nothing beside files of others.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from greedysnake.durable import sync
from greedysnake.errors import ANEW, PlanError, StorageError, explained
from greedysnake.runtime.manifest import FORMAT, VERSION, check_version
from greedysnake.shapes import Share
from greedysnake.sizes import format_size

LOCK = "greedysnake.lock"
IDENTITY = "greedysnake.store"
MANIFEST = "greedysnake.manifest"
MANIFEST_IN_USE = "greedysnake.manifest.in-use"
EXTENTS = "greedysnake.extents"
SCRATCH = "greedysnake.scratch"
NEW = ".new"

_BEFORE_IDENTITY = {LOCK, IDENTITY + NEW}
_OURS = _BEFORE_IDENTITY | {IDENTITY, MANIFEST, MANIFEST + NEW, MANIFEST_IN_USE, EXTENTS, SCRATCH}
_OF_THE_FILESYSTEM = {"lost+found"}


@dataclass(frozen=True)
class Identity:
    """What the identity file says: whose directory this is, and which one."""

    store: str
    member: int
    num_members: int


class StoreDirectory:
    """A directory, created when missing and locked against other processes until `close`."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        """With `resume` it must be of a store already: nothing is put where a drive is not mounted."""
        self.path = path
        if not resume:
            with explained("create the directory", path):
                path.mkdir(parents=True, exist_ok=True)
        if not resume or self._exists():
            refuse_foreign_files(path)
        if resume:
            self.require_identity()
        self._owner = os.getpid()
        self._lock_fd = _lock(path)

    def close(self) -> None:
        """Give up the lock. The lock file stays: if removed, two processes could lock two different ones."""
        if self._lock_fd >= 0:
            if os.getpid() == self._owner:  # a child that was forked meanwhile has the file open too
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def identity(self) -> Identity | None:
        """None for a directory that no store has claimed yet."""
        path = self.path / IDENTITY
        data = self.load(IDENTITY)
        if data is None:
            return None
        try:
            fields = json.loads(data)
            check_version(fields, str(path))
            return Identity(str(fields["store"]), int(fields["member"]), int(fields["num_members"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{path} is damaged, so it is unknown what {self.path} holds: restore it from a copy, "
                "give another directory, or remove the greedysnake.* files in it by hand",
                path=str(path),
            ) from error

    def require_identity(self) -> Identity:
        """StorageError for a directory that is not there, or that no store has claimed yet."""
        identity = self.identity()
        if identity is None:
            raise StorageError(
                f"{self.path} holds no checkpoint to resume, it is {'empty' if self._exists() else 'missing'}: "
                f"mount its drive, give the directories of the checkpoint, or {ANEW}",
                path=str(self.path),
            )
        return identity

    def require_in_place(self, fd: int, name: str) -> None:
        """StorageError unless `name` is still the file that is open as `fd`. If the directory was removed, another run
        may have its own there, with a lock of its own."""
        with explained("look at", self.path / name):
            try:
                if os.path.samestat(os.fstat(fd), os.stat(self.path / name)):
                    return
            except FileNotFoundError:
                pass
        raise StorageError(
            f"{self.path / name} was removed or replaced while it was in use, so nothing can be saved there any more: "
            "export what you need from the engine, and start anew in another directory",
            path=str(self.path / name),
        )

    def claim(self, identity: Identity) -> None:
        """Make this directory part of a store; durable on return."""
        fields = {"format": FORMAT, "version": VERSION, **asdict(identity)}
        self.stage(IDENTITY, json.dumps(fields).encode() + b"\n")
        self.rename(IDENTITY + NEW, IDENTITY)

    def load(self, name: str) -> bytes | None:
        """The contents of one small file, or None when there is none."""
        with explained("read", self.path / name):
            try:
                return (self.path / name).read_bytes()
            except FileNotFoundError:
                return None

    def stage(self, name: str, data: bytes) -> None:
        """Write `data` beside `name`, durably; `rename` then puts it in place."""
        self._require_own()
        path = self.path / (name + NEW)
        with explained("write", path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, 0)  # on a full drive the torn file would be in the way of the next try
                raise
            finally:
                os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Rename one of our files over another, in one step; durable on return."""
        self._require_own()
        with explained("rename", self.path / old):
            os.rename(self.path / old, self.path / new)
        self.sync()

    def remove(self, names: Sequence[str]) -> None:
        """Remove those of our files that exist; durable on return."""
        assert set(names) <= _OURS
        self._require_own()
        for name in names:
            with explained("remove", self.path / name):
                (self.path / name).unlink(missing_ok=True)
        self.sync()

    def size(self, name: str) -> int:
        """Bytes of a file; 0 when there is none."""
        with explained("look at", self.path / name):
            try:
                return (self.path / name).stat().st_size
            except FileNotFoundError:
                return 0

    def missing_bytes(self, name: str, num_bytes: int) -> int:
        """How many bytes the filesystem must still find so that `name` has `num_bytes`."""
        self._require_own()
        with explained("look at", self.path / name):
            try:
                return max(0, num_bytes - (self.path / name).stat().st_blocks * 512)
            except FileNotFoundError:
                return num_bytes

    def allocate(self, name: str, num_bytes: int, ranges: Sequence[range] | None = None) -> None:
        """Give `name` exactly `num_bytes`. The drive has room for all of them, or for `ranges`: no later write to
        those can run out of space."""
        path = self.path / name
        if num_bytes == 0 and not path.exists():
            return
        self._require_own()
        with explained("allocate", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                had_bytes = os.fstat(fd).st_size
                try:
                    for found in [range(num_bytes)] if ranges is None else ranges:
                        if found:
                            os.posix_fallocate(fd, found.start, len(found))
                except OSError:
                    os.ftruncate(fd, had_bytes)
                    raise
                os.ftruncate(fd, num_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
        self.sync()

    def _require_own(self) -> None:
        self.require_in_place(self._lock_fd, LOCK)

    def _exists(self) -> bool:
        with explained("look at", self.path):
            return self.path.is_dir()

    def sync(self) -> None:
        """The names of its files are durable on return."""
        with explained("sync the directory", self.path):
            sync(self.path)


def own_directories(directories: Sequence[str | Path], share: Share) -> list[Path]:
    """Where one rank has its store: several have folders of their own in every directory, one has the directory. What
    is there must be of as many ranks."""
    num_ranks = share.num_ranks
    for directory in map(Path, directories):
        found = _ranks_in(directory)
        if num_ranks > 1 and found is None and directory.is_dir():
            refuse_foreign_files(directory)
        if found is not None and found != num_ranks:
            raise StorageError(
                f"{directory} holds what {_processes(found)} stored, and this run has {_processes(num_ranks)}: start "
                f"{found}, copy the run for {num_ranks} by greedysnake reshard, or give another directory",
                path=str(directory),
            )
    folder = f"{RANK}{share.rank}-of-{num_ranks}" if num_ranks > 1 else ""
    return [Path(path) / folder for path in directories]


def num_ranks_in(directory: Path) -> int:
    """How many ranks have their stores in a directory; 1 also where nothing is."""
    return _ranks_in(directory) or 1


def folders_in(directory: Path) -> Iterator[Path]:
    """Where stores may be in a directory: itself, and the folders of several ranks."""
    yield directory
    yield from directory.glob(f"{RANK}*-of-*")


def _ranks_in(directory: Path) -> int | None:
    with explained("list", directory):
        names = os.listdir(directory) if directory.is_dir() else []
    if IDENTITY in names:
        return 1
    ends = [name.rpartition("-of-")[2] for name in names if name.startswith(RANK)]
    return next((int(end) for end in ends if end.isdecimal()), None)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


RANK = "rank-"
"""How the folders begin in which several ranks have their stores."""
TRIAL = ".greedysnake-plan-"
"""How the folders begin in which `plan` trains for a moment."""


def refuse_foreign_files(path: Path) -> None:
    """StorageError when a directory that is there holds what no store has put there."""
    with explained("list", path):
        names = {name for name in os.listdir(path) if not name.startswith(TRIAL)} - _OF_THE_FILESYSTEM
    foreign = sorted(names - (_OURS if IDENTITY in names else _BEFORE_IDENTITY))
    if not foreign:
        return
    listed = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
    raise StorageError(
        f"{path} holds files that are not part of a GreedySnake store ({listed}): "
        "give an empty or new directory, or move them away",
        path=str(path),
    )


def require_space(directories: Sequence[StoreDirectory], missing_bytes: Sequence[int], or_else: str) -> None:
    """PlanError with the numbers, unless every filesystem has room; directories may share one. `or_else` names what
    helps besides freeing space."""
    by_device: dict[int, list[int]] = {}
    for index, directory in enumerate(directories):
        by_device.setdefault(os.stat(directory.path).st_dev, []).append(index)
    for indexes in by_device.values():
        needed = sum(missing_bytes[index] for index in indexes)
        status = os.statvfs(directories[indexes[0]].path)
        free = status.f_bavail * status.f_frsize
        if needed <= free:
            continue
        names = ", ".join(str(directories[index].path) for index in indexes)
        raise PlanError(
            f"the store needs {format_size(needed)} ({needed} bytes) more in {names}, "
            f"{format_size(free)} ({free} bytes) are free there: free {format_size(needed - free)}{or_else}"
        )


def _lock(directory: Path) -> int:
    path = directory / LOCK
    with explained("open", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with explained("lock", path):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise StorageError(
                    f"{directory} is in use by process {pid} (or a child it left): "
                    "wait until it ends, or give another directory",
                    path=str(path),
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except StorageError:
        os.close(fd)
        raise
    return fd
