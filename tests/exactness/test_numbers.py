"""Numbers and logs that forward keeps in attributes have each sample once."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch


class Own(OrderedDict[str, float]):
    """A dict that no call with a dict makes."""

    def __init__(self, *, number: float = 0.0) -> None:
        super().__init__(number=number)


class Sums(defaultdict[str, float]):
    """The same, with a default."""

    def __init__(self, *, number: float) -> None:
        super().__init__(float, number=number)


class Recent(deque[float]):
    """A deque that no call with its values makes."""

    def __init__(self, *, number: float) -> None:
        super().__init__([number], 1)


class Counting(nn.Module):
    """BatchNorm, and state of Python that each call moves."""

    def __init__(self, move: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(4)
        self.last, self.move = nn.Linear(4, 3), move
        self.number: float = 0
        self.count = 0
        self.numbers, self.log = {"number": 0.0}, list[Any]()
        self.tally, self.own = Counter[str](number=5, other=3), Own()
        self.tensor, self.recent = torch.zeros(()), deque[int](maxlen=5)
        self.sizes = set[int]()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(x))
        self.move(self, x)
        return out


def _set(net: Any, name: str, value: Any) -> None:
    setattr(net, name, value)


def _add(net: Any, value: float, count: int) -> None:
    net.number, net.count = net.number + value, net.count + count


MOVES: dict[str, tuple[Callable[[Any, Tensor], Any], bool]] = {
    "samples": (lambda net, x: _set(net, "number", net.number + len(x)), True),
    "samples, in a dict": (
        lambda net, x: net.numbers.update(number=net.numbers["number"] + len(x)),
        True,
    ),
    "samples, in a Counter": (lambda net, x: net.tally.update(number=len(x)), True),
    "samples, in a dict of an own class": (
        lambda net, x: net.own.update(number=net.own["number"] + len(x)),
        True,
    ),
    "calls": (lambda net, x: _set(net, "number", net.number + 1), True),
    "a sum and samples": (lambda net, x: _add(net, float(x.sum()), len(x)), True),
    "a mean and calls": (lambda net, x: _add(net, float(x.mean()), 1), True),
    "a moving mean": (lambda net, x: _set(net, "number", 0.9 * net.number + 0.1 * len(x)), True),
    "the same again": (lambda net, x: _set(net, "number", 7), False),
    "a log": (lambda net, x: net.log.append(x[:, 0].clone()), True),
    "recent ones": (lambda net, x: net.recent.append(len(x)), False),
    "a set": (lambda net, x: net.sizes.add(len(x) + 100 * len(net.sizes)), False),
    "a tensor": (lambda net, x: _set(net, "tensor", net.tensor + len(x)), True),
    "a tensor that is written to": (lambda net, x: net.tensor.add_(len(x)), True),
    "a tensor of the batch": (lambda net, x: _set(net, "tensor", x.sum()), False),
    "a log of texts": (lambda net, x: net.log.extend("a" * len(x)), False),
}
"""What a call moves, and whether a plan then says that it has not shown that it is exact."""


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
@pytest.mark.parametrize("name", MOVES)
def test_numbers_and_logs_of_lanes_are_those_of_all_samples(name: str, micro_batch: int) -> None:
    move, doubted = MOVES[name]
    torch.manual_seed(0)
    net = Counting(move).double()
    other = copy.deepcopy(net)
    engine = Engine(net, F.cross_entropy, micro_batch=micro_batch)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
        net.zero_grad()
        wanted = undivided(other, F.cross_entropy, x, y)
        other(x)
        assert_exact(state_of(net, engine.backward(x, y)), wanted)
        assert engine.plan is not None
        assert engine.plan.mechanism == "lockstep"
        assert str(engine.plan.exact).startswith("not shown") == doubted
    sizes = [len(part) for part in x.split(-(-8 // -(-8 // micro_batch)))]
    if name == "recent ones":
        assert list(net.recent) == (3 * sizes)[-5:]
    if name == "a set":
        assert {one % 100 for one in net.sizes} == set(sizes)
    if "mean" not in name:  # else nobody knows what it is after all samples
        assert net.number == pytest.approx(other.number, rel=1e-12)
    assert net.count == other.count
    assert (net.numbers, net.tally, net.own) == (other.numbers, other.tally, other.own)
    if net.log and isinstance(net.log[0], Tensor):
        assert torch.equal(torch.cat(net.log), torch.cat(other.log))
    else:
        assert net.log == other.log


def pairs(out: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("loss", [F.cross_entropy, pairs])
@pytest.mark.parametrize(
    "name",
    [
        *("samples", "samples, in a dict", "samples, in a Counter"),
        *("samples, in a dict of an own class", "a sum and samples", "a log", "a log of texts"),
    ],
)
def test_counts_and_logs_have_each_sample_once_in_two_passes(
    name: str, loss: Callable[[Tensor, Tensor], Tensor], lazy: bool
) -> None:
    torch.manual_seed(0)
    net = Counting(MOVES[name][0]).double()
    net.norm = nn.Identity()
    other = copy.deepcopy(net)
    engine = Engine(net, loss, micro_batch=3)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
        net.zero_grad()
        wanted = undivided(other, loss, x, y)
        other(x)
        batch = (LazyBatch(TensorDataset(x, y)),) if lazy else (x, y)
        found = engine.backward(*batch)
        assert_exact(state_of(net, found), wanted)
        assert engine.plan is not None
        assert engine.plan.mechanism == ("two-pass" if loss is pairs else "streaming")
    assert net.number == pytest.approx(other.number, rel=1e-12)
    assert net.count == other.count
    assert (net.numbers, net.tally, net.own) == (other.numbers, other.tally, other.own)
    assert sum(map(len, net.log)) == sum(map(len, other.log))


@pytest.mark.parametrize("own", [F.mse_loss, pairs])
@pytest.mark.parametrize("make", [Sums, Counter, Recent])
def test_a_loss_may_count_in_a_container_of_an_own_class(
    make: Callable[..., Any], own: Callable[[Tensor, Tensor], Tensor]
) -> None:
    held = make(number=1.0)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        key = 0 if isinstance(held, deque) else "number"
        held[key] += 1
        return own(out, y) * held[key]

    torch.manual_seed(0)
    net, x = nn.Linear(4, 4).double(), torch.randn(8, 4, dtype=torch.float64)
    engine = Engine(net, loss, micro_batch=3)
    for step in range(3):
        net.zero_grad()
        found = state_of(net, engine.backward(x, x))
        net.zero_grad()
        assert_exact(found, undivided(net, lambda o, y, n=step + 2: own(o, y) * n, x, x))
