from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch
from torch import nn

from anybatch.errors import BudgetError
from anybatch.offloading.state_mover import cut, parts_of


def fewest(sizes: list[int], limit: int) -> int:
    """The fewest consecutive parts within the limit, by trying all."""
    for count in range(1, len(sizes) + 1):
        for ends in combinations(range(1, len(sizes)), count - 1):
            bounds = list(zip((0, *ends), (*ends, len(sizes)), strict=True))
            if all(b - a == 1 or sum(sizes[a:b]) <= limit for a, b in bounds):
                return count
    return 0


def test_parts_are_as_few_as_can_be() -> None:
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.randint(0, 9) for _ in range(rng.randint(1, 8))]
        limit = rng.randint(1, 20)
        parts = cut(sizes, limit)
        assert [i for part in parts for i in part] == list(range(len(sizes)))
        assert all(len(p) == 1 or sum(sizes[i] for i in p) <= limit for p in parts)
        assert len(parts) == fewest(sizes, limit)


def test_nothing_is_no_part() -> None:
    assert cut([], 5) == []


def optimizer() -> torch.optim.Optimizer:
    params = [nn.Parameter(torch.ones(n)) for n in (4, 2, 6, 1)]
    for p in params[:3]:
        p.grad = torch.ones_like(p)
    return torch.optim.SGD([{"params": params[:2], "lr": 1}, {"params": params[2:], "lr": 2}])


def test_a_part_has_the_options_of_its_groups_and_only_what_has_a_gradient() -> None:
    found = optimizer()
    parts = parts_of(found, lambda _, p: p.numel(), 24)
    assert [part.size for part in parts] == [6, 6]
    assert [[p.numel() for _, p in part.members] for part in parts] == [[4, 2], [6]]
    (group,) = parts[1].groups(found.param_groups)
    assert group["lr"] == 2
    assert [p.numel() for p in group["params"]] == [6]
    assert len(found.param_groups[1]["params"]) == 2


def test_a_parameter_that_is_too_large_is_refused_with_what_it_needs() -> None:
    match = r"of one of shape \[6\] needs 6.0 KiB, and 5.0 KiB is there.*memory=\"6KiB\""
    with pytest.raises(BudgetError, match=match) as error:
        parts_of(optimizer(), lambda _, p: 1024 * p.numel(), 5 * 1024)
    assert (error.value.needed, error.value.budget) == (6 * 1024, 5 * 1024)
