"""Guide: with rng="batch" the gradient is that of the full batch with dropout, too.

Every row is trained for two optimizer steps in float64, undivided by torch alone and in
micro-batches, from the same seeds; loss, gradients and buffers are compared, and where the
generators of torch, Python and numpy stand afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact, state_after
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from anybatch import Engine
from anybatch.devices import RNGState

N = 22
WIDE = 8
SPLITS = [1, 3, WIDE, 11]
"""Single rows, two ragged splits (one of them as many rows as there are features), an even one."""


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Noisy(nn.Module):
    """Two layers, and between them whatever draws."""

    def __init__(self, noise: Any, head: Any = None, width: int = WIDE) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, width)
        self.noise = noise
        self.head = nn.Linear(width, 3) if head is None else head

    def forward(self, x: Tensor) -> Tensor:
        """[n, ..., 8] -> [n, 3]."""
        x = self.noise(self.first(x).tanh())
        out = self.head(x)
        return out.flatten(1, -2).mean(1) if out.dim() > 2 else out


def vectors() -> Tensor:
    return torch.randn(N, WIDE)


def sequences(length: int = 5) -> Callable[[], Tensor]:
    return lambda: torch.randn(N, length, WIDE)


class Second(nn.Module):
    """Calls a part with the samples second."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, C] -> [n, T, C]."""
        out = self.part(x.transpose(0, 1))
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


class First(nn.Module):
    """The first of what a part returns."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)[0]


class Attention(nn.Module):
    """nn.MultiheadAttention of a sequence with itself."""

    def __init__(self, *, weights: bool, batch_first: bool) -> None:
        super().__init__()
        self.part = nn.MultiheadAttention(WIDE, 2, dropout=0.3, batch_first=batch_first)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, 8] -> [n, T, 8]."""
        x = x if self.part.batch_first else x.transpose(0, 1)
        out = self.part(x, x, x, need_weights=self.weights)[0]
        return out if self.part.batch_first else out.transpose(0, 1)


