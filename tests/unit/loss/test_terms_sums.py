from __future__ import annotations

from typing import Any

import pytest
import torch

from anybatch.loss.terms import arithmetic

A, B = {0: 1.0}, {1: 2.0}


@pytest.mark.parametrize(
    ("name", "operands", "found"),
    [
        ("add", [A, B], {0: 1.0, 1: 2.0}),
        ("add", [A, A], {0: 2.0}),
        ("sub", [A, B], {0: 1.0, 1: -2.0}),
        ("add", [A, 0], A),
        ("radd", [A, 0.0], A),
        ("rsub", [A, 0], {0: -1.0}),
        ("mul", [B, 3], {1: 6.0}),
        ("rmul", [B, 0.5], {1: 1.0}),
        ("div", [B, 4], {1: 0.5}),
        ("neg", [A], {0: -1.0}),
        ("clone", [A], A),
        ("add", [A, 1.0], None),
        ("mul", [A, B], None),
        ("div", [A, B], None),
        ("div", [A, 0], None),
        ("pow", [A, 2], None),
        ("exp", [A], None),
    ],
)
def test_weighted_sums_remain_and_the_rest_is_none(
    name: str, operands: list[Any], found: dict[int, float] | None
) -> None:
    assert arithmetic(name, operands) == found


def test_a_tensor_that_happens_to_be_zero_is_no_zero() -> None:
    """`mse + lam * constraint` with lam initialised at 0 once lost the constraint."""
    assert arithmetic("add", [A, torch.zeros(())]) is None
    assert arithmetic("mul", [A, torch.ones(())]) is None
