"""Masks pass through kernels that choose, write elsewhere, or take no NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.unit.execution.proof.nets import Body, Net, batch
from torch import Tensor
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError


def centres(h: Tensor) -> Tensor:
    weights = (h[:, :3] * 5).softmax(1)
    return (weights.mT @ h) / weights.sum(0)[:, None]


def sorted_by_the_batch(h: Tensor) -> Tensor:
    values, order = h[:, 0].detach().contiguous() * 4, h.mean(0).argsort()
    return h * torch.searchsorted(torch.arange(8.0, dtype=h.dtype), values, sorter=order)[:, None]


def offsets_of_the_batch(h: Tensor) -> Tensor:
    ends = (h.detach() > h.detach().mean(0)).long().cumsum(1)[:, 0] * 0 + torch.arange(len(h)) * 2
    table = torch.eye(8, dtype=h.dtype)
    return h + F.embedding_bag(torch.arange(2 * len(h)) % 8, table, ends, mode="sum")


def into(write: Callable[[list[Tensor], list[Tensor]], Any]) -> Body:
    """Return a body that takes off the mean of what a kernel over lists has written."""

    def body(h: Tensor) -> Tensor:
        to = torch.zeros_like(h)
        write([to], [h.detach()])
        return h - to.mean(0)

    return body


@torch.library.custom_op("anybatch_tests::mean_into", mutates_args=("out",))
def mean_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.mean(0))


@torch.library.custom_op("anybatch_tests::tanh_into", mutates_args=("out",))
def tanh_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.tanh())


@mean_into.register_fake
@tanh_into.register_fake
def _(x: Tensor, out: Tensor) -> None:
    del x, out


def with_a_mean(h: Tensor) -> Tensor:
    mean = torch.zeros(h.shape[1], dtype=h.dtype)
    mean_into(h.detach(), mean)
    return h - mean


def with_a_tanh(h: Tensor) -> Tensor:
    to = torch.zeros_like(h)
    tanh_into(h.detach(), to)
    return h - to


def loss_of_classes(reduction: str, *, weights: bool = False, pixels: bool = False) -> Body:
    """Return a body that adds the loss of two classes, which a sample's own numbers choose."""

    def body(h: Tensor) -> Tensor:
        logits = h.reshape(-1, 2, 2, 2) if pixels else h[:, :2]
        targets = (h.detach()[:, :4].reshape(-1, 2, 2) > 0).long() if pixels else h[:, 0] > 0
        weight = h.detach().exp().mean(0)[:2] if weights else None
        loss = F.nll_loss(logits.log_softmax(1), targets.long(), weight, reduction=reduction)
        return h + loss.reshape(len(h), -1)[:, :1] if loss.dim() else h * loss

    return body


MEETINGS: dict[str, Body] = {
    "a mean loss": loss_of_classes("mean"),
    "the rows that a loss counts": lambda h: (
        h
        * torch.ops.aten.nll_loss_forward(
            h.detach().log_softmax(1), torch.zeros(len(h), dtype=torch.long), None, 2, -100
        )[1]
    ),
    "a sum of losses": loss_of_classes("sum"),
    "a sum of losses of pixels": loss_of_classes("sum", pixels=True),
    "losses with weights of the batch": loss_of_classes("none", weights=True),
    "losses of pixels with weights of the batch": loss_of_classes(
        "none", weights=True, pixels=True
    ),
    "a table of the batch": lambda h: F.embedding(h[:, :3].argmax(1), centres(h)),
    "a table of the batch, by a constant": lambda h: (
        h + F.embedding(torch.zeros(1, dtype=torch.long), centres(h))
    ),
    "bags of a table of the batch": lambda h: F.embedding_bag(h.topk(2, 1)[1] % 3, centres(h)),
    "offsets of the batch": offsets_of_the_batch,
    "renorm": lambda h: h.renorm(2, 1, 0.5),
    "renorm in place": lambda h: h.clone().renorm_(2, 1, 0.5),
    "an order of the batch": sorted_by_the_batch,
    "copy": into(torch._foreach_copy_),
    "add": into(torch._foreach_add_),
    "sub": into(torch._foreach_sub_),
    "lerp": into(lambda to, of: torch._foreach_lerp_(to, of, 0.5)),
    "addcmul": into(lambda to, of: torch._foreach_addcmul_(to, of, of)),
    "mul": into(lambda to, of: (torch._foreach_add_(to, 1.0), torch._foreach_mul_(to, of))),
    "maximum": into(torch._foreach_maximum_),
    "norm": lambda h: h / torch._foreach_norm([h])[0],
    "a custom kernel that returns nothing": with_a_mean,
}


@pytest.mark.parametrize("gate", [None, 0.0])
@pytest.mark.parametrize("name", MEETINGS)
def test_what_meets_in_a_kernel_is_never_shown(name: str, gate: float | None) -> None:
    net, (x, y) = Net(MEETINGS[name], gate).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    with pytest.raises(NotExactError, match="samples"):
        engine.backward(x, y)


def hooked(h: Tensor) -> Tensor:
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda g: float(g.norm()) and None)  # type: ignore[no-untyped-call]
    return h


def solved(solve: Callable[[Tensor, Tensor], Tensor]) -> Body:
    """Return a body that solves a system of two equations for each sample."""

    def body(h: Tensor) -> Tensor:
        systems = h[:, :4].unflatten(1, (2, 2)) + 3 * torch.eye(2, dtype=h.dtype)  # type: ignore[no-untyped-call]
        return h + solve(systems, h[:, 4:6, None]).reshape(len(h), -1)[:, :1]

    return body


def factored(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b)


