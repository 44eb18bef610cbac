"""Tensors that are as long as there are samples: places and noise are followed, or lead home."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.unit.execution.proof.nets import Body, Net, batch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError


def numbered(h: Tensor) -> Tensor:
    return h + torch.arange(len(h), dtype=h.dtype)[:, None] / 8


def counted(h: Tensor) -> Tensor:
    return h + torch.ones(len(h), dtype=h.dtype).cumsum(0)[:, None] / 8


def of_a_table(h: Tensor) -> Tensor:
    return h + F.embedding(torch.arange(len(h)), torch.eye(64, 8, dtype=h.dtype))


def normalised_noise(h: Tensor) -> Tensor:
    noise = torch.randn(h.shape, dtype=h.dtype)
    return h + noise / noise.norm()


def centred_noise(h: Tensor) -> Tensor:
    noise = torch.randn_like(h)
    return h + noise - noise.mean(0)


def rescaled_dropout(h: Tensor) -> Tensor:
    retained = torch.empty(h.shape, dtype=h.dtype).bernoulli_(0.5)
    return h * retained / retained.mean().clamp(min=0.1)


def ranked(write: Callable[[Tensor, Tensor], Tensor]) -> Body:
    """Return a body that adds each row's rank, an inverse permutation that is written so."""

    def body(h: Tensor) -> Tensor:
        order = h[:, 0].argsort()
        return h + write(order, torch.arange(len(h)))[:, None].to(h.dtype) / 8

    return body


RANKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_copy": lambda to, n: torch.zeros_like(to).index_copy(0, to, n),
    "index_add": lambda to, n: torch.zeros_like(to).index_add(0, to, n),
    "index_put": lambda to, n: torch.zeros_like(to).index_put((to,), n),
    "scatter": lambda to, n: torch.zeros_like(to).scatter(0, to, n),
    "scatter_reduce": lambda to, n: torch.zeros_like(to).scatter_reduce(0, to, n, "sum"),
}


@pytest.mark.product
@pytest.mark.parametrize("gate", [None, 0.0])
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_is_a_place_whichever_kernel_writes_it(name: str, gate: float | None) -> None:
    net, (x, y) = Net(ranked(RANKS[name]), gate).double(), batch()
    with pytest.raises(NotExactError, match="computes with the place of a row"):
        Engine(net, F.cross_entropy, micro_batch=3).backward(x, y)


def written(write: Callable[[Tensor], object]) -> Body:
    """Return a body that reads, at each row's rank, what was zeros before it was written to."""

    def body(h: Tensor) -> Tensor:
        table = torch.zeros(64, 8, dtype=h.dtype)
        write(table)
        return h + table[h[:, 0].argsort().argsort()]

    return body


NUMBERED = torch.arange(64.0)[:, None] / 8
WRITTEN: dict[str, Callable[[Tensor], object]] = {
    "added to": lambda t: t.add_(NUMBERED),
    "set": lambda t: t.__setitem__(slice(None), NUMBERED),
    "a view": lambda t: t.T[3].copy_(NUMBERED[:, 0]),
    "one row": lambda t: t[2].fill_(1),
    "out": lambda t: torch.add(NUMBERED, torch.zeros(8), out=t),
    "in numpy": lambda t: t.numpy().__setitem__(slice(None), NUMBERED.numpy()),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_table_that_was_of_one_number_tells_places(name: str) -> None:
    net, (x, y) = Net(written(WRITTEN[name])).double(), batch()
    with pytest.raises(NotExactError, match="place of a row"):
        Engine(net, F.cross_entropy, micro_batch=3).backward(x, y)


def test_a_table_of_one_number_tells_none() -> None:
    net, (x, y) = Net(written(lambda t: None)).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.exact, str(engine.plan.exact)


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_that_only_leads_back_is_exact(name: str, micro_batch: int) -> None:
    def body(h: Tensor) -> Tensor:
        order = h[:, 0].argsort()
        return h[order].tanh()[RANKS[name](order, torch.arange(len(h)))]

    net, (x, y) = Net(body).double(), batch()

    def run(model: nn.Module) -> Tensor:
        return Engine(model, F.cross_entropy, micro_batch=micro_batch).backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))


def every_other(h: Tensor) -> Tensor:
    h, places = h.clone(), torch.arange(0, len(h), 2)
    h[places] = -h[places]
    return h


