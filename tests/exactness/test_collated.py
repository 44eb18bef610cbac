"""A `LazyBatch` is collated in parts: they are those of the undivided batch, or the plan doubts."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import anybatch.execution.collated
from anybatch import Engine, LazyBatch
from anybatch.devices import RNGState
from anybatch.errors import NotExactError
from anybatch.execution.collated import FEW, doubts_of_collate
from anybatch.execution.proof.inspected import LARGER, MOST

N, LONG = 7, 6
Items = list[tuple[Tensor, Tensor]]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples of `LONG` places, or of fewer."""

    def __init__(self, *, ragged: bool = False) -> None:
        draw = torch.Generator().manual_seed(3)
        lengths = [2 + i % 5 if ragged else LONG for i in range(N)]
        self.x = [torch.randn(n, 4, generator=draw).double() for n in lengths]
        self.y = [torch.randn(n, 2, generator=draw).double() for n in lengths]
        self.loads = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.loads += 1
        return self.x[index], self.y[index]


def stacked(items: Items) -> tuple[Tensor, Tensor]:
    x, y = zip(*items, strict=True)
    return torch.stack(x), torch.stack(y)


def longest(items: Items) -> tuple[Tensor, Tensor]:
    x, y = zip(*items, strict=True)
    return pad_sequence(x, batch_first=True), pad_sequence(y, batch_first=True)


def longest_left(items: Items) -> tuple[Tensor, Tensor]:
    x, y = longest([(a.flip(0), b.flip(0)) for a, b in items])
    return x.flip(1), y.flip(1)


def fixed(items: Items) -> tuple[Tensor, Tensor]:
    x, y = zip(*items, strict=True)
    return tuple(  # type: ignore[return-value]
        torch.stack([F.pad(row, (0, 0, 0, LONG - len(row))) for row in rows]) for rows in (x, y)
    )


def emptied(items: Items) -> tuple[Tensor, Tensor]:
    """Takes its list apart, and scales each row by itself."""
    found = []
    while items:
        x, y = items.pop(0)
        found.append((x.div_(x.abs().max()), y))
    return stacked(found)


