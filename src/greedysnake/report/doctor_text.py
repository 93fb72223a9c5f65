"""The doctor's findings as a table for people. Measures nothing and judges nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from greedysnake.runtime.doctor import Diagnosis
from greedysnake.runtime.drive import Drive
from greedysnake.runtime.host import Host
from greedysnake.shapes import GRANULE, MOMENTS, precision_of
from greedysnake.sizes import format_size

_COLOURS = {"error": "red", "warning": "yellow"}


def doctor_text(diagnosis: Diagnosis) -> RenderableType:
    """One table for the machine, one for each directory, then what to fix."""
    parts: list[RenderableType] = [_rows("machine", _host_rows(diagnosis.host))]
    parts += [_rows(drive.path, _drive_rows(drive)) for drive in diagnosis.drives]
    parts += _what_it_means(diagnosis.drives)
    for problem in diagnosis.problems:
        line = Text(f"{problem.severity}: ", style=f"bold {_COLOURS[problem.severity]}")
        line.append(problem.problem, style="default not bold")
        line.append(f"\n  fix: {problem.fix}", style="default not bold")
        parts.append(line)
    if not diagnosis.drives:
        parts.append("No directory was examined: give those that training would use.")
    parts.append(_verdict(diagnosis))
    return Group(*parts)


MANY = 2048 * GRANULE
"""Parameters in a chunk, so many that what fills up its last page does not count."""


def _what_it_means(drives: Sequence[Drive]) -> list[str]:
    """The time that a step spends on the drives at least. Directories get equal shares, so the slowest drive sets the
    pace, and one that has two of them has twice as much to do."""
    measured = [(drive.device_number, drive.bandwidth.mixed_bytes_per_s) for drive in drives if drive.bandwidth]
    if not measured:
        return []
    counts = Counter(number for number, _ in measured)
    together = len(measured) * min(rate / counts[number] for number, rate in measured)
    needed = {}
    for moments in MOMENTS:
        precision = precision_of("bfloat16", moments)
        # Weights are read in the forward and in the backward; everything is written back once.
        step_bytes = 3 * precision.weight_bytes + 2 * precision.state_bytes(MANY) / MANY
        needed[moments] = f"{step_bytes * 1e9 / together:.3g} s ({step_bytes:g} bytes of each)"
    return [
        f"With all state on SSD a step takes {needed.pop('float32')} per billion parameters; with "
        f"training.adam_moments {', '.join(f'{moments} {text}' for moments, text in needed.items())}. Of the first two "
        "about a tenth is spared where moments are compressed, which is the default."
    ]


def _verdict(diagnosis: Diagnosis) -> Text:
    if not diagnosis.ok:
        return Text("Training could not work here.", style="bold red")
    number = len(diagnosis.problems)
    warnings = f", with {number} {'warning' if number == 1 else 'warnings'}" if number else ""
    return Text(f"Training can work here{warnings}.", style="bold green")


def _host_rows(host: Host) -> list[tuple[str, str]]:
    device = "none: the CPU computes"
    if host.device is not None:
        sizes = f"{format_size(host.device.memory_bytes)}, {format_size(host.device.free_bytes)} free"
        device = f"{host.device.name}, {sizes}"
    return [
        ("device", device),
        ("RAM", f"{format_size(host.ram_bytes)}, {format_size(host.ram_available_bytes)} available"),
        ("locked memory", _memlock(host)),
        ("CPU", f"{host.num_cores} cores, {', '.join(host.isas)}"),
        ("kernel", f"Linux {host.kernel}"),
        ("io_uring", f"{'yes' if host.io_uring else 'no'}: {host.io_uring_reason}"),
        ("software", f"Python {host.python}, torch {host.torch or 'missing'}"),
    ]


def _memlock(host: Host) -> str:
    limit = "unlimited" if host.memlock_bytes is None else f"limit {format_size(host.memlock_bytes)}"
    if host.device is None:
        return f"{limit}; matters only with a CUDA device"
    if host.device.pinning_error is not None:
        return f"{limit}; too little: CUDA refused a trial"
    return f"{limit}; enough: CUDA registered a trial buffer"


def _drive_rows(drive: Drive) -> list[tuple[str, str]]:
    if not drive.exists:
        return [("directory", "not there")]
    rows = [
        ("filesystem", f"{drive.filesystem or 'unknown'} mounted on {drive.mount_point or 'unknown'}"),
        ("drive", drive.drive or "unknown"),
        ("writable", "yes" if drive.write_error is None else "no"),
        ("free", format_size(drive.free_bytes or 0)),
        ("O_DIRECT", _direct(drive)),
    ]
    if drive.bandwidth is None:
        return [*rows, ("bandwidth", f"not measured: {drive.why_no_bandwidth}")]
    return [
        *rows,
        ("read", _rate(drive.bandwidth.read_bytes_per_s)),
        ("write", _rate(drive.bandwidth.write_bytes_per_s)),
        ("half and half", f"{_rate(drive.bandwidth.mixed_bytes_per_s)} in total"),
    ]


def _direct(drive: Drive) -> str:
    if drive.direct is None:
        return "unknown"
    if not drive.direct:
        return "no: transfers go through the page cache"
    return f"yes, memory aligned to {drive.memory_alignment} and offsets to {drive.offset_alignment} bytes"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _rows(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False, min_width=60)
    for name, value in rows:
        table.add_row(name, escape(value))
    return table