def first_half(h: Tensor) -> Tensor:
    half = torch.arange(len(h) // 2)
    return h.index_add(0, half, h.index_select(0, half))


SOME: dict[str, Body] = {
    "every other row": every_other,
    "the first half": first_half,
    "filled": lambda h: h.index_fill(0, torch.arange(0, len(h), 2), 0.0),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 4])
@pytest.mark.parametrize("name", SOME)
def test_rows_that_are_chosen_by_their_place_are_a_doubt(name: str, micro_batch: int) -> None:
    net, (x, y) = Net(SOME[name]).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=micro_batch)
    try:
        engine.backward(x, y)
    except NotExactError:
        return
    assert engine.plan is not None
    assert "chosen by their place in the batch in Net" in str(engine.plan.exact)


def test_nan_is_the_same_number_in_every_call() -> None:
    body = lambda h: torch.nan_to_num(h, nan=float("nan")) * (len(h) > 0)  # noqa: E731
    net, (x, y) = Net(body).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.exact


LONG: dict[str, tuple[Body, str]] = {
    "arange": (numbered, "computes with the place of a row"),
    "arange through a layer": (
        lambda h: h + F.linear(torch.arange(len(h), dtype=h.dtype)[:, None], h.new_ones(8, 1)),
        "computes with the place of a row",
    ),
    "arange in a table": (of_a_table, "computes with the place of a row"),
    "linspace": (
        lambda h: h * torch.linspace(0, 1, len(h), dtype=h.dtype)[:, None],
        "computes with the place of a row",
    ),
    "eye": (
        lambda h: h + torch.eye(len(h), 8, dtype=h.dtype),
        "computes with the place of a row",
    ),
    "a sum of ones": (counted, "computes with the place of a row"),
    "noise divided by its norm": (normalised_noise, "meet in Net, in linalg_vector_norm"),
    "noise less its mean": (centred_noise, "meet in Net, in mean"),
    "dropout scaled by what is kept": (rescaled_dropout, "meet in Net, in mean"),
    "noise of the first row": (
        lambda h: h + torch.randn(h.shape, dtype=h.dtype)[:1],
        "meet|keep their place",
    ),
}


@pytest.mark.parametrize("micro_batch", [1, 3, 5])
@pytest.mark.parametrize("gate", [None, 0.0])
@pytest.mark.parametrize("name", LONG)
def test_numbers_as_long_as_there_are_samples_are_followed(
    name: str, gate: float | None, micro_batch: int
) -> None:
    body, said = LONG[name]
    net, (x, y) = Net(body, gate).double(), batch()
    with pytest.raises(NotExactError, match=said):
        Engine(net, F.cross_entropy, micro_batch=micro_batch).backward(x, y)


def own_entry(h: Tensor) -> Tensor:
    return h + h[torch.arange(len(h)), h.argmax(1)][:, None]


def flat_entries(h: Tensor) -> Tensor:
    places = torch.arange(len(h))[:, None] * h.shape[1] + h.argmax(1, keepdim=True)
    return h + h.reshape(-1)[places]


def pooled_by_owner(h: Tensor) -> Tensor:
    owner = torch.arange(len(h)).repeat_interleave(4)
    return h + torch.zeros_like(h).index_add_(
        0, owner, h.unsqueeze(1).expand(-1, 4, -1).flatten(0, 1)
    )


def marked_rows(h: Tensor) -> Tensor:
    return torch.cat([torch.arange(len(h))[:, None].to(h.dtype), h], 1)[:, 1:]


OWN: dict[str, Body] = {
    "an entry of each row": own_entry,
    "an entry of each row of all": flat_entries,
    "sums by owner": pooled_by_owner,
    "places beside the rows": marked_rows,
    "zeros": lambda h: torch.zeros(len(h), 8, dtype=h.dtype) + h,
    "columns as many as rows": lambda h: h[:, :4] @ torch.eye(4, 8, dtype=h.dtype) + h,
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 5])
@pytest.mark.parametrize("name", OWN)
def test_places_that_lead_to_a_row_of_their_own_are_exact(name: str, micro_batch: int) -> None:
    net, (x, y) = Net(OWN[name]).double(), batch()
    got = state_after(
        net, lambda m: Engine(m, F.cross_entropy, micro_batch=micro_batch).backward(x, y)
    )
    assert_exact(got, undivided(net, F.cross_entropy, x, y))
