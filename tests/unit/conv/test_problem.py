from __future__ import annotations

from tests.unit.conv.problems import problem


def test_a_problem_says_what_it_is() -> None:
    one = problem("data", 2, "all")
    assert one.operands(2) == ((2, 6, 8, 5), (6, 2, 3, 5))
    assert one.result(2) == (2, 4, 13, 11)
    words = "data 4x13x11 -> 6, window 3x5, stride 2x2, padding 3x3, dilation 2x2, groups 2"
    assert str(one) == words
