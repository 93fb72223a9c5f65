from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedysnake.errors import ConfigError
from greedysnake.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("17 B", 17),
        ("2GB", 2 * 10**9),
        ("2gb", 2 * 10**9),
        ("32GiB", 32 << 30),
        (" 1.5 TiB ", 3 << 39),
        ("0.1KB", 100),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse(text: int | str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "32 G", "-1", -1, "1e9", "nan", "1.GiB", "1_000", True, None, 1.5, b"2GB"])
def test_nonsense_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (412 << 30, "412 GiB"),
        (1023 << 20, "1.00 GiB"),
        (-(3 << 20), "-3 MiB"),
        (1 << 62, "4096 PiB"),
    ],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(0, 1 << 60))
def test_formatted_size_is_true_to_half_a_percent(num_bytes: int) -> None:
    # Three significant digits: the error is at most 5 in the fourth.
    assert abs(parse_size(format_size(num_bytes)) - num_bytes) <= num_bytes * 0.005 + 1
