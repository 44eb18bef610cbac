"""A loss that requires more arguments gets the items of a tuple of outputs one by one."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, state_of
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine

N = 11


class VAE(nn.Module):
    """Returns a reconstruction, means and logarithms of variances."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + (log_variance / 2).exp()), mean, log_variance


class Views(nn.Module):
    """Returns an embedding of each of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)

    def forward(self, *views: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.encoder(x) for x in views)


def of_vae(
    made: Tensor, mean: Tensor, log_variance: Tensor, x: Tensor, beta: float = 0.5
) -> Tensor:
    return F.mse_loss(made, x) - beta * (1 + log_variance - mean**2 - log_variance.exp()).mean()


class Method:
    def of(self, made: Tensor, mean: Tensor, log_variance: Tensor, x: Tensor) -> Tensor:
        return of_vae(made, mean, log_variance, x)


class Module(nn.Module):
    def forward(self, made: Tensor, mean: Tensor, log_variance: Tensor, x: Tensor) -> Tensor:
        return of_vae(made, mean, log_variance, x)


def wrapped(function: Any) -> Any:
    """A wrapper that passes on everything."""

    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Unpacks(Module):
    """Takes outputs and targets, though its forward takes more."""

    def __call__(self, outputs: Any, x: Tensor) -> Any:
        return super().__call__(*outputs, x)


@wraps(of_vae)
def of_pair(outputs: Any, x: Tensor, beta: float | None = None) -> Tensor:
    """Takes outputs and targets, though what it wraps takes more."""
    assert beta is None
    return of_vae(*outputs, x)


X, (A, B, C) = torch.randn(N, 6).double(), torch.randn(3, N, 6).double()
SIGNS = torch.tensor([1.0, -1.0] * N)[:N].double()

CASES: dict[str, tuple[type[nn.Module], Any, Any, Tensor | None, str]] = {
    "function": (VAE, of_vae, X, X, "streaming"),
    "partial": (VAE, partial(of_vae, beta=0.1), X, X, "streaming"),
    "method": (VAE, Method().of, X, X, "streaming"),
    "module": (VAE, Module(), X, X, "streaming"),
    "wrapper": (VAE, wrapped(of_vae), X, X, "streaming"),
    "torch's module": (Views, nn.TripletMarginLoss(), (A, B, C), None, "streaming"),
    "torch's function": (Views, F.triplet_margin_loss, (A, B, C), None, "streaming"),
    "with a target": (Views, nn.CosineEmbeddingLoss(), (A, B), SIGNS, "streaming"),
    "coupled, without targets": (
        Views,
        lambda a, b: F.cross_entropy(a @ b.T, torch.arange(len(a))),
        (A, B),
        None,
        "two-pass",
    ),
}


def passed(outputs: tuple[Tensor, ...], target: Tensor | None) -> tuple[Tensor, ...]:
    return outputs if target is None else (*outputs, target)


@pytest.mark.parametrize("micro_batch", [1, 4, N])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_call_that_people_write(name: str, micro_batch: int) -> None:
    make, loss, inputs, target, mechanism = CASES[name]
    torch.manual_seed(0)
    model = make().double()

    def run(copied: nn.Module) -> Tensor:
        outputs = copied(*inputs) if isinstance(inputs, tuple) else copied(inputs)
        found: Tensor = loss(*passed(outputs, target))
        found.backward()  # type: ignore[no-untyped-call]
        return found

    want = state_after(model, run)
    engine = Engine(model, loss, micro_batch=micro_batch)
    assert_exact(state_of(model, engine.backward(inputs, target)), want)
    assert engine.plan is not None
    assert engine.plan.mechanism == (mechanism if micro_batch < N else "undivided")


def test_a_loss_of_outputs_and_targets_gets_the_tuple() -> None:
    def loss(outputs: tuple[Tensor, ...], x: Tensor, beta: float = 0.5) -> Tensor:
        return of_vae(*outputs, x, beta=beta)

    torch.manual_seed(0)
    model = VAE().double()
    got = Engine(model, loss, micro_batch=4).backward(X, X)
    torch.testing.assert_close(got, of_vae(*model(X), X).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", [of_pair, Unpacks()], ids=["wrapper", "module"])
def test_what_takes_outputs_and_targets_gets_them(loss: Any) -> None:
    torch.manual_seed(0)
    model = VAE().double()
    got = Engine(model, loss, micro_batch=4).backward(X, X)
    torch.testing.assert_close(got, of_vae(*model(X), X).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "declared",
    [
        anybatch.Loss.per_sample(lambda a, b: (a - b).square().sum(1)),
        anybatch.Loss.ratio(
            lambda a, b, y: ((a - b).square().sum(1) * y).sum(), lambda y: y.abs().sum()
        ),
    ],
    ids=["per sample", "ratio"],
)
def test_declared_losses_are_called_so_too(declared: anybatch.Loss) -> None:
    torch.manual_seed(0)
    model = Views().double()
    targets = None if "sample" in type(declared).__name__.lower() else SIGNS
    losses = [
        Engine(model, declared, micro_batch=size).backward((A, B), targets) for size in (4, N)
    ]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)


def test_the_optimizer_may_be_the_third_argument() -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters())
    Engine(model, F.mse_loss, optimizer, memory="1MiB").backward(
        torch.randn(8, 6), torch.randn(8, 2)
    )
