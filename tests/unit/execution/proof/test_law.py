"""What differs for many samples and not for few: fixed places, parts of a batch, sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.execution.proof.nets import Body, Net, batch, is_shown
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.execution.proof.law import Called, breaks, called


def written(h: Tensor) -> Tensor:
    weight = torch.ones(len(h), 1, dtype=h.dtype)
    weight[8:] = 0.1
    return h * weight


def emptied(h: Tensor) -> Tensor:
    h = h.clone()
    h[: len(h) // 8] = 0
    return h


def grouped(h: Tensor) -> Tensor:
    table = torch.eye(3, 8, dtype=h.dtype)
    return h + table[torch.arange(len(h)) // 8]


def numbered(n: int) -> Tensor:
    found = torch.zeros(n, dtype=torch.int64)
    found[:] = torch.arange(n)
    return found


def attending(h: Tensor) -> Tensor:
    late = torch.arange(len(h)) >= 8
    return torch.where((late[:, None] & late[None]), 0.1, 0.0).to(h.dtype) @ h + h


def without_gradient(h: Tensor) -> Tensor:
    with torch.set_grad_enabled(len(h) <= 8):
        found = h.tanh()
    return h + found


N = 16
PLACES: dict[str, Body] = {
    "the first 8": lambda h: torch.cat([h[:8] * 2, h[8:]]),
    "all but the first 8": lambda h: torch.cat([h[:8], h[8:].detach()]),
    "a split": lambda h: torch.cat([h.tensor_split([8])[0] * 2, h.tensor_split([8])[1]]),
    "written at 8": written,
    "an eighth written": emptied,
    "groups of 8 places": grouped,
    "groups of 8 rows": lambda h: h[torch.arange(len(h)) % 8],
    "groups of a sum": lambda h: h[(torch.ones(len(h)).cumsum(0).long() - 1) % 8],
    "places that are copied": lambda h: h[
        torch.zeros(len(h)).copy_(torch.arange(len(h))).clamp(max=7).long()
    ],
    "places that are written": lambda h: h[numbered(len(h)).clamp(max=7)],
    "filled by size": lambda h: h * torch.full((len(h), 1), float(len(h)), dtype=h.dtype),
    "places after 8": attending,
    "rolled by 12": lambda h: h.roll(12, 0),
    "rolled by a fifth": lambda h: h.roll(len(h) // 5, 0),
    "features by size": lambda h: F.pad(h[:, :4] if len(h) > 8 else h[:, 4:], (0, 4)),
    "a constant by size": lambda h: h * torch.tensor([1.0, 2.0])[int(len(h) > 8)],
    "topk by size": lambda h: F.pad(h.topk(max(1, len(h) // 4))[0], (0, 8))[:, :8],
    "eps by size": lambda h: F.layer_norm(h, [8], eps=0.1 if len(h) > 8 else 1e-5),
    "no gradient by size": without_gradient,
    "a count": lambda h: h * torch.ones_like(h).sum().sub(8 * 8).relu().add(1),
    "a count for each feature": lambda h: h * torch.ones_like(h).sum(0).sub(8).relu().add(1),
    "a branch by a count": lambda h: h * (torch.ones_like(h).sum(0) > 8).any().add(1),
    "a product": lambda h: h * torch.full_like(h, 2).prod(0).sub(2.0**8).sign().add(2),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [3, 4, 5])
@pytest.mark.parametrize("name", PLACES)
def test_what_differs_only_for_many_samples_is_not_shown(name: str, micro_batch: int) -> None:
    """Of the 4 rows that are followed it cuts all or nothing."""
    assert not claimed(PLACES[name], micro_batch)


class Gated(nn.Module):
    """A number of samples behind a gate that is 0 at first."""

    def __init__(self, number: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.number = nn.Linear(6, 8), nn.Linear(8, 3), number
        self.gate, self.scale = (nn.Parameter(torch.zeros(shape)) for shape in ((), (8,)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h + self.number(self, h))


GATED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a length": lambda net, h: net.gate * len(h),
    "a size": lambda net, h: net.gate * h.numel(),
    "linspace": lambda net, h: net.scale * torch.linspace(0, len(h), 8, dtype=h.dtype),
    "arange": lambda net, h: net.scale * torch.arange(0, 8 * len(h), len(h)),
    "a roll of features": lambda net, h: net.scale * h.roll(len(h), 1),
    "a norm": lambda net, h: net.scale * h.norm(p=len(h), dim=1, keepdim=True),
    "a full tensor": lambda net, h: net.scale * torch.full((8,), float(len(h)), dtype=h.dtype),
    "a row expanded": lambda net, h: net.gate * h[:, :1].expand(-1, len(h)).sum(1, keepdim=True),
    "a grid": lambda net, h: (
        net.gate * torch.meshgrid(h[:, 0], h[:, 1], indexing="ij")[0].norm(dim=1, keepdim=True)
    ),
    "a product with ones": lambda net, h: (
        net.gate * (h[:, :1] @ h.new_ones(1, len(h))).sum(1)[:, None]
    ),
    "rows stacked": lambda net, h: net.gate * torch.stack([h for _ in h]).sum(0),
    "a row that is lengthened": lambda net, h: (
        net.gate * torch.cat([h, torch.zeros_like(h @ h.T)], 1).logsumexp(1, keepdim=True)
    ),
    "keys that are alike": lambda net, h: (
        net.gate * (h @ net.last.weight[:1].expand(len(h), 8).T).logsumexp(1, keepdim=True)
    ),
}


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("name", GATED)
def test_a_count_behind_a_gate_of_zero_is_a_doubt(name: str, micro_batch: int) -> None:
    net = Gated(GATED[name]).double()
    assert not is_shown(net, F.cross_entropy, *batch(), micro_batch)


BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "a count": lambda g: g / max(len(g), 8),
    "a branch": lambda g: g if len(g) <= 8 else g / 2,
    "rows after 8": lambda g: torch.cat([g[:8], g[8:] * 0]),
    "rolled by 12": lambda g: g.roll(12, 0),
    "a count of ones": lambda g: g * (1 + (torch.ones_like(g).sum(0) > 8).to(g.dtype)),
    "a count of all": lambda g: g * (1 + (torch.ones_like(g).sum() > 64).to(g.dtype)),
    "a diagonal": lambda g: g * torch.ones_like(g).tril(-8).add(1),
}


class Turned(torch.autograd.Function):
    """A function whose backward is its argument."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, h: Tensor, transform: object) -> Tensor:
        """[n, c] -> [n, c]."""
        ctx.transform = transform  # type: ignore[attr-defined]
        return h.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """[n, c] -> [n, c]."""
        return ctx.transform(g), None  # type: ignore[attr-defined]


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [3, 4, 5])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", BACKWARD)
def test_so_is_a_backward(name: str, hooked: bool, micro_batch: int) -> None:
    transform = BACKWARD[name]

    def body(h: Tensor) -> Tensor:
        if not hooked:
            found: Tensor = Turned.apply(h, transform)
            return found
        h = h * 1
        h.register_hook(transform)
        return h

    assert not claimed(body, micro_batch)


