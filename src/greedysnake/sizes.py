"""Byte counts as people write them ("32GiB") and as messages print them. Knows nothing else."""

from __future__ import annotations

import re
from fractions import Fraction

from greedysnake.errors import ConfigError

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Bytes meant by an int or by text such as "32GiB" (binary), "2GB" (decimal), "4096" or "1.5 TiB"."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"a size cannot be negative: {size}")
        return size
    match = _PATTERN.fullmatch(size) if isinstance(size, str) else None
    unit = match[2].upper() or "B" if match else ""
    scale = _DECIMAL.get(unit) or _BINARY.get(unit)
    if match is None or scale is None:
        raise ConfigError(f"{size!r} is not a size: give bytes as an integer, or text like '32GiB' or '2GB'")
    # Exact arithmetic: a float would lose bytes above 8 PiB and round 0.1 wrongly below it.
    return int(Fraction(match[1]) * scale)


def format_size(num_bytes: int) -> str:
    """`num_bytes` for a message: three significant digits in a binary unit; exact bytes below 1 KiB."""
    if num_bytes < 0:
        return "-" + format_size(-num_bytes)
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        # 999.5 and more would print as four digits: the next unit says it shorter.
        if size < 999.5 or unit == "PiB":
            break
    digits = 0 if size >= 99.95 or size == int(size) else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {unit}"
