"""Models that take the batch and not fewer rows of it are refused by name; faults keep theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError

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
