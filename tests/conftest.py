"""What all tests share."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

MKFS = shutil.which("mkfs.ext4", path="/sbin:/usr/sbin:/bin:/usr/bin")

# No test is judged by its time: machines differ, and they are busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell that runs the tests in the background has them ignore Ctrl-C, and so their children; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup has them ignore a hangup. They still do, but not their children, to which a handler is not passed on.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# Threads that wait for each other's part of an operator sleep: tests run side by side, and who spins takes their time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What torch asks for where kernels on a GPU must give the same bits every time; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with more threads, many times so on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that mounts a new ext4 of some MiB; all are unmounted at the end."""
    if os.geteuid() != 0 or MKFS is None:
        pytest.skip("mounting a small filesystem needs root and mkfs.ext4")
    mounted: list[Path] = []

    def new(num_mib: int) -> Path:
        image, point = tmp_path / f"image{len(mounted)}", tmp_path / f"mount{len(mounted)}"
        point.mkdir()
        with image.open("wb") as file:
            file.truncate(num_mib << 20)
        subprocess.run([MKFS, "-q", "-m", "0", image], check=True)
        if subprocess.run(["mount", "-o", "loop", image, point], capture_output=True).returncode:
            pytest.skip("loop mounts are not allowed here")
        mounted.append(point)
        return point

    yield new
    for point in mounted:
        subprocess.run(["umount", point], check=True)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; returns its exit code, and what it printed to both ends."""
    from greedysnake import cli

    def run_command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["greedysnake", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = capsys.readouterr()
        return int(caught.value.code or 0), printed.out, printed.err

    return run_command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to copy, with the configuration that made it."""
    from training import write_config

    directory = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", "greedysnake", "train", str(write_config(directory, eval_steps=8))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return directory


@pytest.fixture
def known_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes two seconds; what it finds is doctor's matter."""
    from greedysnake import measuring
    from greedysnake.runtime.drive import Drive
    from plans import FAST

    monkeypatch.setattr(
        measuring, "look_at_drive", lambda path: Drive(str(path), exists=True, device_number=1, bandwidth=FAST)
    )
