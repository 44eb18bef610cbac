"""Switches that are not there in the first steps, and tensors of few numbers that Python reads.

What they switch has no gradient, so no graph shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Engine
from anybatch.errors import NotExactError


class Settings:
    pass


def switch() -> None:
    """A function with an attribute."""


HELD, FILE = Settings(), sys.modules[__name__]


class Net(nn.Module):
    def __init__(self, reads: Callable[[Net], Any]) -> None:
        super().__init__()
        self.first, self.last, self.reads = nn.Linear(4, 4), nn.Linear(4, 3), reads
        self.table = torch.zeros(3)
        self.register_buffer("buffer", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        fixed = x.detach()
        return self.last(self.first(x) + (fixed.mean(0) if self.reads(self) else fixed))  # type: ignore[no-any-return]


LATER: dict[str, tuple[Callable[[Any], Any], Callable[[Any], None]]] = {
    "a class of modules": (
        lambda net: getattr(type(net), "later", False),
        lambda net: setattr(type(net), "later", True),
    ),
    "a class of modules, by the module": (
        lambda net: getattr(net, "later", False),
        lambda net: setattr(type(net), "later", True),
    ),
    "a class of an object": (
        lambda _: getattr(HELD, "later", False),
        lambda _: setattr(Settings, "later", True),
    ),
    "an object": (lambda _: getattr(HELD, "later", False), lambda _: setattr(HELD, "later", True)),
    "a function": (
        lambda _: getattr(switch, "later", False),
        lambda _: setattr(switch, "later", True),
    ),
    "a file": (lambda _: getattr(FILE, "later", False), lambda _: setattr(FILE, "later", True)),
    "globals": (
        lambda _: globals().get("later", False),
        lambda _: globals().update(later=True),
    ),
    "an attribute of few numbers": (
        lambda net: float(net.table[1]) > 0,
        lambda net: net.table.fill_(1),
    ),
    "a buffer of few numbers": (
        lambda net: bool(net.buffer.any()),
        lambda net: net.buffer.fill_(1),
    ),
    "a list of a buffer": (lambda net: net.buffer.tolist()[1], lambda net: net.buffer.fill_(1)),
    "an array of a buffer": (lambda net: net.buffer.numpy()[1], lambda net: net.buffer.fill_(1)),
}


@pytest.fixture
def unset() -> Iterator[None]:
    """Remove what a test has set."""
    yield
    for holder in (Net, Settings, HELD, switch, FILE):
        if "later" in vars(holder):
            delattr(holder, "later")


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", LATER)
def test_it_is_inspected_again(name: str) -> None:
    reads, sets = LATER[name]
    model = Net(reads)
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=3)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    for _ in range(3):
        engine.backward(x, y)
    sets(model)
    with pytest.raises(NotExactError, match="samples 0 and 1 meet"):
        engine.backward(x, y)


def test_what_stays_is_not_inspected_again() -> None:
    model = Net(lambda net: float(net.table[1]) > 0 or net.buffer.tolist()[1])
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=3)
    for _ in range(5):
        engine.backward(torch.randn(8, 4), torch.randint(3, (8,)))
    assert engine.plan is not None
    assert engine.plan.exact.step == 1
