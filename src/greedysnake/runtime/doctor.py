"""Tells whether training can work here: facts about the machine and its directories, problems, and their fixes.

Prints nothing; `report.doctor_text` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from greedysnake.runtime.drive import MIN_FREE_BYTES, PHASE_S, Drive, look_at_drive
from greedysnake.runtime.host import Host, look_at_host
from greedysnake.sizes import format_size

JSON_VERSION = 1
"""Grows when a field of the JSON form is renamed, removed or changes its meaning."""

_SPINNING_BYTES_PER_S = 400e6
"""No spinning disk is faster, while virtual drives often call themselves spinning."""

_LOCAL_DRIVE = "give a directory on a local ext4 or xfs SSD"
_FILESYSTEMS = {
    "overlay": (
        "is in a container's own layer (overlay), which is slow and is deleted with the container",
        "mount a directory of the host: docker run -v /path/on/ssd:/data, and use /data",
    ),
    "tmpfs": ("is in RAM (tmpfs), so state stored there takes memory instead of saving it", _LOCAL_DRIVE),
    "ramfs": ("is in RAM (ramfs), so state stored there takes memory instead of saving it", _LOCAL_DRIVE),
    "nfs": ("is on a network filesystem (nfs), which is slow and weak in locking", _LOCAL_DRIVE),
    "nfs4": ("is on a network filesystem (nfs4), which is slow and weak in locking", _LOCAL_DRIVE),
    "cifs": ("is on a network filesystem (cifs), which is slow and weak in locking", _LOCAL_DRIVE),
    "smb3": ("is on a network filesystem (smb3), which is slow and weak in locking", _LOCAL_DRIVE),
    "9p": ("is a directory shared into a virtual machine (9p), which is slow", _LOCAL_DRIVE),
    "btrfs": (
        "is on btrfs, which copies on every overwrite",
        "switch that off with chattr +C while the directory is empty, or use ext4 or xfs",
    ),
}


@dataclass(frozen=True)
class Problem:
    """One finding, with what to do about it."""

    severity: Literal["error", "warning"]
    """An error means that training could not work."""
    where: str
    problem: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything the doctor found."""

    host: Host
    drives: tuple[Drive, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Training could work; warnings allowed."""
        return all(problem.severity != "error" for problem in self.problems)

    def as_json(self) -> dict[str, object]:
        """Plain values; sizes in bytes, rates in bytes per second, null for unknown."""
        return {
            "version": JSON_VERSION,
            "ok": self.ok,
            "host": asdict(self.host),
            "directories": [asdict(drive) for drive in self.drives],
            "problems": [asdict(problem) for problem in self.problems],
        }


def examine(directories: Sequence[str | os.PathLike[str]], *, phase_s: float = PHASE_S) -> Diagnosis:
    """Look at the machine and at each directory in turn. Blocks; two seconds per directory by default."""
    host = look_at_host()
    drives = tuple(look_at_drive(directory, phase_s=phase_s) for directory in directories)
    found = [*host_problems(host)]
    for drive in drives:
        found += drive_problems(drive)
    found += _shared_drives(drives)
    return Diagnosis(host, drives, tuple(found))


def host_problems(host: Host) -> Iterator[Problem]:
    """What is wrong with the machine itself."""
    if host.torch is None:
        yield Problem(
            "error", "torch", host.why_no_device or "torch is missing", "run make build, or pip install torch"
        )
    elif host.device is None:
        yield Problem(
            "warning",
            "device",
            f"{host.why_no_device}, so training would run on the CPU, which is only good for tests",
            "install an NVIDIA driver and a CUDA build of torch, or go on with small models",
        )
    else:
        if not host.device.supports_bf16:
            yield Problem(
                "warning", "device", f"{host.device.name} has no bf16 arithmetic", "use dtype='float32', or a newer GPU"
            )
        if host.device.pinning_error is not None:
            yield Problem(
                "error",
                "memlock",
                host.device.pinning_error,
                "raise the limit: ulimit -l unlimited (docker run --ulimit memlock=-1)",
            )
    if not host.io_uring:
        what, _, cure = host.io_uring_reason.partition("; ")
        yield Problem(
            "warning", "io_uring", f"io_uring cannot be used: {what}", f"{cure}; or go on: threads are used instead"
        )
    if host.isas == ("scalar",):
        yield Problem(
            "warning",
            "CPU",
            "this CPU or build has no AVX2, so weight updates run one number at a time",
            "use a CPU with AVX2 (Intel since 2013, AMD since 2015), or go on: the results are the same",
        )


def drive_problems(drive: Drive) -> Iterator[Problem]:
    """What is wrong with one directory."""

    def found(severity: Literal["error", "warning"], problem: str, fix: str) -> Problem:
        return Problem(severity, drive.path, f"{drive.path} {problem}", fix)

    if not drive.exists:
        if os.path.lexists(drive.path):
            yield found("error", "is not a directory", "give a directory")
        else:
            yield found(
                "error", "is not an existing directory", f"make it with mkdir -p {drive.path}, or give another one"
            )
        return
    assert drive.free_bytes is not None
    if drive.write_error is not None:
        yield found("error", f"cannot be written to: {drive.write_error}", _write_fix(drive.write_error))
    if drive.free_bytes < MIN_FREE_BYTES:
        yield found(
            "error",
            f"has {format_size(drive.free_bytes)} free, training needs {format_size(MIN_FREE_BYTES)} at the very least",
            "free space there, or give a directory on another drive",
        )
    kind = drive.filesystem or ""
    if kind in _FILESYSTEMS:
        yield found("warning", *_FILESYSTEMS[kind])
    elif kind.startswith("fuse"):
        yield found("warning", f"is served by a user-space filesystem ({kind}), which is slow", _LOCAL_DRIVE)
    if drive.direct is False:
        yield found(
            "warning",
            "refuses O_DIRECT, so transfers go through the page cache, cost RAM and CPU, and the figures here are "
            "those of the cache",
            _LOCAL_DRIVE,
        )
    if drive.rotational and (drive.bandwidth is None or drive.bandwidth.mixed_bytes_per_s < _SPINNING_BYTES_PER_S):
        yield found("warning", f"is on a spinning disk ({drive.drive})", "give a directory on an SSD")


def _write_fix(error: str) -> str:
    if "EROFS" in error:
        return "remount the filesystem writable (mount -o remount,rw), or give another directory"
    if "EACCES" in error or "EPERM" in error:
        return "give this user permission to write (chown, chmod), or give another directory"
    if "ENOSPC" in error or "EDQUOT" in error:
        return "free space there or raise the quota, or give a directory on another drive"
    if "EIO" in error:
        return "the drive failed: look at dmesg, and do not trust it before you know why"
    return "look at dmesg for what the kernel says, or give another directory"


def _shared_drives(drives: Sequence[Drive]) -> Iterator[Problem]:
    """Directories are striped, so two of them on one drive gain nothing."""
    first: dict[int, Drive] = {}
    for drive in drives:
        if drive.device_number is None:
            continue
        other = first.setdefault(drive.device_number, drive)
        if other is not drive:
            yield Problem(
                "warning",
                drive.path,
                f"{drive.path} and {other.path} are on the same filesystem, so using both is no faster than one",
                "give one directory per drive",
            )
