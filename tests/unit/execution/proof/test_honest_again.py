"""Honest programs that were refused, or not shown for a reason that is not so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError

N, T, WIDE = 7, 6, 8


class Saves(torch.autograd.Function):
    """The exponential, which saves what it returns, as torch's own pages write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = x.exp()
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (found,) = ctx.saved_tensors
        return grads[0] * found


class Cache:
    """What a decoder returns beside its rows."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []


class Body(nn.Module):
    """Tokens [n, T, 5] -> [n, 3], by way of a function of the model and of hidden rows."""

    def __init__(self, fn: Callable[[Body, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDE), nn.Linear(WIDE, 3)
        self.steps = nn.Parameter(torch.randn(1, T, WIDE))
        self.register_buffer("table", torch.zeros(N + 1, T))
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        """[n, T, 5] -> [n, 3]."""
        return self.last(self.fn(self, self.first(x)).mean(1))


def rows_of(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return places [n, 1] and [1, T]."""
    return torch.arange(len(h))[:, None], torch.arange(T)[None]


def packed_mask(_m: Body, h: Tensor) -> Tensor:
    """Tell packed sequences apart by positions that are the same in all rows, as decoders do."""
    places = torch.arange(T)[None].expand(len(h), -1)
    which = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    of_rows, of_steps = rows_of(h)
    same = which[of_rows, of_steps] == which[of_rows, of_steps.flip(1)]
    return h * same[..., None]


def at_a_place(h: Tensor, step: Tensor) -> Tensor:
    found = h.new_zeros(len(h), T)
    found[torch.arange(len(h)), step] = 1.0
    return found


SHOWN: dict[str, Callable[[Body, Tensor], Tensor]] = {
    "a function that saves its output": lambda m, h: Saves.apply(h),  # type: ignore[no-untyped-call]
    "an expanded parameter at rows": lambda m, h: (
        h + m.steps.expand(len(h), T, WIDE)[torch.arange(len(h)), :]
    ),
    "a repeated parameter at rows": lambda m, h: h + m.steps.repeat(len(h), 1, 1)[rows_of(h)],
    "constants at rows": lambda m, h: (
        h * (torch.zeros_like(h[..., 0], dtype=torch.int) == 0)[rows_of(h)][..., None]
    ),
    "joined constants at rows": lambda m, h: (
        h * torch.cat([torch.ones(len(h), 2), torch.zeros(len(h), T - 2)], 1)[rows_of(h)][..., None]
    ),
    "positions at rows": lambda m, h: (
        h * (torch.arange(T).repeat(len(h), 1)[torch.arange(len(h))] / T)[..., None]
    ),
    "sequences that are packed": packed_mask,
    "written at a place of each row": lambda m, h: (
        h * at_a_place(h, h[..., 0].argmax(1))[..., None] + h
    ),
}


def exactly(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Engine:
    full = copy_of(model)
    expected = loss(full(x), y)
    expected.backward()
    engine = Engine(model, loss, micro_batch=3, rng="batch")
    assert_exact(state_of(model, engine.backward(x, y)), state_of(full, expected))
    assert engine.plan is not None
    return engine


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, T, 5).double(), torch.randint(3, (N,))


SAVES = "a function that saves its output"
NO_FRAME = "from torch 2.14 on no frame tells such a function from TorchScript: exact, not shown"
FROM_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.xfail(FROM_2_14, reason=NO_FRAME, strict=True))
        if n == SAVES
        else n
        for n in SHOWN
    ],
)
def test_it_is_shown_and_exact(name: str) -> None:
    torch.manual_seed(1)
    engine = exactly(Body(SHOWN[name]).double(), F.cross_entropy, *batch())
    assert engine.plan is not None
    assert engine.plan.exact, engine.plan.exact


def test_a_table_that_is_zero_so_far_is_refused_at_rows() -> None:
    """Its rows are alike today, and nobody said that they stay so."""
    x, y = batch()
    model = Body(lambda m, h: h * (1 + m.table[: len(h)][torch.arange(len(h))])[..., None])
    with pytest.raises(NotExactError, match="place of a row"):
        Engine(model.double(), F.cross_entropy, micro_batch=3).backward(x, y)


class Decoder(nn.Module):
    """Returns a cache of what it has computed, in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDE), nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """[n, T, 5] -> [n, 3], and the cache."""
        cache, h = Cache(), self.first(x).tanh()
        cache.layers.append({"keys": h})
        return {"scores": self.last(h.mean(1)), "past": cache}


def test_a_cache_among_the_outputs_is_no_state() -> None:
    x, y = batch()
    model = Decoder().double()

    def loss(outputs: dict[str, Any], y: Tensor) -> Tensor:
        return F.cross_entropy(outputs["scores"], y)

    engine = exactly(model, loss, x, y)
    assert engine.plan is not None
    assert engine.plan.exact, engine.plan.exact


class Generator(nn.Module):
    """BatchNorm over noise that forward draws, as many rows as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 5))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, 5] -> [n, 1]."""
        made = self.body(torch.randn(x.size(0), 4, dtype=x.dtype))
        return self.head(made) - self.head(x.mean(1))


def test_batchnorm_over_noise_is_that_of_the_full_batch() -> None:
    """It was said to normalise a part of the batch."""
    torch.manual_seed(1)
    x, y = batch()
    model = Generator().double()
    torch.manual_seed(2)
    full = copy_of(model)
    expected = F.softplus(full(x)).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(2)
    engine = Engine(model, lambda out, _: F.softplus(out).mean(), micro_batch=3, rng="batch")
    assert_exact(state_of(model, engine.backward(x, y)), state_of(full, expected))
    assert engine.plan is not None
    assert engine.plan.exact
