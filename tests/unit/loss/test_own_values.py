"""A loss that a model makes of no functional that is known: exact, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from anybatch import Engine
from anybatch.errors import LossError, NotExactError

N, T = 7, 5

Lose = Callable[["Own", Tensor, Tensor, Tensor], Tensor]


class Own(nn.Module):
    """Returns what `lose` makes of tokens [n, T, 6], labels and weights [n, T]."""

    def __init__(self, lose: Lose) -> None:
        super().__init__()
        self.head, self.gate, self.lose = nn.Linear(6, 3), nn.Linear(6, 1), lose

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return self.lose(self, x, y, w)


def each(m: Own, x: Tensor, y: Tensor) -> Tensor:
    """Return losses [n, T]."""
    flat = F.cross_entropy(m.head(x).flatten(0, 1), y.flatten(), reduction="none")
    return flat.view(y.shape)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    weights = (torch.rand(N, T) < 0.6).double()
    weights[:, 3:] = 0.0
    weights[2] = 0.0  # a micro-batch of one has nothing that counts
    weights[5, :] = 1.0
    return torch.randn(N, T, 6).double(), torch.randint(3, (N, T)), weights


def changed(total: Tensor) -> Tensor:
    total += 1.0
    return total


def changed_below(total: Tensor) -> Tensor:
    bounded = total.clamp(min=1)
    total += 1.0
    return bounded


def changed_through_a_view(total: Tensor) -> Tensor:
    total.view(1).add_(1.0)
    return total


def right(m: Own, x: Tensor, y: Tensor) -> float:
    with torch.inference_mode():
        return float((m.head(x).argmax(-1) == y).double().mean())


def hooked(value: Tensor) -> Tensor:
    value.register_hook(lambda grad: -0.1 * grad)
    return value


class Reversed(torch.autograd.Function):
    """A gradient that is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -0.3 * grads[0]


def added(total: Tensor, *terms: Tensor) -> Tensor:
    for term in terms:
        total += term
    return total