class Views(nn.Module):
    """Two views of every sample go through a part as one batch, one view after the other."""

    def __init__(self, part: nn.Module, *, zero: bool = False) -> None:
        super().__init__()
        self.part = part
        self.scale = nn.Parameter(torch.zeros(()) if zero else torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] -> [n, ...]."""
        one, other = self.part(torch.cat([x, x.flip(-1)])).chunk(2)
        return x + self.scale * one * other.tanh()


class Flat(nn.Module):
    """Time and samples go through a part as one dimension."""

    def __init__(self, part: nn.Module, *, time_first: bool) -> None:
        super().__init__()
        self.part, self.time_first = part, time_first

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, C] -> [n, T, C]."""
        x = x.transpose(0, 1) if self.time_first else x
        x = self.part(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x.transpose(0, 1) if self.time_first else x


class Skips(nn.Module):
    """Stochastic depth: layers with dropout, left out by a coin for the full batch."""

    def __init__(self, coin: Callable[[], float]) -> None:
        super().__init__()
        self.coin = coin
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(0.3), nn.GELU()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.coin() < 0.6:
                x = x + layer(x)
        return x


class Again(nn.Module):
    """A part that is computed again in backward, with dropout before, in and behind it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(0.4), nn.Tanh(), nn.Dropout())
        self.other = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(0.2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1)
        x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        x = checkpoint(self.other, x, use_reentrant=self.reentrant)
        return F.dropout(x, 0.1)


class Slope(nn.Module):
    """Takes a gradient inside of forward, by way of dropout."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.dropout(inner.sin(), 0.3).sum(), inner)
        return x * slope


class Tokens(nn.Module):
    """Tokens as an image: channels come last in memory, but for one sample's convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDE, WIDE, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4, 8] -> [n, 4, 8]."""
        image = self.conv(x.transpose(1, 2).reshape(len(x), WIDE, 2, 2))
        return F.dropout(image, 0.3).flatten(2).transpose(1, 2)


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(0.7) / 0.7


def drop_path_by_floor(x: Tensor) -> Tensor:
    return x * (0.7 + torch.rand(x.shape[0], *[1] * (x.dim() - 1))).floor()


def drop_path_by_comparison(x: Tensor) -> Tensor:
    return torch.where(torch.rand(len(x)) < 0.3, 0.0, 1.0)[:, None] * x


def two_rows_by_comparison(x: Tensor) -> Tensor:
    """The draw has a dimension for the samples alone; one of [2 n] is refused."""
    both = torch.stack([x, -x], 1).flatten(0, 1)
    retained = torch.rand(len(x), 2).flatten() < 0.9
    one, other = torch.where(retained[:, None], both, 0.0).unflatten(0, (len(x), 2)).unbind(1)
    return one - 0.3 * other.sin()


def square_noise(x: Tensor) -> Tensor:
    """Draws a constant [8, 8], which looks like 8 samples, and one of every sample."""
    return x @ torch.randn(WIDE, WIDE) + torch.randn(WIDE, len(x)).T


def gaps(x: Tensor) -> Tensor:
    noise = torch.zeros(len(x), 2 * WIDE)
    noise[:, ::2].normal_()
    return x + noise[:, ::2]


def categorical(x: Tensor) -> Tensor:
    chosen = torch.distributions.Categorical(logits=x).sample((2,))
    return x * F.one_hot(chosen, WIDE).sum(0)


def weights(x: Tensor) -> Tensor:
    return x * torch.multinomial(x.detach().exp(), 3, replacement=True).sum(1, keepdim=True)


def integers(x: Tensor) -> Tensor:
    x = x + torch.randint(5, (len(x), 1)) + torch.randint(-3, 4, x.shape)
    return x + torch.randint_like(x, 2) + torch.empty_like(x).random_(3)


def normals(x: Tensor) -> Tensor:
    x = x + torch.normal(0.0, 0.5, x.shape) + torch.normal(x.detach(), 0.1)
    x = x + torch.normal(x.detach(), x.detach().exp()) + torch.normal(0.0, x.detach().exp())
    return x + torch.distributions.Normal(x, 1.0).rsample()


def written(x: Tensor) -> Tensor:
    x = x + torch.empty_like(x).uniform_(-1, 1) + torch.empty(x.shape).exponential_()
    x = x + torch.empty_like(x).geometric_(0.5) + torch.empty_like(x).log_normal_(0, 0.1)
    return x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()) + torch.randn(WIDE)


def shuffled_memory(x: Tensor) -> Tensor:
    """[n, T, C], in memory [T, C, n]."""
    return F.dropout(x.permute(1, 2, 0).contiguous().permute(2, 0, 1), 0.4)