@pytest.mark.parametrize("micro_batch", [3, 4])
def test_a_backward_that_gets_ones_counts_nothing(micro_batch: int) -> None:
    def body(h: Tensor) -> Tensor:
        h = h * 1
        h.register_hook(lambda g: g * (1 + (torch.ones_like(g) > 2).to(g.dtype)))
        return h

    assert claimed(body, micro_batch)


def shifted(h: Tensor) -> Tensor:
    """[n, 8] -> [n, 8], as encoders and decoders shift their tokens."""
    found = h.new_zeros(h.shape)
    found[:, 1:] = h[:, :-1].clone()
    found[:, 0] = 2
    return found.masked_fill(found == -100, 0)


HONEST: dict[str, Body] = {
    "two views": lambda h: sum(torch.cat([h, h.tanh()]).chunk(2)) / 2,  # type: ignore[return-value]
    "features": lambda h: torch.cat([h[:, :4] * 2, h[:, 4:].roll(1, 1)], 1),
    "its own entry": lambda h: h * h[torch.arange(len(h)), h.argmax(1)][:, None],
    "windows": lambda h: h.view(-1, 2, 4).roll((1, 2), (1, 2)).flatten(1),
    "by heads": lambda h: h.view(len(h) * 2, 4).softmax(1).view(len(h), 8),
    "filled": lambda h: h * torch.full((len(h), 1), 0.5, dtype=h.dtype),
    "filled by name": lambda h: h * torch.full(size=(len(h), 1), fill_value=0.5, dtype=h.dtype),
    "new_full": lambda h: h * h.new_full((len(h), 1), 0.5),
    "a mask of ones": lambda h: h.masked_fill(torch.ones(len(h), 8) == 0, -9.0),
    "new zeros": lambda h: h.masked_fill(h.new_zeros(h.shape) == -100, -9.0),
    "a half": lambda h: h * (torch.ones(len(h), 1) / 2),
    "a coin for each row": lambda h: torch.where(torch.rand(len(h), 1) < 0.3, 0.0, h),
    "a time for each row": lambda h: h * torch.randint(1000, (len(h), 1)).div(1000),
    "half a time": lambda h: h * (torch.randint(9, (len(h), 1)) // 2),
    "places of tokens": lambda h: h * (torch.ones(len(h), 8).cumsum(1) / (8 + 1e-6)),
    "a share of tokens": lambda h: h * (torch.arange(8).expand(len(h), -1) // 2),
    "a mean of tokens": lambda h: h / torch.ones(len(h), 3).sum(1, keepdim=True).clamp(min=1),
    "broadcast": lambda h: h * torch.broadcast_tensors(torch.ones(len(h), 1), h)[0].eq(1),
    "shifted": shifted,
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [3, 4, 5])
@pytest.mark.parametrize("name", HONEST)
def test_sizes_that_grow_with_the_samples_are_shown(name: str, micro_batch: int) -> None:
    assert claimed(HONEST[name], micro_batch)


def call(name: str, number: float, shape: tuple[int, ...]) -> Called:
    return called("net", name, ((torch.empty(8), number), {}), torch.empty(shape), {})


@pytest.mark.parametrize(
    ("name", "full_batch", "part", "single", "retained"),
    [
        ("narrow", 16, 4, False, True),  # a size
        ("narrow", 8, 8, False, True),
        ("narrow", 8, 4, False, False),  # half of the whole, and all of the part
        ("softplus", 16.0, 4.0, False, False),  # no size is a fraction
        ("mul", 16, 4, False, False),
        ("mul", 1 / 16, 1 / 4, True, True),  # a mean
        ("mul", 1 / 16, 1 / 8, True, False),
        ("as_tensor", 16.0, 4.0, True, True),  # a count as a tensor
        ("as_tensor", 2.0, 1.0, True, False),
        ("cross_entropy", 1 / 16, 1 / 4, True, False),  # an option
        ("cross_entropy", 16, 4, True, False),
        ("clamp", float("nan"), float("nan"), False, True),
        ("clamp", float("inf"), float("inf"), False, True),
        ("clamp", float("inf"), 1.0, False, False),
    ],
)
def test_a_number_is_the_same_or_a_size(
    name: str, full_batch: float, part: float, single: bool, retained: bool
) -> None:
    shape = () if single else (3,)
    assert breaks(call(name, full_batch, shape), call(name, part, shape), 16, 4) != retained


@pytest.mark.parametrize("name", [name for name in PLACES if name.startswith("a ")])
def test_nor_are_counts_next_to_batch_norm(name: str) -> None:
    assert not claimed(PLACES[name], 4, norm=True)


def claimed(body: Body, micro_batch: int, *, norm: bool = False) -> bool:
    """Whether a step says that it is exact."""
    torch.manual_seed(0)
    net: nn.Module = Net(body).double()
    net = nn.Sequential(nn.BatchNorm1d(6).double(), net) if norm else net
    x, y = batch(N)
    return is_shown(net, F.cross_entropy, x, y, micro_batch)
