"""A counter beside a model is seen as one in a plain attribute of it is."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError
from anybatch.execution.outside import Outside, every_number, parts

WIDTH, LATE = 8, 9
CALLS = 0
Up = Callable[[], int]


class Late(nn.Module):
    """Computes something else from its tenth call on."""

    def __init__(self, up: Up) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3).double()
        self.up = up

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * 2 if self.up() > LATE else out


def in_list() -> Up:
    held = [0]

    def up() -> int:
        held[0] += 1
        return held[0]

    return up


def in_dict() -> Up:
    held = {"calls": [0]}

    def up() -> int:
        held["calls"][0] += 1
        return held["calls"][0]

    return up


def in_cell() -> Up:
    held = 0

    def up() -> int:
        nonlocal held
        held += 1
        return held

    return up


def in_global() -> Up:
    def up() -> int:
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return CALLS

    return up


def in_function() -> Up:
    def up() -> int:
        up.calls += 1  # type: ignore[attr-defined]
        return int(up.calls)  # type: ignore[attr-defined]

    up.calls = 0  # type: ignore[attr-defined]
    return up


def in_count() -> Up:
    held = itertools.count(1)
    return lambda: next(held)


def in_namespace() -> Up:
    held = SimpleNamespace(calls=0)

    def up() -> int:
        held.calls += 1
        return int(held.calls)

    return up


def in_default() -> Up:
    def up(held: list[int] = []) -> int:  # noqa: B006
        held[0:] = [len(held) and held[0] + 1]
        return held[0]

    return up


class Calls:
    def __init__(self) -> None:
        self.calls = 0

    def up(self) -> int:
        self.calls += 1
        return self.calls

    def __call__(self, *_: Any) -> None:
        self.calls += 1


WAYS = (in_list, in_dict, in_cell, in_global, in_function, in_count, in_namespace, in_default)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 6, dtype=torch.double), torch.randn(12, 3, dtype=torch.double)


@pytest.mark.parametrize("way", [*WAYS, lambda: Calls().up])
def test_a_counter_outside_a_model_is_not_shown_to_be_exact(way: Callable[[], Up]) -> None:
    model = Late(way())
    engine = Engine(model, F.mse_loss, micro_batch=2)
    for _ in range(2):
        try:
            engine.backward(*batch())
        except NotExactError:
            return
        assert not engine.plan.exact


@pytest.mark.parametrize("way", WAYS)
def test_a_counter_of_a_hook_is_detected(way: Callable[[], Up]) -> None:
    model, up = nn.Sequential(nn.Linear(6, 3)), way()
    model[0].register_forward_hook(lambda *_: up() and None)
    before = every_number(model.named_modules())
    model(torch.ones(2, 6))
    assert every_number(model.named_modules()) != before


def test_what_does_not_move_leaves_a_step_exact() -> None:
    logged: dict[str, Tensor] = {}
    options = {"scale": 2.0}

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(6, 3).double()
            self.inner.register_forward_hook(lambda m, a, out: logged.update(last=out.detach()))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) * options["scale"] + WIDTH
            return out

    x, y = batch()
    model = Plain()
    want = undivided(model, F.mse_loss, x, y)
    engine = Engine(model, F.mse_loss, micro_batch=5)
    assert_exact(state_of(model, engine.backward(x, y)), want)
    assert engine.plan.exact


def test_a_class_that_takes_the_address_of_another_is_another() -> None:
    """A class made anew in each step, as in a notebook, may lie where the last one lay."""

    def one(scale: float) -> type[nn.Module]:
        return type("Scaled", (nn.Identity,), {"scale": scale})

    before = parts([("", one(1.0)())])
    gc.collect()
    others = [one(2.0) for _ in range(100)]  # one of them takes the place, where it is free
    assert all(parts([("", other())]) != before for other in others)


def test_nested_data_is_followed_behind_functions_and_only_so_far() -> None:
    """Else each step would compare it all; a switch that a function reads is still noticed."""
    switch = [1.0]

    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.data = {str(i): {str(j): [[i, j]] * 9 for j in range(60)} for i in range(60)}

        def forward(self, x: Tensor) -> Tensor:
            return x * switch[0]

    found = Outside([Full()])
    before = found.numbers()
    assert len(before) < 5_000
    switch[0] = 2.0
    assert found.numbers() != before


@pytest.mark.parametrize("ours", [True, False])
def test_hooks_of_an_inspection_are_no_change(*, ours: bool) -> None:
    def hook(*_: Any) -> None:
        """Do nothing."""

    hook.__module__ = "anybatch.core.modules" if ours else "mine"
    model = nn.Sequential(nn.Linear(2, 2))
    before = parts(list(model.named_modules()))
    handle = model[0].register_forward_pre_hook(hook)
    assert (parts(list(model.named_modules())) == before) == ours
    handle.remove()
    assert parts(list(model.named_modules())) == before