NOISE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dropout": (lambda: nn.Dropout(0.3), vectors),
    "dropout in place": (
        lambda: Fn(lambda x: F.dropout(x + 1, 0.3, inplace=True)),
        vectors,
    ),
    "dropout of sequences": (lambda: nn.Dropout(0.3), sequences()),
    "as many steps as rows": (lambda: Second(nn.Dropout(0.3)), sequences(WIDE)),
    "alpha dropout": (lambda: nn.AlphaDropout(0.3), vectors),
    "dropout 1d": (lambda: nn.Dropout1d(0.3), sequences()),
    "dropout 2d": (
        lambda: nn.Sequential(nn.Unflatten(2, (2, 4)), nn.Dropout2d(0.3), nn.Flatten(2)),
        sequences(),
    ),
    "dropout 3d": (
        lambda: nn.Sequential(nn.Unflatten(2, (2, 2, 2)), nn.Dropout3d(0.3), nn.Flatten(2)),
        sequences(),
    ),
    "feature alpha dropout": (lambda: nn.FeatureAlphaDropout(0.3), sequences()),
    "native dropout": (lambda: Fn(lambda x: torch.native_dropout(x, 0.3, True)[0]), sequences()),
    "drop path": (lambda: Fn(drop_path), sequences()),
    "drop path by floor": (lambda: Fn(drop_path_by_floor), sequences()),
    "drop path by comparison": (lambda: Fn(drop_path_by_comparison), vectors),
    "bernoulli": (lambda: Fn(lambda x: x * torch.bernoulli(x.detach().sigmoid())), vectors),
    "bernoulli p": (lambda: Fn(lambda x: x * torch.bernoulli(x.detach(), 0.3)), vectors),
    "rand, randn": (
        lambda: Fn(lambda x: x + torch.rand(len(x), 1) + torch.randn(x.shape)),
        vectors,
    ),
    "rand_like, randn_like": (
        lambda: Fn(lambda x: x + torch.rand_like(x) + torch.randn_like(x.mT.contiguous()).mT),
        sequences(),
    ),
    "integers": (lambda: Fn(integers), vectors),
    "normals": (lambda: Fn(normals), vectors),
    "written": (lambda: Fn(written), vectors),
    "multinomial": (lambda: Fn(weights), vectors),
    "categorical": (lambda: Fn(categorical), vectors),
    "gumbel": (lambda: Fn(lambda x: x * F.gumbel_softmax(x, 0.7)), sequences()),
    "a constant of the size of a micro-batch": (lambda: Fn(square_noise), vectors),
    "memory in another order": (lambda: Fn(shuffled_memory), sequences()),
    "memory with gaps": (lambda: Fn(gaps), vectors),
    "tokens as images": (lambda: Tokens(), sequences(4)),
    "attention": (
        lambda: Fn(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)),
        sequences(),
    ),
    "heads": (lambda: Attention(weights=True, batch_first=True), sequences()),
    "heads, samples second": (lambda: Attention(weights=True, batch_first=False), sequences()),
    "heads without weights": (lambda: Attention(weights=False, batch_first=True), sequences()),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(WIDE, 2, 16, dropout=0.2, batch_first=True),
        sequences(),
    ),
    "transformer layer, samples second": (
        lambda: Second(nn.TransformerEncoderLayer(WIDE, 2, 16, dropout=0.2)),
        sequences(),
    ),
    "LSTM": (lambda: First(nn.LSTM(WIDE, WIDE, 2, dropout=0.3, batch_first=True)), sequences()),
    "GRU, samples second": (lambda: Second(nn.GRU(WIDE, WIDE, 3, dropout=0.3)), sequences()),
    "two views": (lambda: Views(nn.Dropout(0.3)), vectors),
    "two views, weighed by zero": (lambda: Views(nn.Dropout(0.3), zero=True), vectors),
    "two views of heads": (
        lambda: Views(Attention(weights=True, batch_first=True)),
        sequences(),
    ),
    "two rows a sample by comparison": (lambda: Fn(two_rows_by_comparison), vectors),
    "flat": (lambda: Flat(nn.Dropout(0.3), time_first=False), sequences()),
    "flat, time first": (lambda: Flat(nn.Dropout(0.3), time_first=True), sequences()),
    "coin of Python": (lambda: Skips(random.random), vectors),
    "coin of numpy": (lambda: Skips(lambda: float(np.random.rand())), vectors),
    "coin of torch": (lambda: Skips(lambda: float(torch.rand(()))), vectors),
    "checkpoint": (lambda: Again(reentrant=False), vectors),
    "reentrant checkpoint": (lambda: Again(reentrant=True), vectors),
    "gradient in forward": (lambda: Slope(), vectors),
    "the same dropout everywhere": (lambda: shared_dropout(), sequences(WIDE)),
}


class SharedDropout(nn.Module):
    """One module, called for tensors that hold the samples in different places."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.drop(x) + self.drop(x.transpose(0, 1)).transpose(0, 1)
        return x + self.drop(x.new_ones(WIDE, WIDE))


def shared_dropout() -> nn.Module:
    return SharedDropout()


def coupled(out: Tensor, y: Tensor) -> Tensor:
    p, t = out.softmax(1), F.one_hot(y, 3)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def seeded() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def trained(step: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return what trains a copy of a model for two steps; and the dice after each of them."""

    def run(model: nn.Module, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], list[RNGState]]:
        rng_states = []
        seeded()

        def both(copied: nn.Module) -> Tensor:
            optimizer = torch.optim.SGD(copied.parameters(), lr=0.05, momentum=0.9)
            step(copied, x, y)
            rng_states.append(RNGState.now())
            optimizer.step()
            optimizer.zero_grad()
            loss = step(copied, x[3:], y[3:])
            rng_states.append(RNGState.now())
            return loss

        return state_after(model, both), rng_states

    return run


