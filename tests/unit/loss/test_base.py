"""Declared denominators that are called, or return, otherwise than they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Loss
from anybatch.errors import LossError


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), y)


def total(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="sum")


def by_ratio(count: Any) -> Tensor:
    engine = Engine(nn.Linear(4, 3), Loss.ratio(total, count), micro_batch=3)
    return engine.backward(torch.randn(8, 4), torch.randint(3, (8,)))


def inside(count: Any) -> Tensor:
    engine = Engine(Inside(), Loss.inside(count=count), micro_batch=3)
    return engine.backward({"x": torch.randn(8, 4), "y": torch.randint(3, (8,))})


WRONG: dict[str, tuple[Callable[[Any], Tensor], Any, str]] = {
    "outputs too": (by_ratio, lambda _, y: len(y), r"counted by den\(targets\): .*missing"),
    "no targets": (by_ratio, lambda: 8, r"counted by den\(targets\): .*takes 0"),
    "a number": (by_ratio, 8, r"counted by den\(targets\): 'int' object is not callable"),
    "several": (by_ratio, lambda y: y > 0, r"den\(targets\) must return one number"),
    "inputs alone": (inside, lambda _: 8, r"counted by count\(inputs, targets\): .*takes 1"),
    "several, inside": (inside, lambda *_: torch.ones(2), r"count\(inputs, targets\) must return"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_count_that_does_not_fit_is_named(name: str) -> None:
    run, count, said = WRONG[name]
    with pytest.raises(LossError, match=said):
        run(count)


def test_a_type_error_inside_of_a_count_stays_one() -> None:
    def count(y: Tensor) -> int:
        return len(y) + len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        by_ratio(count)
