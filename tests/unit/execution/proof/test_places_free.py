"""Numbers in which no sample has a part: cut, written and numbered by the place of a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.unit.execution.proof.nets import is_shown
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Plan

TableFunction = Callable[["Tabled", Tensor], Tensor]


class Tabled(nn.Module):
    """A body beside a table and a gate that are still zero, and weights of places."""

    def __init__(self, body: TableFunction) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.gate = nn.Parameter(torch.zeros(6))
        self.table = nn.Parameter(torch.zeros(64, 6))
        weights = torch.ones(64)
        weights[6:] = 2
        self.register_buffer("weights", weights)
        self.register_buffer("ones", torch.ones(64))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, self.first(x)))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 3, dtype=torch.float64)


def zeros(n: int, size: int) -> Tensor:
    return torch.zeros(n, size, dtype=torch.float64)


def ones_after(start: int) -> TableFunction:
    def body(_: Tabled, h: Tensor) -> Tensor:
        variant = torch.zeros_like(h)
        variant[start:] = 1
        return h * (1 + variant)

    return body


def after_a_choice(_: Tabled, h: Tensor) -> Tensor:
    chosen = h[:, 0] > -99
    some = h[chosen]
    variant = torch.zeros_like(some)
    variant[8:] = 1
    out = torch.zeros_like(h)
    out[chosen] = some * (1 + variant)
    return out


def gated_first(s: Tabled, h: Tensor) -> Tensor:
    variant = torch.zeros_like(h)
    variant[:1] = 1
    return h + s.gate * variant


def of_rows(fn: Callable[[Tensor], Tensor]) -> TableFunction:
    """Return a body that reads the table at places which a kernel makes of constants."""
    return lambda s, h: h + s.table[fn(h.detach()[:, 0])]


def at(write: Callable[[Tensor, Tensor], Tensor]) -> TableFunction:
    """Return a body that multiplies the table by what is written at the places of rows."""

    def body(s: Tabled, h: Tensor) -> Tensor:
        return h + write(zeros(len(h), 64), torch.arange(len(h))) @ s.table

    return body


def copied_places(s: Tabled, h: Tensor) -> Tensor:
    rows = torch.arange(len(h))
    found = zeros(len(h), 1)
    found[rows] = rows[:, None].double()
    return h + s.gate * found


CUT: dict[str, TableFunction] = {
    "written at 8": ones_after(8),
    "written at 2": ones_after(2),
    "written at the first": gated_first,
    "written after a choice": after_a_choice,
    "the last row": lambda s, h: h + s.gate * torch.zeros_like(h).index_fill(
        0, torch.tensor([-1]), 1.0
    ),
    "tril": lambda _, h: h * (1 + torch.ones_like(h).tril(-8)),
    "joined": lambda s, h: h + s.gate
    * torch.cat([torch.ones_like(h)[:1], torch.zeros_like(h)[1:]]),
}  # fmt: skip

PARTS: dict[str, TableFunction] = {
    "sliced": lambda s, h: h + s.table[: len(h)],
    "detached": lambda s, h: h + s.gate.exp() * s.table.detach()[: len(h)],
    "scaled": lambda s, h: h + (s.table * 2)[: len(h)],
    "narrowed": lambda s, h: h + s.table.narrow(0, 3, len(h)),
    "split": lambda s, h: h + s.table.split(len(h))[0],
    "strided": lambda s, h: h + s.table.as_strided(h.shape, (6, 1)),
    "flat": lambda s, h: h + s.table.view(-1)[: h.numel()].view_as(h),
    "interpolated": lambda s, h: h + F.interpolate(s.table.T[None], size=len(h))[0].T,
    "pooled": lambda s, h: h + F.adaptive_avg_pool1d(s.table.T[None], len(h))[0].T,
    "taken": lambda s, h: h + s.table[:, 0].take(torch.arange(len(h)))[:, None],
    "a buffer": lambda s, h: h * s.weights[: len(h), None],
    "a buffer joined": lambda s, h: h * torch.cat([s.weights, s.ones])[: len(h), None],
}

NUMBERED: dict[str, TableFunction] = {
    "nonzero": of_rows(lambda one: torch.ones_like(one).nonzero()[:, 0]),
    "argsort": of_rows(lambda one: torch.zeros_like(one).argsort(stable=True)),
    "repeat_interleave": of_rows(lambda one: torch.repeat_interleave(torch.ones_like(one).long())),
    "logcumsumexp": lambda s, h: h + s.gate * torch.logcumsumexp(torch.zeros_like(h), 0),
    "scatter": at(lambda z, n: z.scatter_(1, n[:, None], 1.0)),
    "scatter of a tensor": at(lambda z, n: z.scatter(1, n[:, None], torch.ones_like(z[:, :1]))),
    "index_put": at(lambda z, n: z.index_put_((n, n), torch.ones_like(z[0, 0]))),
    "index_fill": at(lambda z, n: z.index_fill(1, n, 1.0)),
    "index_add": at(lambda z, n: z.index_add(1, n, torch.ones(len(n), len(n)).double())),
    "index_copy": at(lambda z, n: z.index_copy(1, n, torch.eye(len(n)).double())),
    "put": at(lambda z, n: z.put(n * 65, torch.ones(len(n)).double())),
    "copied": copied_places,
}


def weighted(fn: Callable[[Tensor], Tensor]) -> TableFunction:
    """Return a body whose gradient is multiplied by what a kernel makes of ones."""
    return lambda _, h: h + fn(torch.ones_like(h)) * (h - h.detach())


def ones_of(h: Tensor, *, after: int | None = None) -> Tensor:
    """Return ones [n, 5], as a mask of padding that is made where none is given."""
    mask = torch.ones(len(h), 5)
    if after is not None:
        mask[after:] = 0
    return mask


def at_places(h: Tensor, mask: Tensor) -> Tensor:
    """Return h times how many of its row a mask keeps, read by the numbers of rows."""
    rows, columns = torch.arange(len(h)), torch.arange(5)
    observed = mask.bool()[rows[:, None], columns] & (columns < 3)
    return h * observed.sum(1)[:, None]


def divided_by_a_count(_: Tabled, h: Tensor) -> Tensor:
    count = ones_of(h).sum()
    return h / count if count == len(h) * 5 else h


def compared_later(_: Tabled, h: Tensor) -> Tensor:
    count = ones_of(h).sum()
    scaled = h / count
    return scaled if count == len(h) * 5 else h


COUNTED: dict[str, TableFunction] = {
    "compared with a number": lambda _, h: h * (2.0 if ones_of(h).sum() > 40 else 1.0),
    "equal to a number": lambda _, h: h * (2.0 if ones_of(h).sum() == 20 else 1.0),
    "divided by what was compared": divided_by_a_count,
    "compared after it was used": compared_later,
    "all of it, where a part is zero": lambda _, h: (
        h * (2.0 if ones_of(h, after=8).sum() == len(h) * 5 else 1.0)
    ),
    "read where a part is zero": lambda _, h: at_places(h, ones_of(h, after=8)),
    "softmax": weighted(lambda one: one.softmax(0)),
    "a product": weighted(lambda one: one @ one.T @ one),
    "normalised": weighted(lambda one: F.normalize(one, dim=0)),
    "a sum": weighted(lambda one: one.sum(0)),
}
OTHER = CUT | PARTS | NUMBERED | COUNTED


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4, 5])
@pytest.mark.parametrize("name", OTHER)
def test_what_the_place_of_a_row_decides_is_never_shown(name: str, micro_batch: int) -> None:
    net, (x, y) = Tabled(OTHER[name]).double(), batch()
    assert not is_shown(net, F.mse_loss, x, y, micro_batch)


def first_of_each(_: Tabled, h: Tensor) -> Tensor:
    found = zeros(len(h) * 6, 1)[:, 0]
    found[torch.arange(len(h)) * 6] = 1
    return h * (1 + found.view_as(h))


def column(_: Tabled, h: Tensor) -> Tensor:
    found = torch.zeros_like(h)
    found[:, 2:] = 1
    return h * (1 + found)


HONEST: dict[str, TableFunction] = {
    "one-hot by scatter": lambda s, h: (
        h + zeros(len(h), 64).scatter_(1, h.detach().argmax(1)[:, None], 1.0) @ s.table
    ),
    "the first of each row": first_of_each,
    "columns": column,
    "an entry for all": lambda s, h: h + s.table[3].expand(len(h), -1),
    "an entry repeated": lambda s, h: h + s.table[3:4].repeat(len(h), 1),
    "joined with an entry": lambda s, h: torch.cat([h, s.table[:1].expand(len(h), -1)], 1)[:, :6],
    "a table of features": lambda s, h: h + s.table[: h.shape[1], 0],
    "a constant": lambda s, h: h * s.ones[: len(h), None],
    "tokens": lambda s, h: (h[:, None] + s.table[:5]).mean(1),
    "softmax of features": weighted(lambda one: one.softmax(1)),
    "noise": lambda _, h: h + torch.randn(h.shape, dtype=h.dtype).softmax(1) * 0,
    "a mask that is read by places": lambda _, h: at_places(h, ones_of(h)),
    "a square": lambda _, h: h * (1 + torch.ones(len(h), 6, 6).double().tril()[:, 2]),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4, 5])
@pytest.mark.parametrize("name", HONEST)
def test_numbers_that_are_alike_for_all_rows_are_shown(name: str, micro_batch: int) -> None:
    net, (x, y) = Tabled(HONEST[name]).double(), batch()
    plans: list[Plan | None] = []

    def run(model: nn.Module) -> Tensor:
        engine = Engine(model, F.mse_loss, micro_batch=micro_batch)
        loss = engine.backward(x, y)
        plans.append(engine.plan)
        return loss

    assert_exact(state_after(net, run), undivided(net, F.mse_loss, x, y))
    assert plans[0] is not None
    assert plans[0].exact, str(plans[0].exact)


DETERMINANTS: dict[str, TableFunction] = {
    "expanded": lambda s, h: s.gate.exp().sum().expand(len(h)),
    "beside ones": lambda s, h: s.gate.exp().sum() * h.new_ones(len(h)),
    "repeated": lambda s, h: s.gate.exp()[:1].repeat(len(h)),
}


def with_rows(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.mse_loss(out[0], y) + out[1].mean()


class Determined(Tabled):
    """Outputs, and a number for each row that parameters alone have made."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[n, 4] -> [n, 3] and [n]."""
        h = self.first(x)
        return self.last(h), self.body(self, h)


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4, 5])
@pytest.mark.parametrize("name", DETERMINANTS)
def test_rows_that_only_parameters_have_made_are_shown(name: str, micro_batch: int) -> None:
    net, (x, y) = Determined(DETERMINANTS[name]).double(), batch()
    plans: list[Plan | None] = []

    def run(model: nn.Module) -> Tensor:
        engine = Engine(model, with_rows, micro_batch=micro_batch)
        loss = engine.backward(x, y)
        plans.append(engine.plan)
        return loss

    assert_exact(state_after(net, run), undivided(net, with_rows, x, y))
    assert plans[0] is not None
    assert plans[0].exact, str(plans[0].exact)