def by_torch(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Any:
    def step(copied: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        full: Tensor = loss(copied(x), y)
        full.backward()
        return full

    return trained(step)(model, x, y)


def in_parts(
    model: nn.Module,
    loss: Any,
    x: Tensor,
    y: Tensor,
    micro_batch: int,
    mechanism: str,
    **options: Any,
) -> Any:
    engines: dict[int, Engine] = {}

    def step(copied: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = partial_engine(copied, loss, micro_batch, options)
        engine = engines.setdefault(id(copied), made)
        found = engine.backward(x, y)
        assert engine.plan is not None
        assert engine.plan.mechanism == mechanism
        assert engine.plan.exact.state != "inexact"
        return found

    return trained(step)(model, x, y)


def partial_engine(
    model: nn.Module, loss: Any, micro_batch: int, options: dict[str, Any]
) -> Engine:
    return Engine(model, loss, micro_batch=micro_batch, rng="batch", **options)


def assert_same(got: Any, want: Any) -> None:
    assert_exact(got[0], want[0])
    assert all(a.same_as(b) for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.large(few=5, part=40)
@pytest.mark.parametrize("micro_batch", SPLITS)
@pytest.mark.parametrize("row", NOISE)
def test_draws_are_those_of_the_whole_batch(row: str, micro_batch: int) -> None:
    make, inputs = NOISE[row]
    model, x, y = Noisy(make()), inputs(), torch.randint(3, (N,))
    want = by_torch(model, F.cross_entropy, x, y)
    assert_same(in_parts(model, F.cross_entropy, x, y, micro_batch, "streaming"), want)


@pytest.mark.large
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("micro_batch", [3, WIDE])
@pytest.mark.parametrize("row", NOISE)
def test_draws_are_those_of_the_whole_batch_where_the_loss_needs_two_passes(
    row: str, micro_batch: int
) -> None:
    make, inputs = NOISE[row]
    model, x, y = Noisy(make()), inputs(), torch.randint(3, (N,))
    want = by_torch(model, coupled, x, y)
    assert_same(in_parts(model, coupled, x, y, micro_batch, "two-pass"), want)


class Normed(Noisy):
    """The same, normalised before and after."""

    def __init__(self, noise: Any) -> None:
        super().__init__(noise)
        self.one, self.two = nn.BatchNorm1d(WIDE), nn.BatchNorm1d(WIDE)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ..., 8] -> [n, 3]."""
        x = self.first(x)
        x = self.noise(self.one(x.flatten(0, -2)).unflatten(0, x.shape[:-1]))
        x = self.two(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        out = self.head(F.dropout(x.tanh(), 0.1))
        return out.flatten(1, -2).mean(1) if out.dim() > 2 else out


@pytest.mark.large(few=5, part=40)
@pytest.mark.parametrize(
    ("loss", "micro_batch"),
    [(F.cross_entropy, 3), (F.cross_entropy, WIDE), (coupled, 1), (coupled, 11)],
    ids=["one pass-3", "one pass-8", "coupled-1", "coupled-11"],
)
@pytest.mark.parametrize("row", NOISE)
def test_draws_are_those_of_the_whole_batch_in_lanes(row: str, loss: Any, micro_batch: int) -> None:
    make, inputs = NOISE[row]
    model, x, y = Normed(make()), inputs(), torch.randint(3, (N,))
    want = by_torch(model, loss, x, y)
    assert_same(in_parts(model, loss, x, y, micro_batch, "lockstep"), want)


def test_a_gradient_that_forward_takes_of_what_it_draws_is_that_of_the_whole_batch() -> None:
    """Laws are learnt with gradients where forward fails without."""

    def slope(x: Tensor) -> Tensor:
        inner = (x * torch.rand(len(x), 1, dtype=x.dtype)).detach().requires_grad_()
        (found,) = torch.autograd.grad(inner.sin().sum(), inner)
        return x * found

    model = nn.Sequential(nn.Linear(WIDE, WIDE), Fn(slope)).double()
    x = torch.randn(9, WIDE, dtype=torch.float64)
    want = by_torch(model, F.mse_loss, x, x)
    assert_same(in_parts(model, F.mse_loss, x, x, 4, "streaming"), want)
