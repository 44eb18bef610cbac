"""Models that take the batch and not fewer rows of it are refused by name; faults keep theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import BudgetError, NotExactError

N = 8

Forward = Callable[..., Tensor]


class Net(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, N), nn.Linear(N, 3), function

    def forward(self, *inputs: Tensor) -> Tensor:
        x, *others = inputs
        return self.last(self.function(self.first(x), *others))  # type: ignore[no-any-return]


def asserts(h: Tensor) -> Tensor:
    assert len(h) % 2 == 0
    return h


def raises(h: Tensor) -> Tensor:
    if len(h) < 5:
        raise ValueError
    return h


FEW: dict[str, Forward] = {
    "largest": lambda h: h + h.topk(5, 0).values.mean(0),
    "a smallest": lambda h: h * (h > h.kthvalue(5, 0).values),
    "a row": lambda h: h + h[N - 1],
    "some rows": lambda h: h + h.narrow(0, 2, 4).mean(0),
    "pairs": lambda h: h.view(-1, 2 * N).view(-1, N),
    "as many as the batch": lambda h: h + torch.ones(N, N),
    "an assertion": asserts,
    "an error": raises,
}

PLACES: dict[str, Forward] = {
    "index": lambda h, i: h + h[i],
    "gather": lambda h, i: h + h.gather(0, i[:, None].expand(-1, N)),
    "index_add": lambda h, i: torch.zeros_like(h).index_add(0, i, h),
}


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("name", FEW)
def test_a_model_that_takes_the_batch_and_no_fewer_rows(name: str, micro_batch: int) -> None:
    model, x, y = Net(FEW[name]), torch.randn(N, 6), torch.randint(3, (N,))
    F.cross_entropy(model(x), y)
    with pytest.raises(NotExactError, match=rf"takes {N} and not|one sample must be computed"):
        Engine(model, nn.CrossEntropyLoss(), micro_batch=micro_batch).backward(x, y)


@pytest.mark.parametrize("name", PLACES)
def test_inputs_that_are_places_in_the_batch(name: str) -> None:
    model, x, y = Net(PLACES[name]), torch.randn(N, 6), torch.randint(3, (N,))
    with pytest.raises(NotExactError, match=r"and inputs\[1\] has places of samples"):
        engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=3)
        engine.backward((x, torch.arange(N).flip(0)), y)


FAULTS: dict[str, tuple[Forward, type[Exception]]] = {
    "width": (lambda h: h[:, 1:], RuntimeError),
    "column": (lambda h: h[:, 99], IndexError),
    "number": (lambda h: h[torch.tensor([99])], IndexError),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_model_keeps_its_class(name: str) -> None:
    function, error = FAULTS[name]
    with pytest.raises(error) as raised:
        engine = Engine(Net(function), nn.CrossEntropyLoss(), micro_batch=3)
        engine.backward(torch.randn(N, 6), torch.randint(3, (N,)))
    assert type(raised.value) is error


# A loss that reads numbers of all outputs, and cannot do without a pair or with zeros.


def pairs_or_nothing(out: Tensor, y: Tensor) -> Tensor | float:
    """Return the distances of neighbours of one class; a number of Python where there are none."""
    found = [(a - b).norm() for a, b, i, j in zip(out, out[1:], y, y[1:], strict=False) if i == j]
    return sum(found) / len(found) if found else 0.0


def by_their_ratio(out: Tensor, y: Tensor) -> Tensor:
    first, second = F.cross_entropy(out, y), out.abs().mean()
    return first + first.item() / second.item() * second


def by_their_shares(out: Tensor, y: Tensor) -> Tensor:
    shares = (y + out.detach().abs().sum(1)).tolist()
    each = F.cross_entropy(out, y, reduction="none")
    return torch.stack([a / sum(shares) * b for a, b in zip(shares, each, strict=True)]).sum()


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_loss_of_few_rows_may_be_a_number_of_python(micro_batch: int) -> None:
    model, x, y = nn.Linear(6, 3).double(), torch.randn(N, 6).double(), torch.tensor([0, 1] * 4)
    y[-1] = 0

    def run(copied: nn.Module) -> Tensor:
        return Engine(copied, pairs_or_nothing, micro_batch=micro_batch).backward(x, y)

    assert_exact(state_after(model, run), undivided(model, pairs_or_nothing, x, y))


@pytest.mark.parametrize("loss", [by_their_ratio, by_their_shares])
def test_a_dry_run_gives_a_loss_numbers_of_rows_and_no_zeros(loss: Callable[..., Tensor]) -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    x, y = torch.randn(N, 6).double(), torch.arange(N) % 3
    with pytest.raises(BudgetError) as raised:
        Engine(model, loss, memory=64).backward(x, y)

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, loss, memory=raised.value.needed)
        found = engine.backward(x, y)
        assert engine.plan is not None
        assert engine.plan.micro_batch < N
        return found

    assert_exact(state_after(model, run), undivided(model, loss, x, y))
