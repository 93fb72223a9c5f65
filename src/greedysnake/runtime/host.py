"""What this machine offers: device, memory, cores, kernel. States facts; `doctor` judges them."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

from greedysnake import _native
from greedysnake.errors import GreedySnakeError
from greedysnake.runtime.io import io_uring_available

PINNING_TRIAL_BYTES = 256 << 20
"""Well above the usual limits on locked memory (64 KiB, 8 MiB), and registered in a fraction of a second."""


@dataclass(frozen=True)
class Device:
    """The device that torch would compute on."""

    name: str
    memory_bytes: int
    free_bytes: int
    supports_bf16: bool
    pinning_error: str | None
    """Why CUDA refused to register a trial piece of host memory; None when it did not."""


@dataclass(frozen=True)
class Host:
    """One machine; sizes as the kernel and the container's limits give them."""

    device: Device | None
    """None means the CPU."""
    why_no_device: str | None
    torch: str | None
    """Version; None when torch cannot be imported."""
    python: str
    kernel: str
    num_cores: int
    """Cores this process may use."""
    isas: tuple[str, ...]
    """Instruction sets that the native kernels can use, narrowest first."""
    ram_bytes: int
    ram_available_bytes: int
    memlock_bytes: int | None
    """Limit on locked memory; None means unlimited."""
    io_uring: bool
    io_uring_reason: str


def look_at_host() -> Host:
    """Ask torch, the kernel and the native module; takes as long as importing torch and waking the device."""
    torch_version, device, why_no_device = _device()
    total, available = ram_bytes()
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    usable, reason = io_uring_available()
    return Host(
        device=device,
        why_no_device=why_no_device,
        torch=torch_version,
        python=platform.python_version(),
        kernel=platform.release(),
        num_cores=len(os.sched_getaffinity(0)),
        isas=tuple(_native.available_isas()),
        ram_bytes=total,
        ram_available_bytes=available,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        io_uring=usable,
        io_uring_reason=reason,
    )


def _device() -> tuple[str | None, Device | None, str | None]:
    """(version of torch, device, why there is none)."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, None, f"torch cannot be imported: {error}"
    version = str(torch.__version__)
    if torch.version.cuda is None:
        return version, None, "this build of torch has no CUDA"
    try:
        if not torch.cuda.is_available():
            return version, None, "torch finds no CUDA device"
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        device = Device(
            name=properties.name,
            memory_bytes=total,
            free_bytes=free,
            supports_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            pinning_error=_pinning_error(),
        )
    except RuntimeError as error:
        return version, None, f"the CUDA device does not answer: {str(error).splitlines()[0]}"
    return version, device, None


def _pinning_error() -> str | None:
    """Drivers differ in whether the limit on locked memory applies to them, so this tries instead of guessing."""
    from greedysnake.runtime.arena import Arena

    try:
        with Arena(PINNING_TRIAL_BYTES, device="cuda") as arena:
            arena.allocate(PINNING_TRIAL_BYTES, "a trial")
    except GreedySnakeError as error:
        return str(error)
    return None


def ram_bytes() -> tuple[int, int]:
    """(total, available) bytes of this machine, both capped by the container's limit if there is one."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    limits = [limit for limit in map(_number_in, _limit_files()) if limit is not None]
    return min([fields["MemTotal"], *limits]), min([fields["MemAvailable"], *limits])


def _limit_files() -> list[Path]:
    """Files that may hold a limit on this process's memory, for both versions of control groups."""
    files = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        files += [directory / name for directory in (group, *group.parents) if directory.is_relative_to(root)]
    return files


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
