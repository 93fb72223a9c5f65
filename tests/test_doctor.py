"""The doctor against real directories, real mounts and tampered system calls."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from greedysnake.errors import StorageError
from greedysnake.report.doctor_text import doctor_text
from greedysnake.runtime import doctor
from greedysnake.runtime.doctor import Diagnosis, Problem, drive_problems, examine, host_problems
from greedysnake.runtime.drive import MIN_FREE_BYTES, Bandwidth, Drive, look_at_drive
from greedysnake.runtime.host import Device, Host, look_at_host
from greedysnake.runtime.io import IoEngine

SHORT_S = 0.05
COMMAND = [sys.executable, "-m", "greedysnake", "doctor"]

HEALTHY_HOST = Host(
    device=Device("a GPU", 80 << 30, 79 << 30, supports_bf16=True, pinning_error=None),
    why_no_device=None,
    torch="2.13.0",
    python="3.12.1",
    kernel="6.12.0",
    num_cores=16,
    isas=("scalar", "avx2"),
    ram_bytes=1 << 37,
    ram_available_bytes=1 << 36,
    memlock_bytes=None,
    io_uring=True,
    io_uring_reason="it works",
)
HEALTHY_DRIVE = Drive(
    path="/ssd",
    exists=True,
    filesystem="ext4",
    mount_point="/ssd",
    device_number=1,
    drive="nvme0n1",
    rotational=False,
    free_bytes=1 << 40,
    direct=True,
    memory_alignment=512,
    offset_alignment=512,
    bandwidth=Bandwidth(3e9, 3e9, 3e9),
)


def errors(problems: Iterator[Problem] | tuple[Problem, ...]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def requires_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounts are not allowed here: {done.stderr.strip()}")


# Facts


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("untouched")
    drive = look_at_drive(tmp_path, phase_s=SHORT_S)
    assert drive.exists and drive.write_error is None
    assert os.listdir(tmp_path) == ["mine"]
    assert (drive.free_bytes or 0) > 0
    if (drive.free_bytes or 0) >= MIN_FREE_BYTES:
        assert drive.bandwidth is not None
        assert min(drive.bandwidth.read_bytes_per_s, drive.bandwidth.write_bytes_per_s) > 0
        assert drive.bandwidth.mixed_bytes_per_s > 0


def test_filesystem_is_that_of_the_kernel(tmp_path: Path) -> None:
    if shutil.which("stat") is None:
        pytest.skip("stat is not installed")
    told = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    drive = look_at_drive(tmp_path, phase_s=SHORT_S)
    assert drive.filesystem is not None
    # stat cannot tell ext2, ext3 and ext4 apart, and names overlay differently.
    assert drive.filesystem.rstrip("0123456789").startswith(told.strip().split("/")[0].rstrip("0123456789")[:3])


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_directory_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    drive = look_at_drive(tmp_path / name, phase_s=SHORT_S)
    (problem,) = drive_problems(drive)
    assert problem.severity == "error" and re.search(r"is not an? (existing )?directory", problem.problem)
    assert ("mkdir" in problem.fix) is (name != "file"), "which would fail where a file is"


def test_refused_o_direct_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refusing(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    drive = look_at_drive(tmp_path, phase_s=SHORT_S)
    assert drive.direct is False and drive.exists and drive.write_error is None
    problems = list(drive_problems(drive))
    assert any("O_DIRECT" in problem.problem and problem.severity == "warning" for problem in problems)


@pytest.mark.parametrize("phase", range(4))
def test_a_drive_that_fails_while_measured_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    engines = []

    class Failing(IoEngine):
        def __init__(self) -> None:
            super().__init__()
            engines.append(self)
            if len(engines) == phase + 2:  # the first one only opens the file
                self._inject("error", errno.EIO, nth=1)

    monkeypatch.setattr("greedysnake.runtime.drive.IoEngine", Failing)
    drive = look_at_drive(tmp_path, phase_s=SHORT_S)
    if (drive.free_bytes or 0) < MIN_FREE_BYTES:
        pytest.skip("too little space to measure")
    assert drive.bandwidth is None and drive.write_error is not None and "EIO" in drive.write_error
    (problem,) = errors(drive_problems(drive))
    assert "dmesg" in problem.fix
    assert os.listdir(tmp_path) == []


def test_host_facts_are_those_of_this_process() -> None:
    host = look_at_host()
    assert host.num_cores == len(os.sched_getaffinity(0))
    assert 0 < host.ram_available_bytes <= host.ram_bytes
    assert host.kernel == os.uname().release
    assert host.isas[0] == "scalar"
    assert (host.device is None) == (host.why_no_device is not None)


# Mounts


@pytest.mark.root
def test_a_read_only_mount_is_an_error(tmp_path: Path) -> None:
    requires_root()
    mount("-t", "tmpfs", "-o", "ro", "none", str(tmp_path))
    try:
        diagnosis = examine([tmp_path], phase_s=SHORT_S)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert not diagnosis.ok
    (problem,) = [problem for problem in errors(diagnosis.problems) if "EROFS" in problem.problem]
    assert "remount" in problem.fix
    assert diagnosis.drives[0].filesystem == "tmpfs"


@pytest.mark.root
def test_a_mount_point_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    requires_root()
    point = tmp_path / os.fsdecode(b"old \xe4")
    point.mkdir()
    mount("-t", "tmpfs", "none", str(point))
    try:
        drive = look_at_drive(point, phase_s=SHORT_S)
    finally:
        subprocess.run(["umount", point], check=True)
    assert drive.filesystem == "tmpfs"


@pytest.mark.root
def test_a_full_filesystem_is_an_error_and_not_measured(tmp_path: Path) -> None:
    requires_root()
    mkfs = shutil.which("mkfs.ext4", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if mkfs is None:
        pytest.skip("mkfs.ext4 is not installed")
    image, point = tmp_path / "image", tmp_path / "mount point"  # the kernel writes the space as \040
    point.mkdir()
    image.write_bytes(bytes(16 << 20))
    subprocess.run([mkfs, "-q", "-F", "-m", "0", image], check=True)
    mount("-o", "loop", str(image), str(point))
    try:
        with open(point / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(bytes(1 << 20))
        done = subprocess.run([*COMMAND, str(point)], capture_output=True, text=True)
        drive = look_at_drive(point, phase_s=SHORT_S)
        left = sorted(os.listdir(point))
    finally:
        subprocess.run(["umount", point], check=True)
    assert done.returncode == 1 and "Training could not work" in done.stdout and "Traceback" not in done.stderr
    assert (drive.filesystem, drive.mount_point) == ("ext4", str(point))
    assert drive.bandwidth is None and drive.why_no_bandwidth is not None and "free" in drive.why_no_bandwidth
    assert any("free space there" in problem.fix for problem in errors(drive_problems(drive)))
    assert left == ["filler", "lost+found"]


# Tampered system calls, and an impatient user


def strace(options: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    command = ["strace", "-f", "--seccomp-bpf", "-o", "/dev/null", *options, *COMMAND, "--json", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "PTRACE" in done.stderr:
        pytest.skip("this sandbox forbids ptrace")
    return done


def test_blocked_io_uring_is_a_warning_with_the_docker_option(tmp_path: Path) -> None:
    done = strace(["-e", "trace=io_uring_setup", "-e", "inject=io_uring_setup:error=EPERM"], tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    assert found["host"]["io_uring"] is False and "EPERM" in found["host"]["io_uring_reason"]
    (problem,) = [problem for problem in found["problems"] if problem["where"] == "io_uring"]
    assert problem["severity"] == "warning"
    assert "--security-opt seccomp=unconfined" in problem["fix"] and "threads are used" in problem["fix"]


def test_writes_that_fail_make_exit_code_one(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < MIN_FREE_BYTES:
        pytest.skip("too little space to measure")
    calls = ["-e", "trace=io_uring_setup,pwrite64", "-e", "inject=io_uring_setup:error=EPERM"]
    done = strace([*calls, "-e", "inject=pwrite64:error=ENOSPC"], tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    assert any("ENOSPC" in problem["problem"] for problem in json.loads(done.stdout)["problems"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_measurement_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    if shutil.disk_usage(tmp_path).free < MIN_FREE_BYTES:
        pytest.skip("too little space to measure")
    process = subprocess.Popen([*COMMAND, *[str(tmp_path)] * 10], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not has_open(process.pid, tmp_path):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert b"Traceback" not in err
    assert os.listdir(tmp_path) == []


def has_open(pid: int, directory: Path) -> bool:
    """The process has an open file in the directory which is not there any more."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            pass
    return any(link.startswith(str(directory)) and link.endswith("(deleted)") for link in links)


