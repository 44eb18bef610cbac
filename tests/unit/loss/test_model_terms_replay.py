"""Recipes: what was made of some rows is made of others, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anybatch.loss.model_terms import Recipes, touches

LABELS = torch.randint(5, (6, 4))

MADE: list[Callable[[Tensor], Tensor]] = [
    lambda y: F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1),
    lambda y: y[:, 1:].reshape(-1).to(torch.long),
    lambda y: y.unsqueeze(-1).squeeze(-1).clamp(0, 3).flatten(),
    lambda y: y.masked_fill(y == 2, -100).view(-1),
    lambda y: torch.where(y.eq(1), -100, y).transpose(0, 1).T,
    lambda y: y.float().mul(2.0) - 1,
]
NOT_MADE: list[Callable[[Tensor], Tensor]] = [
    lambda y: torch.rand_like(y.float()),
    lambda y: y.clone().fill_(1),
    lambda y: y.contiguous().view(-1)[torch.randperm(24)],
    lambda y: y + torch.ones(6, 4),
]


class Following(TorchFunctionMode):
    def __init__(self, recipes: Recipes) -> None:
        super().__init__()
        self.recipes = recipes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if touches(func):
            self.recipes.follow(func, args, kwargs or {}, result)
        return result


def followed(fn: Callable[[Tensor], Tensor], y: Tensor) -> tuple[Recipes, Tensor]:
    recipes = Recipes({"labels": y})
    with Following(recipes):
        made = fn(y)
    return recipes, made


@pytest.mark.parametrize("fn", MADE)
def test_what_moves_or_maps_labels_is_made_again_of_others(fn: Callable[[Tensor], Tensor]) -> None:
    recipes, made = followed(fn, LABELS[:2])
    recipe = recipes.of(made)
    assert recipe is not None
    assert torch.equal(recipe.made([LABELS]), fn(LABELS))


@pytest.mark.parametrize("fn", NOT_MADE)
def test_draws_writes_and_other_tensors_are_not(fn: Callable[[Tensor], Tensor]) -> None:
    recipes, made = followed(fn, LABELS.clone())
    assert recipes.of(made) is None


def test_what_is_written_to_is_forgotten_with_all_that_shares_its_memory() -> None:
    y = LABELS.clone()
    recipes = Recipes({"labels": y})
    with Following(recipes):
        view, copied = y.view(-1), y.clone()
        y[0] = -100
    assert recipes.of(view) is None
    assert recipes.of(y) is None
    assert recipes.of(copied) is not None