def spread(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stacked(items)
    return x / x.std(), y


def mixed(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stacked(items)
    return 0.7 * x + 0.3 * x.flip(0), y


def counted(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stacked(items)
    return x / len(items), y


def ranked(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stacked(items)
    return x, torch.stack([y.sum((1, 2)).argsort().double()] * 2, 1)[:, None].expand(y.shape)


def noisy(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stacked(items)
    return x + torch.randn_like(x), y


def picked(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stacked(items)
    return x[random.sample(range(len(x)), len(x))], y


OWN = torch.Generator().manual_seed(0)


def noisy_by_its_own(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stacked(items)
    return x + torch.randn(x.shape, generator=OWN), y


class OfClass:
    """Has a method of a class, whose attributes are no dict."""

    @classmethod
    def collate(cls, items: Items) -> tuple[Tensor, Tensor]:
        return stacked(items)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def backward(collate: Any, *, ragged: bool, workers: int = 0) -> tuple[Engine, dict[str, Tensor]]:
    own = model()
    engine = Engine(own, F.mse_loss, micro_batch=2)
    batch = LazyBatch(Rows(ragged=ragged), collate_fn=collate, workers=workers)
    return engine, state_of(own, engine.backward(batch))


def state_after_all(collate: Callable[[Items], Any], *, ragged: bool) -> dict[str, Tensor]:
    truth = copy_of(model())
    x, y = collate([Rows(ragged=ragged)[i] for i in range(N)])
    loss = F.mse_loss(truth(x), y)
    loss.backward()
    return state_of(truth, loss)


@pytest.mark.parametrize(
    ("collate", "ragged", "workers"),
    [
        *((stacked, False, 0), (fixed, True, 0), (emptied, False, 0), (fixed, True, 1)),
        (OfClass.collate, False, 0),
    ],
)
def test_what_collates_each_item_by_itself_is_exact(
    collate: Any, ragged: bool, workers: int
) -> None:
    engine, got = backward(collate, ragged=ragged, workers=workers)
    assert_exact(got, state_after_all(collate, ragged=ragged))
    assert engine.plan is not None
    assert engine.plan.exact


@pytest.mark.parametrize("collate", [longest, longest_left])
def test_what_pads_to_the_longest_of_a_micro_batch_is_not_shown(collate: Any) -> None:
    engine, _ = backward(collate, ragged=True)
    assert engine.plan is not None
    assert engine.plan.exact.state == "not shown"
    assert "let collate_fn pad to a fixed length" in engine.plan.exact.by


def test_a_later_step_whose_micro_batches_are_ragged_is_not_shown() -> None:
    engine = Engine(model(), F.mse_loss, micro_batch=2)
    for ragged, shown in ((False, True), (True, False)):
        engine.backward(LazyBatch(Rows(ragged=ragged), collate_fn=longest))
        assert engine.plan is not None
        assert bool(engine.plan.exact) is shown


@pytest.mark.product
@pytest.mark.parametrize("collate", [spread, mixed, counted, ranked])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_couples_items_is_refused(collate: Any, workers: int) -> None:
    own, batch = model(), LazyBatch(Rows(), collate_fn=collate, workers=workers)
    engine = Engine(own, F.mse_loss, micro_batch=2)
    with pytest.raises(NotExactError, match="samples must not meet in collate_fn"):
        engine.backward(batch)
    assert all(p.grad is None for p in own.parameters())
    Engine(own, F.mse_loss, micro_batch=N).backward(batch)  # which collates all at once


@pytest.mark.parametrize("collate", [noisy, picked, noisy_by_its_own])
def test_what_draws_is_not_shown(collate: Any) -> None:
    engine, _ = backward(collate, ragged=False)
    assert engine.plan is not None
    assert engine.plan.exact.state == "not shown"
    assert "collate_fn makes other rows of the same items each time" in engine.plan.exact.by


class Counting:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, items: Items) -> tuple[Tensor, Tensor]:
        self.calls += 1
        random.random()
        return stacked(items)


def test_a_comparison_leaves_rng_and_attributes_as_they_were_and_comes_once() -> None:
    collate, rows = Counting(), Rows()
    rng_state = RNGState.now()
    doubts_of_collate(LazyBatch(rows, collate_fn=collate))
    assert RNGState.now().same_as(rng_state)
    assert collate.calls == 0
    assert rows.loads == 4
    engine = Engine(model(), F.mse_loss, micro_batch=2)
    loads = []
    for _ in range(3):
        rows.loads = 0
        engine.backward(LazyBatch(rows, collate_fn=stacked))
        loads.append(rows.loads)
    assert loads[1:] == [N, N]


def later(items: Items) -> tuple[Tensor, Tensor]:
    return (spread if SWITCHED[0] else stacked)(items)


SWITCHED = [False]


def above(items: Items) -> tuple[Tensor, Tensor]:
    return (spread if len(items) > FEW else stacked)(items)


def rolled(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stacked(items)
    return 0.7 * x + 0.3 * x.roll(FEW, 0), y


def of_one(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stacked(items)
    return x * (2 if len(items) == 1 else 1), y


class Scaling:
    """Scales all rows by an attribute, or by how often it was called."""

    def __init__(self, by: float = 1.0, *, late: bool = False, spreads: bool = False) -> None:
        self.by, self.late, self.spreads, self.calls = by, late, spreads, 0

    def __call__(self, items: Items) -> tuple[Tensor, Tensor]:
        self.calls += self.late
        x, y = (spread if self.spreads else stacked)(items)
        return x * (self.by if self.calls < 3 else 2.0), y


class Installed(Scaling):
    """The same in an installed package."""

    __module__ = "torch.utils.data"


@pytest.mark.product
@pytest.mark.parametrize(
    ("collate", "micro_batch"),
    [(above, 2), (above, 5), (rolled, 2), (rolled, 5), (of_one, 1), (of_one, 3)],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_couples_items_only_at_the_sizes_of_the_step_is_refused(
    collate: Any, micro_batch: int, workers: int
) -> None:
    engine = Engine(model(), F.mse_loss, micro_batch=micro_batch)
    with pytest.raises(NotExactError, match="samples must not meet in collate_fn"):
        engine.backward(LazyBatch(Rows(), collate_fn=collate, workers=workers))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (None, spread),
        (stacked, spread),
        (stacked, partial(spread)),
        (lambda items: stacked(items), spread),
        (later, later),
        (Scaling(), Scaling(spreads=True)),
        (Installed(), Installed(spreads=True)),
    ],
)
def test_another_function_in_a_later_step_is_refused(first: Any, second: Any) -> None:
    engine = Engine(model(), F.mse_loss, micro_batch=2)
    for _ in range(2):
        engine.backward(LazyBatch(Rows(), collate_fn=first))
    assert engine.plan is not None
    assert engine.plan.exact
    SWITCHED[0] = True
    try:
        with pytest.raises(NotExactError, match="samples must not meet in collate_fn"):
            engine.backward(LazyBatch(Rows(), collate_fn=second))
    finally:
        SWITCHED[0] = False


def test_a_new_size_is_compared() -> None:
    engine = Engine(model(), F.mse_loss, micro_batch=2)
    engine.backward(LazyBatch(Rows(), range(FEW), collate_fn=above))
    with pytest.raises(NotExactError, match="samples must not meet in collate_fn"):
        engine.backward(LazyBatch(Rows(), collate_fn=above))


def test_a_function_that_counts_its_calls_is_not_shown() -> None:
    engine, _ = backward(Scaling(late=True), ragged=False)
    assert engine.plan is not None
    assert engine.plan.exact.state == "not shown"
    assert "each call of collate_fn moves a number" in engine.plan.exact.by


def test_a_batch_that_is_too_large_to_be_collated_at_once_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(anybatch.execution.collated, "COMPARED_BYTES", 2000)
    engine, _ = backward(stacked, ragged=False)
    assert engine.plan is not None
    assert engine.plan.exact.state == "not shown"
    assert "has another number of items than collate_fn was compared on" in engine.plan.exact.by


def test_functions_of_one_code_are_called_once() -> None:
    engine, rows = Engine(model(), F.mse_loss, micro_batch=2), Rows()
    loads = []
    for by in (1.0, 1.0, 2.0, 1.0):
        rows.loads = 0
        engine.backward(LazyBatch(rows, collate_fn=Scaling(by)))
        engine.backward(LazyBatch(rows, collate_fn=lambda items: stacked(items)))
        loads.append(rows.loads)
    loads_of_step = loads[2] - 2 * N
    assert [n > 2 * N for n in loads] == [True, False, True, False]
    assert loads_of_step == FEW + N


def test_sizes_and_functions_without_end_are_not_all_called() -> None:
    """A size that is new in each step had each item loaded twice; a function was kept for ever."""
    engine, rows = Engine(model(), F.mse_loss, micro_batch=2), Rows()
    for size in range(4 + LARGER, 4, -1):
        engine.backward(LazyBatch(rows, [at % N for at in range(size)], collate_fn=stacked))
    rows.loads = 0
    engine.backward(LazyBatch(rows, range(3), collate_fn=stacked))
    assert rows.loads == 3
    for by in range(MOST):
        engine.backward(LazyBatch(rows, collate_fn=Scaling(by)))
    assert engine.plan is not None
    assert engine.plan.exact.state == "not shown"
    assert "collate_fn was replaced" in engine.plan.exact.by


def test_entries_of_samples_are_compared_one_by_one() -> None:
    def boxes(items: Items) -> Any:
        x, y = zip(*items, strict=True)
        return torch.stack(x), [{"box": one.tolist(), "name": "a"} for one in y]

    def of_all(items: Items) -> Any:
        x, y = boxes(items)
        return x, [{"box": one["box"], "name": str(len(y))} for one in y]

    assert doubts_of_collate(LazyBatch(Rows(), collate_fn=boxes)) == ()
    with pytest.raises(NotExactError, match="samples must not meet in collate_fn"):
        doubts_of_collate(LazyBatch(Rows(), collate_fn=of_all))


def test_rows_that_are_rounded_otherwise_are_a_doubt() -> None:
    def scaled(items: Items) -> Any:
        x, y = stacked(items)
        return x * (1 + 1e-12 * len(items)), y

    assert len(doubts_of_collate(LazyBatch(Rows(), collate_fn=scaled))) == 1


@pytest.mark.parametrize("wrap", [int, torch.tensor])
def test_a_number_that_counts_items_is_a_doubt(wrap: Any) -> None:
    """All micro-batches may have one, and the undivided batch another."""

    def numbered(items: Items) -> Any:
        x, y = stacked(items)
        return x, {"y": y, "n": wrap(len(items))}

    (doubt,) = doubts_of_collate(LazyBatch(Rows(), collate_fn=numbered))
    assert doubt == "collate_fn gives another number with more items than with fewer"