def ctc(m: Own, x: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    steps, n = m.head(x).log_softmax(-1).transpose(0, 1), len(x)
    lengths = torch.full((n,), T), torch.full((n,), labels.numel() // n)
    return F.ctc_loss(steps, labels, *lengths, reduction=reduction)


def known_sum(m: Own, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    labels = torch.where(w > 0, y, -100)
    return F.cross_entropy(m.head(x).transpose(1, 2), labels, reduction="sum")


def doubled(value: Tensor) -> Tensor:
    value.mul_(2.0)
    return value


EXACT: dict[str, Lose] = {
    "mean": lambda m, x, y, w: each(m, x, y).mean(),
    "mean by name": lambda m, x, y, w: torch.mean(input=each(m, x, y)),
    "mean of both dimensions": lambda m, x, y, w: each(m, x, y).mean((0, 1)),
    "mean of sums": lambda m, x, y, w: each(m, x, y).sum(1).mean(),
    "mean along the samples": lambda m, x, y, w: each(m, x, y).mean(1).mean(0),
    "steps first": lambda m, x, y, w: each(m, x, y).T.mean(),
    "weighted, steps first": lambda m, x, y, w: (each(m, x, y) * w).T.sum() / w.T.sum(),
    "sum": lambda m, x, y, w: each(m, x, y).sum(),
    "sum by samples": lambda m, x, y, w: each(m, x, y).sum() / len(x),
    "sum by numbers": lambda m, x, y, w: each(m, x, y).sum() / y.numel(),
    "negative": lambda m, x, y, w: -(m.head(x).log_softmax(-1) * F.one_hot(y, 3)).sum(-1).mean(),
    "divergence": lambda m, x, y, w: F.mse_loss(m.head(x), x[..., :3]) + m.gate(x).exp().mean(),
    "one minus": lambda m, x, y, w: 1 - F.cosine_similarity(m.head(x), x[..., :3], -1).mean(),
    "and a number": lambda m, x, y, w: 2 * (each(m, x, y).mean() - 3) + 0.5,
    "weighted": lambda m, x, y, w: (each(m, x, y) * w).sum() / w.sum(),
    "weighted, flat": lambda m, x, y, w: (each(m, x, y) * w).flatten().sum() / w.flatten().sum(),
    "masked": lambda m, x, y, w: (each(m, x, y) * (w > 0)).sum() / (w > 0).sum(),
    "masked in floats": lambda m, x, y, w: (each(m, x, y) * w).sum() / (w > 0).float().sum(),
    "floats of a count": lambda m, x, y, w: (each(m, x, y) * w).sum() / (w > 0).sum().double(),
    "with a bound": lambda m, x, y, w: (each(m, x, y) * w).sum() / w.sum().clamp(min=1),
    "with a bound by name": lambda m, x, y, w: (each(m, x, y) * w).sum() / w.sum().clamp_min(1.0),
    "with a bound on a count": lambda m, x, y, w: (
        (each(m, x, y) * (w > 0)).sum() / torch.clamp((w > 0).sum(), min=1)
    ),
    "with a number": lambda m, x, y, w: (each(m, x, y) * w).sum() / (w.sum() + 1e-2),
    "with a large bound": lambda m, x, y, w: (each(m, x, y) * w).sum() / w.sum().clamp(min=99),
    "with both": lambda m, x, y, w: (
        (each(m, x, y) * w).sum() / (w.sum().float().clamp(min=1).double() + 0.5)
    ),
    "shifted": lambda m, x, y, w: (each(m, x, y)[:, 1:] * w[:, 1:]).sum() / w[:, 1:].sum(),
    "by labels": lambda m, x, y, w: (each(m, x, y) * (y != 1)).sum() / (y != 1).sum(),
    "by the model": lambda m, x, y, w: (
        (each(m, x, y) * (k := (m.gate(x) > -0.5)[..., 0])).sum() / k.sum()
    ),
    "by another": lambda m, x, y, w: 2 * (each(m, x, y) * w).sum() / (x[..., 0] > 0).sum(),
    "a known sum by a count": lambda m, x, y, w: known_sum(m, x, y, w) / (w > 0).sum(),
    "a known sum by a bounded count": lambda m, x, y, w: (
        0.5 * known_sum(m, x, y, w) / (w > 0).sum().clamp(min=1) + m.gate(x).square().mean()
    ),
    "a known sum by weights": lambda m, x, y, w: (
        m.gate.bias[0].exp() * F.mse_loss(m.head(x), x[..., :3], reduction="sum") / w.sum()
    ),
    "two by weights": lambda m, x, y, w: (
        (each(m, x, y) * w).sum() / w.sum() + (m.gate(x)[..., 0] * w).sum() / w.sum()
    ),
    "steps by weights": lambda m, x, y, w: (
        torch.stack([(each(m, x, y) * w)[:, t].sum() for t in range(T)]).sum() / w.sum()
    ),
    "weighted by sample": lambda m, x, y, w: (
        (each(m, x, y) * w).sum(1) / w.sum(1).clamp(min=1)
    ).mean(),
    "stack": lambda m, x, y, w: torch.stack([each(m, x, y).mean(), m.gate(x).mean()]).mean(),
    "stack of known ones": lambda m, x, y, w: torch.stack(
        [F.mse_loss(m.head(x), x[..., :3]), F.l1_loss(m.gate(x), x[..., :1])]
    ).sum(),
    "in place": lambda m, x, y, w: doubled(each(m, x, y).mean()),
    "begins with zeros": lambda m, x, y, w: (
        torch.zeros(()) + each(m, x, y).mean() - m.gate(x).mean()
    ),
    "begins with a tensor": lambda m, x, y, w: added(
        torch.tensor(0.0).double(), each(m, x, y).mean(), F.mse_loss(m.head(x), x[..., :3])
    ),
    "weighted by a tensor": lambda m, x, y, w: (
        F.mse_loss(m.head(x), x[..., :3]) * torch.tensor(0.5) + torch.tensor(2.0) * m.gate(x).mean()
    ),
    "views joined": lambda m, x, y, w: torch.cat(
        [m.gate(x).mean().view(1), F.l1_loss(m.head(x), x[..., :3]).unsqueeze(0)]
    ).sum(),
    "learned weights": lambda m, x, y, w: (
        (-m.gate.bias[0]).exp() * each(m, x, y).mean() + m.gate.bias[0] + m.gate(x).square().mean()
    ),
    "learned weights below": lambda m, x, y, w: (
        each(m, x, y).mean() / (2 * m.gate.bias[0].exp() ** 2) + m.head.bias[0].exp().log1p()
    ),
    "learned weights of a weighted mean": lambda m, x, y, w: (
        m.gate.bias[0].exp() * (each(m, x, y) * w).sum() / w.sum()
    ),
    "weighted by a rounded tensor": lambda m, x, y, w: (
        each(m, x, y).mean() * torch.tensor(0.1, dtype=torch.bfloat16)
        + m.gate(x).mean() * torch.tensor(0.1).to(torch.bfloat16)
    ),
    "with a metric": lambda m, x, y, w: each(m, x, y).mean() + 0.0 * right(m, x, y),
    "of torch.vmap": lambda m, x, y, w: torch.vmap(F.mse_loss)(m.head(x), x[..., :3]).mean(),
    "minus a norm": lambda m, x, y, w: 0.1 * m.head.weight.norm() - each(m, x, y).mean(),
    "ctc": lambda m, x, y, w: ctc(m, x, y[:, :2].clamp(min=1)),
    "ctc, a sum": lambda m, x, y, w: ctc(m, x, y[:, :2].clamp(min=1), reduction="sum"),
    "ctc of flat labels": lambda m, x, y, w: ctc(m, x, y[:, :2].clamp(min=1).flatten()),
}

OF_ITS_OWN = "belong to one sample"
UNKNOWN = "weighted sum of torch's own losses"
WEIGHS = "weights of a loss inside"
DIVIDED = "divided by a sum over all samples"

REFUSED: dict[str, tuple[Lose, str]] = {
    "count changed": (lambda m, x, y, w: (each(m, x, y) * w).sum() / changed(w.sum()), UNKNOWN),
    "count changed by a view": (
        lambda m, x, y, w: (each(m, x, y) * w).sum() / changed_through_a_view(w.sum()),
        UNKNOWN,
    ),
    "value changed by a view": (
        lambda m, x, y, w: changed_through_a_view(each(m, x, y).mean()),
        UNKNOWN,
    ),
    "stack changed": (
        lambda m, x, y, w: doubled(torch.stack([each(m, x, y).mean(), m.gate(x).mean()])).sum(),
        OF_ITS_OWN,
    ),
    "times a spread": (lambda m, x, y, w: each(m, x, y).mean() * m.gate(x).detach().std(), WEIGHS),
    "plus a spread": (lambda m, x, y, w: each(m, x, y).mean() + m.gate(x).std(), WEIGHS),
    "times a tensor of the samples": (
        lambda m, x, y, w: each(m, x, y).mean() * x.new_full((), len(x)),
        "the same for any",
    ),
    "by a tensor of the samples": (
        lambda m, x, y, w: each(m, x, y).sum() / x.new_full((), len(x)),
        "the same for any",
    ),
    "a known sum by a part": (
        lambda m, x, y, w: known_sum(m, x, y, w) / w[: (len(x) + 1) // 2].sum(),
        OF_ITS_OWN,
    ),
    "a known mean by a count": (
        lambda m, x, y, w: F.mse_loss(m.head(x), x[..., :3]) / w.sum(),
        UNKNOWN,
    ),
    "trained weights": (
        lambda m, x, y, w: (each(m, x, y) * m.gate(x)[..., 0]).sum() / m.gate(x).sum(),
        UNKNOWN,
    ),
    "hook on a term": (lambda m, x, y, w: hooked(each(m, x, y).mean()) + m.gate(x).mean(), UNKNOWN),
    "hook on a known term": (
        lambda m, x, y, w: hooked(F.mse_loss(m.head(x), x[..., :3])) + m.gate(x).mean(),
        UNKNOWN,
    ),
    "reversed": (
        lambda m, x, y, w: m.gate(x).mean() + Reversed.apply(each(m, x, y).mean()),
        UNKNOWN,
    ),
    "bound from above alone": (
        lambda m, x, y, w: (each(m, x, y) * w).sum() / w.sum().clamp(max=9),
        WEIGHS,
    ),
    "bound from above by place": (
        lambda m, x, y, w: (each(m, x, y) * w).sum() / torch.clamp(w.sum(), None, 9),
        WEIGHS,
    ),
    "count that changes below its bound": (
        lambda m, x, y, w: (each(m, x, y) * w).sum() / changed_below(w.sum()),
        UNKNOWN,
    ),
    "bound from above": (
        lambda m, x, y, w: (each(m, x, y) * w).sum() / w.sum().clamp(1, 9),
        WEIGHS,
    ),
    "square": (lambda m, x, y, w: each(m, x, y).mean() ** 2, UNKNOWN),
    "largest": (lambda m, x, y, w: each(m, x, y).max(), UNKNOWN),
    "largest two": (lambda m, x, y, w: each(m, x, y).mean(1).topk(2)[0].mean(), OF_ITS_OWN),
    "half": (lambda m, x, y, w: each(m, x, y)[: (len(x) + 1) // 2].mean(), OF_ITS_OWN),
    "pairs": (lambda m, x, y, w: (z := m.head(x)[:, 0]).matmul(z.T).mean(), OF_ITS_OWN),
    "a weight": (lambda m, x, y, w: each(m, x, y).mean() + m.head.weight.sum(), OF_ITS_OWN),
    "times the samples": (lambda m, x, y, w: each(m, x, y).mean() * len(x), "the same for any"),
    "plus the samples": (lambda m, x, y, w: each(m, x, y).mean() + len(x), "the same for any"),
    "chosen": (lambda m, x, y, w: each(m, x, y)[w > 0].mean(), "must not depend on values"),
    "weights of all": (lambda m, x, y, w: (each(m, x, y) * w / w.mean()).mean(), "meet in Own"),
    "centred": (lambda m, x, y, w: (m.gate(x) - m.gate(x).mean(0)).square().mean(), "meet in Own"),
    "backwards": (lambda m, x, y, w: m.head(x).flip(0).square().mean(), "keep their place"),
    "cut to the longest": (
        lambda m, x, y, w: each(m, x, y)[:, : int((w > 0).sum(1).max())].mean(),
        DIVIDED,
    ),
    "known, cut to the longest": (
        lambda m, x, y, w: F.mse_loss(
            *(one[:, : int((w > 0).sum(1).max())] for one in (m.head(x), x[..., :3]))
        ),
        DIVIDED,
    ),
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_a_loss_of_its_own_values_is_exact(name: str, micro_batch: int) -> None:
    torch.manual_seed(0)
    model = Own(EXACT[name]).double()
    engine = Engine(model, micro_batch=micro_batch)
    for _ in range(2):
        full, inputs = copy_of(model), batch()
        expected = full(*inputs)
        model.zero_grad()
        full.zero_grad()
        expected.backward()
        loss = engine.backward(inputs)
        assert_exact(state_of(model, loss), state_of(full, expected))
    assert engine.plan is not None
    # What has no data cannot be traced, and a number that is read may be another one.
    assert engine.plan.exact or name.startswith(("ctc", "with a metric"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_over_samples_is_refused(name: str) -> None:
    torch.manual_seed(0)
    lose, says = REFUSED[name]
    model = Own(lose).double()
    with pytest.raises((LossError, NotExactError), match=says):
        Engine(model, micro_batch=3).backward(batch())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_in_a_checkpoint_is_advised_where_to_compute_it() -> None:
    """It was torch's own CheckpointError."""

    def lose(m: Own, x: Tensor, y: Tensor, _w: Tensor) -> Tensor:
        def inside(rows: Tensor) -> Tensor:
            return F.cross_entropy(m.head(rows).flatten(0, 1), y.flatten())

        found: Tensor = checkpoint(inside, x, use_reentrant=False)
        return found

    with pytest.raises(LossError, match="outside of torch.utils.checkpoint"):
        Engine(Own(lose).double(), micro_batch=3).backward(batch())


def test_nothing_that_counts_is_what_a_bound_makes_of_it() -> None:
    torch.manual_seed(0)
    model = Own(EXACT["with a bound"]).double()
    x, y, w = batch()
    loss = Engine(model, micro_batch=3).backward((x, y, 0 * w))
    assert loss == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_bound_of_what_cannot_be_counted_is_refused() -> None:
    def lose(m: Own, x: Tensor, y: Tensor, _w: Tensor) -> Tensor:
        there = (m.gate(x)[..., 0] > 0).double()
        return (each(m, x, y) * there).sum() / there.sum().clamp(min=1)

    with pytest.raises(LossError, match="a count with a bound"):
        Engine(Own(lose).double(), micro_batch=3).backward(batch())
