"""Bytes in and out at the border."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.units import parse_bytes, parse_share, show_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1, 1),
        (6e9, 6_000_000_000),
        ("4096", 4096),
        ("64MiB", 64 * 2**20),
        ("6 GiB", 6 * 2**30),
        ("1.5gb", 1_500_000_000),
        ("512k" + "ib", 512 * 1024),
        ("10 B", 10),
        ("2TB", 2 * 10**12),
    ],
)
def test_what_people_write(text: float | str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "wrong",
    [0, -1, "0", "6 XiB", "GiB", "", None, 1.5, True, "six GiB", float("inf"), float("nan")],
)
def test_anything_else_is_refused_with_what_came(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"memory must be a number of bytes .* and it is"):
        parse_bytes(wrong)


@pytest.mark.parametrize("text", ["6G", "512 m", "1.5k"])
def test_half_a_unit_is_refused_with_both_that_it_may_be(text: str) -> None:
    number, letter = text[:-1].strip(), text[-1].upper()
    with pytest.raises(ValueError, match=f'write "{number}{letter}iB".*"{number}{letter}B"'):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "share"),
    [("80%", 0.8), (" 12.5 % ", 0.125), ("100%", 1.0), ("80", None), (0.8, None), (None, None)],
)
def test_a_share_is_written_with_its_sign(value: object, share: float | None) -> None:
    assert parse_share(value) == share


@pytest.mark.parametrize("text", ["0%", "101%"])
def test_a_share_of_nothing_or_of_more_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="above 0 % and at most 100 %"):
        parse_share(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 * 2**20, "64.0 MiB"), (2**40, "1.0 TiB")],
)
def test_bytes_are_shown_in_binary_units(count: int, text: str) -> None:
    assert show_bytes(count) == text


@given(st.integers(1, 2**50))
def test_what_is_shown_is_read_as_nearly_the_same(count: int) -> None:
    assert abs(parse_bytes(show_bytes(count)) - count) <= 0.06 * count