def grouped(h: Tensor) -> Tensor:
    filters = torch.linspace(-1, 1, 12, dtype=h.dtype).reshape(2, 2, 3).repeat(len(h), 1, 1)
    return F.conv1d(
        h.reshape(1, -1, 4)[:, : 2 * len(h)], filters, padding=1, groups=len(h)
    ).reshape(h.shape)


HONEST: dict[str, Body] = {
    "a table of parameters": lambda h: h + F.embedding(h.argmax(1), torch.eye(8, dtype=h.dtype)),
    "its own entries": lambda h: F.embedding(torch.arange(len(h)), h),
    "losses": loss_of_classes("none"),
    "losses of pixels": loss_of_classes("none", pixels=True),
    "turned in place": lambda h: h + (h * 2).unsqueeze_(2).transpose_(1, 2).squeeze_(1),
    "a spectrum": lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=1), n=8, dim=1),
    "a spectrum along nothing": lambda h: torch.fft.fftn(torch.complex(h, h), dim=()).real,
    "renorm of rows": lambda h: h.renorm(2, 0, 0.5),
    "a list": lambda h: torch._foreach_add([h, h], [h, h])[1],
    "a norm of its own": lambda h: h / torch.stack(torch._foreach_norm(list(h)))[:, None],
    "solve": solved(torch.linalg.solve),
    "solve a vector": solved(lambda a, b: torch.linalg.solve(a, b[..., 0])),
    "inverse": solved(lambda a, _: torch.linalg.inv(a)),
    "determinant": solved(lambda a, _: torch.linalg.det(a)),
    "factors": solved(factored),
    "singular values": solved(lambda a, _: torch.linalg.svdvals(a)),
    "eigenvalues": solved(lambda a, _: torch.linalg.eigvalsh(a + a.mT)),
    "cholesky": solved(lambda a, _: torch.linalg.cholesky(a @ a.mT)),
    "orthogonal": solved(lambda a, _: torch.linalg.qr(a)[1]),
    "exponential": solved(lambda a, _: torch.linalg.matrix_exp(a)),
    "triangular": solved(lambda a, b: torch.linalg.solve_triangular(a, b, upper=True)),
    "groups of the batch": grouped,
    "normalised groups of the batch": lambda h: F.group_norm(
        h.reshape(1, -1, 4), 2 * len(h)
    ).reshape(h.shape),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("name", HONEST)
def test_what_a_kernel_keeps_separate_is_shown(name: str, micro_batch: int) -> None:
    net, (x, y) = Net(HONEST[name]).double(), batch()
    engine: Engine | None = None

    def run(model: torch.nn.Module) -> Tensor:
        nonlocal engine
        engine = Engine(model, F.cross_entropy, micro_batch=micro_batch)
        return engine.backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    assert engine is not None
    assert engine.plan is not None
    assert engine.plan.exact, str(engine.plan.exact)


DOUBTED: dict[str, tuple[Body, str]] = {
    "a hook that reads": (hooked, "Python reads"),
    "a custom kernel that returns nothing": (with_a_tanh, "tanh_into in Net could not be followed"),
    "least squares": (
        solved(lambda a, b: torch.linalg.lstsq(a, b, driver="gels").solution),
        "without data",
    ),
}


@pytest.mark.parametrize("name", DOUBTED)
def test_what_a_kernel_may_hide_is_not_shown(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    body, said = DOUBTED[name]
    net, (x, y) = Net(body).double(), batch()
    engine: Engine | None = None

    def run(model: torch.nn.Module) -> Tensor:
        nonlocal engine
        engine = Engine(model, F.cross_entropy, micro_batch=3)
        return engine.backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    assert engine is not None
    assert engine.plan is not None
    assert not engine.plan.exact
    assert said in str(engine.plan.exact)
    assert "ERROR" not in capfd.readouterr().out


class Counting(torch.nn.Module):
    """Batch normalisation, and a body that may compute with its counter."""

    def __init__(self, body: Callable[[torch.nn.BatchNorm1d, Tensor], Tensor], **how: Any) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.norm, self.body = torch.nn.BatchNorm1d(8, **how), body

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.body(self.norm, self.first(x)))
        return found


def tracked(norm: torch.nn.BatchNorm1d) -> Tensor:
    assert norm.num_batches_tracked is not None
    return norm.num_batches_tracked


COUNTERS: dict[str, Callable[[torch.nn.BatchNorm1d, Tensor], Tensor]] = {
    "a factor": lambda norm, h: h * (tracked(norm) + 1) / 4 + norm(h),
    "between two calls": lambda norm, h: norm(norm(h) * (1 + tracked(norm) / 4)),
    "a choice": lambda norm, h: torch.where(tracked(norm) < 1, h, norm(h)),
    "a copy": lambda norm, h: h * tracked(norm).clone().to(h) + norm(h),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_forward_computes_with_is_not_shown(name: str) -> None:
    net, (x, y) = Counting(COUNTERS[name]).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    assert engine.plan is not None
    assert not engine.plan.exact
    assert "num_batches_tracked" in str(engine.plan.exact)


@pytest.mark.parametrize("how", [{}, {"momentum": None}, {"track_running_stats": False}])
def test_batch_normalisation_counts_and_is_shown(how: dict[str, Any]) -> None:
    net, (x, y) = Counting(lambda norm, h: norm(norm(h).tanh()), **how).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.exact, str(engine.plan.exact)


def test_a_counter_that_stays_is_a_number() -> None:
    net, (x, y) = Counting(COUNTERS["a factor"]).double(), batch()
    net.norm.eval()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.exact, str(engine.plan.exact)
