"""Packed rows that are padded to the longest of those that come along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from anybatch import Engine
from anybatch.errors import NotExactError
from anybatch.execution.proof.rows import matters

N, T, WIDE = 8, 9, 8
Pool = Callable[["Sentences", Tensor, Tensor, Tensor], Tensor]


class Sentences(nn.Module):
    """An LSTM of packed rows, and what `pool` makes of its padded steps [n, T, 16] and lengths."""

    def __init__(self, pool: Pool, *, batch_first: bool = True, **padding: Any) -> None:
        super().__init__()
        self.embed, self.head, self.score = (
            nn.Embedding(30, WIDE),
            nn.Linear(16, 4),
            nn.Linear(16, 1),
        )
        self.rnn = nn.LSTM(WIDE, WIDE, batch_first=batch_first, bidirectional=True)
        self.pool, self.padding, self.batch_first = pool, padding, batch_first

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[n, T] and [n] -> [n, 4]."""
        rows = self.embed(x) if self.batch_first else self.embed(x).transpose(0, 1)
        packed = pack_padded_sequence(
            rows, lengths, batch_first=self.batch_first, enforce_sorted=False
        )
        steps, found = pad_packed_sequence(
            self.rnn(packed)[0], batch_first=self.batch_first, **self.padding
        )
        steps = steps if self.batch_first else steps.transpose(0, 1)
        return self.head(self.pool(self, steps, lengths, found))


def attended(m: Sentences, steps: Tensor, lengths: Tensor, _found: Tensor) -> Tensor:
    there = torch.arange(steps.shape[1])[None] < lengths[:, None]
    share = m.score(steps)[..., 0].masked_fill(~there, float("-inf")).softmax(1)
    return (share[..., None] * steps).sum(1)


def mean(_m: Sentences, steps: Tensor, _lengths: Tensor, _found: Tensor) -> Tensor:
    return steps.mean(1)


TO_THE_LAST: dict[str, tuple[Pool, dict[str, Any]]] = {
    "gathered": (
        lambda m, h, n, _: h.gather(1, (n - 1)[:, None, None].expand(-1, 1, 16)).squeeze(1),
        {},
    ),
    "mean, total_length": (mean, {"total_length": T}),
    "sum by the lengths that came back": (
        lambda m, h, _, found: h.sum(1) / found[:, None],
        {"total_length": T},
    ),
    "attention, total_length": (attended, {"total_length": T}),
}
MAY_DEPEND: dict[str, tuple[Pool, dict[str, Any]]] = {
    "sum": (lambda m, h, n, _: h.sum(1) / n[:, None], {}),
    "attention": (attended, {}),
    "largest": (lambda m, h, n, _: h.amax(1), {"padding_value": -1e9}),
}
DEPENDS: dict[str, Pool] = {
    "mean": mean,
    "largest": lambda m, h, n, _: h.amax(1),
    "last step": lambda m, h, n, _: h[:, -1],
    "mean but for NaN": lambda m, h, n, _: h.nanmean(1),
    "median but for NaN": lambda m, h, n, _: h.nanmedian(1)[0],
    "convolution": lambda m, h, n, _: F.avg_pool1d(h.mT, 3, 1, 1).mean(2),
    "softmax": lambda m, h, n, _: (m.score(h).softmax(1) * h).sum(1),
}


