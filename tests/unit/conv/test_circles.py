from __future__ import annotations

from anybatch.conv.circles import fast, frequencies, good_length, rate, staged


def test_good_lengths_are_even_and_the_cheapest() -> None:
    for least in range(1, 400):
        length = good_length(least)
        assert length >= least
        assert length % 2 == 0
        others = [n for n in range(least + least % 2, 3 * least) if n % 2 == 0 and _seven_smooth(n)]
        assert all(length * (1 + rate(length)) <= n * (1 + rate(n)) for n in others)
        assert _seven_smooth(length)


def _seven_smooth(number: int) -> bool:
    return number > 0 and 2**10 * 3**8 * 5**6 * 7**5 % number == 0


def test_small_windows_are_transformed_so_and_large_or_long_ones_are_not() -> None:
    assert staged([20, 20], [7, 7]) < fast([20, 20])
    assert staged([768], [255]) > fast([768])
    assert frequencies([20, 18, 16]) == (20, 18, 9)
