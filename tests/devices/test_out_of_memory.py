"""Memory of the device runs out at every allocation of a step: it is exact, or leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.devices.steps import KINDS, N, setting
from tests.oracle import assert_exact, error_of, same, state_of, undivided

FOREVER = 1 << 40
RETRIES = 2 * N
"""A size is halved at most twice, and a step begins anew with each sample at most so often."""


def allocations(stand_in: Any, variant: str, first: bool) -> int:
    made = setting(variant, first=first, drop=0.0)
    begun = stand_in.statistics()["allocations"]
    made.step()
    return int(stand_in.statistics()["allocations"] - begun)


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("variant", KINDS)
def test_at_every_allocation(
    stand_in: Any, variant: str, first: bool, counted: Callable[..., int]
) -> None:
    total = allocations(stand_in, variant, first)
    chosen = sorted(random.Random(0).sample(range(total), counted(total, 50)))
    outcomes = {"exact": 0, "no trace": 0}
    for k in chosen:
        for count in (1, FOREVER):
            made = setting(variant, first=first, drop=0.0)
            x, y = (t.cuda() for t in made.batch)
            want, order = undivided(made.model, made.loss, x, y), torch.randperm(N)
            noise = error_of(undivided(made.model, made.loss, x[order], y[order]), want)
            torch.manual_seed(1)
            before = made.state()
            stand_in.fail(k, count)
            try:
                loss = made.step()
            except torch.OutOfMemoryError:
                stand_in.fail(-1)
                assert same(before, made.state()), f"a trace, at allocation {k} of {total}"
                outcomes["no trace"] += 1
                loss = made.step()
            finally:
                stand_in.fail(-1)
            assert made.engine.last is not None
            assert made.engine.last.retries <= RETRIES
            assert_exact(state_of(made.model, loss), want, noise)
            outcomes["exact"] += 1
    assert outcomes["exact"] == 2 * len(chosen)
    assert outcomes["no trace"] > 0