def rows(*, equal: bool = False) -> tuple[tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    lengths = torch.full((N,), T) if equal else torch.randint(1, T, (N,))
    return (torch.randint(30, (N, T)), lengths), torch.randint(4, (N,))


def exactly(model: Sentences, inputs: Any, y: Tensor) -> Engine:
    full = copy_of(model)
    loss = F.cross_entropy(full(*inputs), y)
    loss.backward()  # type: ignore[no-untyped-call]
    engine = Engine(model, F.cross_entropy, micro_batch=3)
    assert_exact(state_of(model, engine.backward(inputs, y)), state_of(full, loss))
    return engine


@pytest.mark.product
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", TO_THE_LAST)
def test_what_does_not_depend_on_the_longest_row_is_shown(name: str, batch_first: bool) -> None:
    """What came after the padded steps was said to keep state of the call before."""
    pool, padding = TO_THE_LAST[name]
    model = Sentences(pool, batch_first=batch_first, **padding).double()
    engine = exactly(model, *rows())
    assert engine.plan is not None
    assert name == "attention, total_length" or engine.plan.exact


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", MAY_DEPEND)
def test_what_reads_padding_is_exact_and_not_shown(name: str, batch_first: bool) -> None:
    pool, padding = MAY_DEPEND[name]
    model = Sentences(pool, batch_first=batch_first, **padding).double()
    engine = exactly(model, *rows())
    assert engine.plan is not None
    assert "padded to the longest" in str(engine.plan.exact)


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("name", DEPENDS)
def test_what_depends_on_the_longest_row_is_refused(name: str, micro_batch: int) -> None:
    """It was shown, and wrong by up to 2.6."""
    inputs, y = rows()
    model = Sentences(DEPENDS[name]).double()
    with pytest.raises(NotExactError, match=r"total_length=x.shape\[1\]"):
        Engine(model, F.cross_entropy, micro_batch=micro_batch).backward(inputs, y)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", DEPENDS)
def test_rows_of_one_length_are_exact_and_not_shown(name: str) -> None:
    engine = exactly(Sentences(DEPENDS[name]).double(), *rows(equal=True))
    assert engine.plan is not None
    assert not engine.plan.exact


class Normalised(Sentences):
    """BatchNorm over the padded steps."""

    def __init__(self) -> None:
        super().__init__(lambda m, h, n, _: h)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[n, T] and [n] -> [n, 4]."""
        rows = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        steps = pad_packed_sequence(self.rnn(rows)[0], batch_first=True)[0]
        last = (lengths - 1)[:, None, None].expand(-1, 1, 16)
        return self.head(self.norm(steps.mT).mT.gather(1, last).squeeze(1))


def test_batchnorm_over_padding_is_not_shown() -> None:
    """What it normalises is as long as the longest row; it was shown, and wrong."""
    inputs, y = rows()
    engine = Engine(Normalised().double(), F.cross_entropy, micro_batch=3)
    engine.backward(inputs, y)
    assert engine.plan is not None
    assert not engine.plan.exact


class Tokens(Sentences):
    """Returns its loss of each step."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[n, T] and [n] -> the loss."""
        rows = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        steps = pad_packed_sequence(self.rnn(rows)[0], batch_first=True, **self.padding)[0]
        there = (torch.arange(steps.shape[1])[None] < lengths[:, None]).double()
        each = F.cross_entropy(self.head(steps).mT, x % 4, reduction="none")
        return (each * there).sum() / there.sum()


def test_a_row_as_long_as_all_are_padded_to_is_no_longest_row() -> None:
    """Where a mode had been told before, the length that was given was not seen: it crashed."""
    (x, lengths), _ = rows()
    lengths[0] = lengths[5] = T
    model = Tokens(mean, total_length=T).double()
    full = copy_of(model)
    loss = full(x, lengths)
    loss.backward()
    engine = Engine(model, micro_batch=3)
    assert_exact(state_of(model, engine.backward((x, lengths))), state_of(full, loss))
    assert engine.plan is not None
    assert engine.plan.exact


def test_a_loss_of_as_many_steps_as_the_longest_row_is_refused() -> None:
    """It fails where rows are one step longer."""
    (x, lengths), _ = rows(equal=True)
    lengths[1] = 2
    with pytest.raises(NotExactError, match=r"total_length=x.shape\[1\]"):
        Engine(Tokens(mean).double(), micro_batch=4).backward((x, lengths))


OF_PADDED: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor], bool | None]] = {
    "a sum in another order": (torch.float32, lambda h: h.sum(1), None),
    "a little of a mean": (torch.float64, lambda h: h.sum(1) + 1e-2 * h.mean(1), True),
    "a mean in half precision": (torch.bfloat16, lambda h: h.mean(1), True),
}


@pytest.mark.parametrize("name", OF_PADDED)
def test_one_step_more_matters_where_it_is_no_rounding(name: str) -> None:
    dtype, pool, want = OF_PADDED[name]
    steps = 63  # kernels add 64 numbers in another order
    x = torch.randn(3, steps, 2) + 300 * torch.tensor([1.0, -1.0]).repeat(32)[:steps, None]
    packed = pack_padded_sequence(x.to(dtype), torch.full((3,), steps), batch_first=True)

    def call() -> Tensor:
        padded = pad_packed_sequence(packed, batch_first=True)[0]
        return pool(padded.mT.contiguous().mT)

    assert matters(call, call(), draws=False) is want
