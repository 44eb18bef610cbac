"""What a coupled function computes with beside its arguments: constants, and no samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from torch import Tensor, nn

import anybatch
from anybatch import Engine
from anybatch.errors import LossError

N = 12
Body = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A network that returns what is coupled, by a function that reads more than its arguments."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(6, 3), body
        self.weights, self.stored = torch.tensor([1.0, 2.0, 0.5]).double(), torch.zeros(3).double()
        self.register_buffer("centre", torch.tensor([0.1, 0.2, 0.3]).double())
        self.options = SimpleNamespace(power=2, count=0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 6], [n, 3] -> the loss."""
        return self.body(self, self.head(x), y)


def distance(o: Tensor, other: Tensor | float) -> Tensor:
    return (o - other).square().mean().sqrt()


def by_length(_: Net, o: Tensor, y: Tensor) -> Tensor:
    n = len(o)
    return anybatch.coupled(lambda o, y: (o - y).square().sum().sqrt() / n)(o, y)


def by_default(_: Net, o: Tensor, y: Tensor) -> Tensor:
    def far(o: Tensor, y: Tensor, n: int = len(o)) -> Tensor:
        return (o - y).square().sum().sqrt() / n

    return anybatch.coupled(far)(o, y)


def by_length_left(net: Net, o: Tensor, y: Tensor) -> Tensor:
    net.options.count = len(o)
    return anybatch.coupled(lambda o, y: (o - y).square().sum().sqrt() / net.options.count)(o, y)


def by_count(_: Net, o: Tensor, y: Tensor) -> Tensor:
    n = (y > 0).sum()
    return anybatch.coupled(lambda o: o.square().sum().sqrt() / n)(o)


def by_mean(_: Net, o: Tensor, y: Tensor) -> Tensor:
    mean = y.mean(0)
    return anybatch.coupled(lambda o: distance(o, mean))(o)


def by_partial(_: Net, o: Tensor, y: Tensor) -> Tensor:
    return anybatch.coupled(partial(distance, other=y.mean(0)))(o)


def by_rows(_: Net, o: Tensor, y: Tensor) -> Tensor:
    return anybatch.coupled(lambda o: distance(o, y))(o)


def by_attribute(net: Net, o: Tensor, _: Tensor) -> Tensor:
    net.stored = o.detach().mean(0)
    return anybatch.coupled(lambda o: distance(o, net.stored))(o)


def by_dict(net: Net, o: Tensor, _: Tensor) -> Tensor:
    found = {"mean": o.detach().mean(0)}
    return anybatch.coupled(lambda o: distance(o, found["mean"]))(o)


def by_number(_: Net, o: Tensor, y: Tensor) -> Tensor:
    mean = float(y.mean())
    return anybatch.coupled(lambda o: distance(o, mean))(o)


def by_array(_: Net, o: Tensor, y: Tensor) -> Tensor:
    mean = y.mean(0).numpy()
    return anybatch.coupled(lambda o: distance(o, torch.from_numpy(mean)))(o)


def by_slice(_: Net, o: Tensor, y: Tensor) -> Tensor:
    half = len(o) // 2
    return anybatch.coupled(lambda o, y: distance(o[:half], y[:half]))(o, y)


REFUSED: dict[str, tuple[Body, str]] = {
    "length": (by_length, "other numbers"),
    "length as a default": (by_default, "other numbers"),
    "length left on the model": (by_length_left, "other numbers"),
    "a slice by length": (by_slice, "other numbers"),
    "count": (by_count, r"reads a tensor of shape \(\)"),
    "mean": (by_mean, r"reads a tensor of shape \(3,\)"),
    "mean in a partial": (by_partial, r"reads a tensor of shape \(3,\)"),
    "rows": (by_rows, r"reads a tensor of shape \(\d+, 3\)"),
    "mean left on the model": (by_attribute, r"reads a tensor of shape \(3,\)"),
    "mean in a dict": (by_dict, r"reads a tensor of shape \(3,\)"),
    "mean as a number": (by_number, "other numbers"),
    "mean as an array": (by_array, "other numbers"),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4, 5])
@pytest.mark.parametrize("name", REFUSED)
def test_what_belongs_to_some_samples_is_refused(name: str, micro_batch: int) -> None:
    """It was that of the micro-batch that came last, and called exact."""
    body, said = REFUSED[name]
    net, x, y = made(body)
    with pytest.raises(LossError, match=said):
        Engine(net, micro_batch=micro_batch).backward((x, y))


def with_constants(net: Net, o: Tensor, y: Tensor) -> Tensor:
    eps, classes = 1e-3, o.shape[1]
    return anybatch.coupled(lambda o, y: distance(o, y) / classes + eps * net.options.power)(o, y)


def with_weights(net: Net, o: Tensor, y: Tensor) -> Tensor:
    weights = net.weights / net.weights.sum()
    return anybatch.coupled(lambda o, y: distance(o * weights, y + net.centre))(o, y)


def with_partial(net: Net, o: Tensor, _: Tensor) -> Tensor:
    return anybatch.coupled(partial(distance, other=net.weights))(o)


def with_array(_: Net, o: Tensor, y: Tensor) -> Tensor:
    scale = np.array([1.0, 2.0, 3.0])
    return anybatch.coupled(lambda o, y: distance(o * torch.from_numpy(scale), y))(o, y)


def with_lengths_of_all(_: Net, o: Tensor, y: Tensor) -> Tensor:
    chosen = y[:, 0] > 0
    return anybatch.coupled(lambda o, y: distance(o, y) / len(o))(o[chosen], y[chosen])


HONEST = {f.__name__: f for f in (with_constants, with_weights, with_partial, with_array)}
HONEST |= {"with_lengths_of_all": with_lengths_of_all}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4, 5])
@pytest.mark.parametrize("name", HONEST)
def test_constants_are_those_of_the_full_batch(name: str, micro_batch: int) -> None:
    net, x, y = made(HONEST[name])
    got = state_after(net, lambda m: Engine(m, micro_batch=micro_batch).backward((x, y)))
    assert_exact(got, undivided(net, lambda loss: loss, (x, y), None))


def made(body: Body) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net(body).double(), torch.randn(N, 6).double(), torch.randn(N, 3).double()
