"""A micro-batch in which nothing counts adds 0, also where others wait for its backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import anybatch
from anybatch import Engine, LazyBatch, Loss

N = 14


class Masked(nn.Module):
    """A mean over what is not masked, behind two layers in which samples meet."""

    def __init__(self, body: Callable[[Masked, Tensor], Tensor], *, tracks: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 6)
        self.one, self.other = (
            nn.BatchNorm1d(6, track_running_stats=tracks),  # a checkpoint of torch moves them twice
            nn.BatchNorm1d(6, track_running_stats=tracks),
        )
        self.last, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(6))
        self.body = body

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """[n, 5], [n], [n] -> the loss; NaN where all is masked."""
        h = self.body(self, x) * self.scale
        losses = F.cross_entropy(self.last(h), y, reduction="none")
        return (losses * mask).sum() / mask.sum()


def plain(model: Masked, x: Tensor) -> Tensor:
    return model.other(model.second(model.one(model.first(x)).tanh()))


def residual(model: Masked, x: Tensor) -> Tensor:
    """The loss reaches each layer past the others, too, and a weight before and behind them."""
    h = model.first(x)
    h = h + model.one(h * model.scale)
    return h + model.other(model.second(h)).relu()


def branches(model: Masked, x: Tensor) -> Tensor:
    h = model.first(x)
    return model.one(h).tanh() * model.other(model.second(h))


def again(model: Masked, x: Tensor, *, use_reentrant: bool) -> Tensor:
    def inside(h: Tensor) -> Tensor:
        return model.other(model.second(model.one(h).tanh())).tanh()

    found: Tensor = checkpoint(inside, model.first(x), use_reentrant=use_reentrant)
    return found


def gathers(model: Masked, x: Tensor) -> Tensor:
    h = model.first(x)
    others, _ = anybatch.gather_batch(model.second(h))
    return h - others.square().mean(0) * anybatch.coupled(lambda h: h.std())(h)


BODIES: dict[str, Callable[[Masked, Tensor], Tensor]] = {
    "plain": plain,
    "residual": residual,
    "branches": branches,
    "checkpoint": partial(again, use_reentrant=False),
    "reentrant checkpoint": partial(again, use_reentrant=True),
    "gathers": gathers,
}
COUNTED = {"first": range(5), "last": range(9, N), "middle": range(5, 8), "one": [6]}


class Items(Dataset[Any]):
    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.columns)


def case(body: str, counted: str) -> tuple[Masked, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(1)
    mask = torch.zeros(N).double()
    mask[list(COUNTED[counted])] = 1
    model = Masked(BODIES[body], tracks="checkpoint" not in body).double()
    return model, (torch.randn(N, 5).double(), torch.randint(3, (N,)), mask)


def counts(inputs: Any, _: Any) -> Tensor:
    found: Tensor = inputs[2].sum()
    return found


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4, 7])
@pytest.mark.parametrize("counted", COUNTED)
@pytest.mark.parametrize("body", BODIES)
def test_it_is_exact_in_lanes(body: str, counted: str, micro_batch: int) -> None:
    model, rows = case(body, counted)
    engines: list[Engine] = []

    def run(copied: nn.Module) -> Tensor:
        engines.append(Engine(copied, Loss.inside(count=counts), micro_batch=micro_batch))
        return engines[0].backward(rows)

    want = undivided(model, lambda loss: loss, rows, None)
    assert_exact(state_after(model, run), want)
    assert engines[0].plan is not None
    assert engines[0].plan.mechanism == "lockstep"


@pytest.mark.parametrize("counted", COUNTED)
def test_it_is_exact_where_the_batch_is_loaded_on_the_way(counted: str) -> None:
    model, rows = case("residual", counted)
    want = undivided(model, lambda loss: loss, rows, None)

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, Loss.inside(count=counts), micro_batch=4)
        return engine.backward(LazyBatch(Items(*rows)))

    assert_exact(state_after(model, run), want)


def test_it_is_exact_with_a_budget_and_without_gradients() -> None:
    model, rows = case("residual", "first")
    loss = Loss.inside(count=counts)
    want = undivided(model, lambda loss: loss, rows, None)
    memory = anybatch.plan(model, loss, (rows, None), memory="1GiB", timed=False).memory
    assert memory is not None
    got = state_after(model, lambda m: Engine(m, loss, memory=memory.floor + 64).backward(rows))
    assert_exact(got, want)
    value = Engine(model, loss, micro_batch=4).evaluate(rows)
    assert_exact({"loss": value}, {"loss": want["loss"]})


def test_a_batch_in_which_nothing_counts_is_nan_as_it_is_undivided() -> None:
    model, (x, y, mask) = case("plain", "one")
    loss = Engine(model, Loss.inside(count=counts), micro_batch=4).backward((x, y, mask * 0))
    assert loss.isnan()