# Judgements


def test_a_signal_while_the_file_is_made_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.open

    def make_and_end(path: str | Path, *options: int) -> int:
        os.close(make(path, *options))
        raise SystemExit(143)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(os, "open", make_and_end)
        look_at_drive(tmp_path, phase_s=0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_healthy_machine_has_no_problems() -> None:
    assert list(host_problems(HEALTHY_HOST)) == []
    assert list(drive_problems(HEALTHY_DRIVE)) == []


@pytest.mark.parametrize("filesystem", ["overlay", "nfs4", "tmpfs", "fuse.sshfs", "btrfs"])
def test_unsuitable_filesystems_are_warned_about(filesystem: str) -> None:
    (problem,) = drive_problems(replace(HEALTHY_DRIVE, filesystem=filesystem))
    assert problem.severity == "warning" and filesystem.split(".")[0] in problem.problem and problem.fix


def test_a_virtual_drive_that_calls_itself_spinning_is_believed_only_when_slow() -> None:
    spinning = replace(HEALTHY_DRIVE, rotational=True)
    assert list(drive_problems(spinning)) == []
    (problem,) = drive_problems(replace(spinning, bandwidth=Bandwidth(1.5e8, 1.5e8, 1e8)))
    assert "spinning" in problem.problem


def test_refused_pinning_is_an_error() -> None:
    assert HEALTHY_HOST.device is not None
    host = replace(HEALTHY_HOST, device=replace(HEALTHY_HOST.device, pinning_error="CUDA could not register 256 MiB"))
    (problem,) = host_problems(host)
    assert problem.severity == "error" and "ulimit -l" in problem.fix


def test_missing_torch_is_an_error_and_a_missing_device_is_not() -> None:
    without = replace(HEALTHY_HOST, device=None, why_no_device="torch finds no CUDA device")
    assert [problem.severity for problem in host_problems(without)] == ["warning"]
    assert [problem.severity for problem in host_problems(replace(without, torch=None))] == ["error"]


def test_two_directories_on_one_filesystem_are_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look_at_host", lambda: HEALTHY_HOST)
    for name in "ab":
        (tmp_path / name).mkdir()
    diagnosis = examine([tmp_path / "a", tmp_path / "b"], phase_s=SHORT_S)
    assert any("no faster than one" in problem.problem for problem in diagnosis.problems)


# The form that programs read


def test_json_has_these_fields_and_no_others(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "--json", str(tmp_path)], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert list(found) == ["version", "ok", "host", "directories", "problems"]
    assert found["version"] == 1
    assert list(found["host"]) == [
        *("device", "why_no_device", "torch", "python", "kernel", "num_cores", "isas", "ram_bytes"),
        *("ram_available_bytes", "memlock_bytes", "io_uring", "io_uring_reason"),
    ]
    assert list(found["directories"][0]) == [
        *("path", "exists", "write_error", "filesystem", "mount_point", "device_number", "drive", "rotational"),
        *("free_bytes", "direct", "memory_alignment", "offset_alignment", "bandwidth", "why_no_bandwidth"),
    ]
    assert all(list(problem) == ["severity", "where", "problem", "fix"] for problem in found["problems"])
    assert found["directories"][0]["path"] == str(tmp_path)


def test_every_field_can_be_written_as_json() -> None:
    problem = Problem("warning", "here", "what", "fix")
    text = json.dumps(Diagnosis(HEALTHY_HOST, (HEALTHY_DRIVE,), (problem,)).as_json())
    found = json.loads(text)
    assert found["ok"] is True
    assert list(found["host"]["device"]) == ["name", "memory_bytes", "free_bytes", "supports_bf16", "pinning_error"]
    assert list(found["directories"][0]["bandwidth"]) == ["read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s"]


def test_storage_errors_name_the_reason_when_no_file_can_be_made(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    fd = os.open(gone, os.O_RDONLY)
    gone.rmdir()
    try:
        drive = look_at_drive(f"/proc/self/fd/{fd}", phase_s=SHORT_S)
    finally:
        os.close(fd)
    assert drive.write_error is not None and "ENOENT" in drive.write_error
    assert issubclass(StorageError, Exception)


@pytest.mark.parametrize(
    ("rates", "seconds"),
    [
        ({1: 2.6e9}, ("10 s", "6.92 s", "5.48 s")),
        ({1: 2.6e9, 2: 2.6e9}, ("5 s", "3.46 s", "2.74 s")),
        ({1: 1.3e9, 2: 5e9}, ("10 s", "6.92 s", "5.48 s")),  # equal shares: the slower one sets the pace
    ],
)
def test_what_the_drives_mean_for_a_step_is_told_for_every_kind_of_moments(
    rates: dict[int, float], seconds: tuple[str, ...]
) -> None:
    drives = tuple(
        replace(HEALTHY_DRIVE, path=f"/{number}", device_number=number, bandwidth=Bandwidth(rate, rate, rate))
        for number, rate in rates.items()
    )
    console = Console(file=io.StringIO(), width=300)
    console.print(doctor_text(Diagnosis(HEALTHY_HOST, drives, ())))
    file = console.file
    assert isinstance(file, io.StringIO)
    wanted = "With all state on SSD a step takes {} (26 bytes of each) per billion parameters; with "
    wanted += "training.adam_moments bfloat16 {} (18 bytes of each), int8 {} (14.25 bytes of each)."
    assert wanted.format(*seconds) in file.getvalue()
