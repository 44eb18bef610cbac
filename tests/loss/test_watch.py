"""What is a sum over samples is seen, and what is not is never taken for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.loss.watch import Watch

N, C = 5, 3
WEIGHT = torch.rand(C)


def doubled(o: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    return loss + loss


def written_through_an_alias(o: Tensor) -> Tensor:
    copied = o.clone()
    copied[:].zero_()
    return copied


SUMS: dict[str, tuple[Callable[..., Any], list[float]]] = {
    "module": (nn.CrossEntropyLoss(), [1.0]),
    "lambda": (lambda o, y: F.cross_entropy(o, y), [1.0]),
    "keywords": (lambda o, y: F.cross_entropy(input=o, target=y, weight=WEIGHT), [1.0]),
    "tokens": (lambda o, y: F.cross_entropy(o.view(-1, C), y.reshape(-1)), [1.0]),
    "sliced": (lambda o, y: F.mse_loss(o[:, :-1], o.detach()[:, 1:]), [1.0]),
    "none index": (lambda o, y: F.mse_loss(o[:, None], o.detach().unsqueeze(1)), [1.0]),
    "log_softmax": (lambda o, y: F.nll_loss(o.log_softmax(-1), y), [1.0]),
    "activations": (lambda o, y: F.mse_loss(o.sigmoid(), o.detach().tanh()), [1.0]),
    "masks": (lambda o, y: F.binary_cross_entropy(o[:, 0].sigmoid(), (y > 0).float()), [1.0]),
    "weighted sum": (
        lambda o, y: 0.5 * F.cross_entropy(o, y) + F.mse_loss(o, torch.zeros_like(o)) / 4,
        [0.5, 0.25],
    ),
    "difference": (lambda o, y: F.cross_entropy(o, y) - 2 * F.l1_loss(o, o.detach()), [1.0, -2.0]),
    "python sum": (
        lambda o, y: sum([F.cross_entropy(o, y), F.cross_entropy(o * 2, y)]),
        [1.0, 1.0],
    ),
    "in place": (lambda o, y: F.cross_entropy(o, y).mul_(3.0), [3.0]),
    "twice": (doubled, [2.0]),
    "per length": (lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(o), [1 / N]),
    "per shape": (lambda o, y: F.cross_entropy(o, y, reduction="sum") / o.shape[0], [1 / N]),
    "negated": (lambda o, y: -F.cross_entropy(o, y), [-1.0]),
    "transposed back": (lambda o, y: F.mse_loss(o.t(), torch.zeros_like(o.t())), [1.0]),
    "constants": (
        lambda o, y: F.binary_cross_entropy_with_logits(o, torch.full((len(o), C), 0.9)),
        [1.0],
    ),
}


def watch(fn: Callable[..., Any], *, count_only: bool = False) -> Any:
    outputs = torch.randn(N, C, requires_grad=True)
    targets = torch.randint(0, C, (N,))
    if count_only:
        outputs = outputs.detach().to("meta").requires_grad_()
    seen = Watch(outputs, targets, N, count_only=count_only)
    with seen:
        result = fn(outputs, targets)
    return seen.combination(result)


@pytest.mark.parametrize("count_only", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_known_losses_is_seen(name: str, count_only: bool) -> None:
    fn, weights = SUMS[name]
    found = watch(fn, count_only=count_only)
    assert found is not None
    assert [weight for weight, _ in found] == pytest.approx(weights)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad * 2


COUPLED: dict[str, Callable[..., Any]] = {
    "InfoNCE": lambda o, y: F.cross_entropy(o @ o.T, torch.arange(len(o))),
    "centred": lambda o, y: F.cross_entropy(o - o.mean(0), y),
    "softmax over samples": lambda o, y: F.cross_entropy(o.softmax(0), y),
    "classes are samples": lambda o, y: F.cross_entropy(o.t(), torch.zeros(C, dtype=torch.long)),
    "two samples a row": lambda o, y: F.mse_loss(
        torch.cat([o, o.flip(0)], 1), torch.zeros(N, 2 * C)
    ),
    "broadcast to pairs": lambda o, y: F.mse_loss(
        o[:, :1].expand(N, N), y.float()[None].expand(N, N)
    ),
    "column against row": lambda o, y: F.mse_loss(o[:, :1], y.float()),
    "reduction none": lambda o, y: F.cross_entropy(o, y, reduction="none").mean(),
    "shuffled": lambda o, y: F.cross_entropy(o[torch.randperm(N)], y),
    "some samples": lambda o, y: F.cross_entropy(o[1:], y[1:]),
    "masked": lambda o, y: F.cross_entropy(o[y > 0], y[y > 0]),
    "square of a loss": lambda o, y: F.cross_entropy(o, y) ** 2,
    "product": lambda o, y: F.cross_entropy(o, y) * F.mse_loss(o, torch.zeros_like(o)),
    "offset": lambda o, y: F.cross_entropy(o, y) + 1.0,
    "exponential": lambda o, y: F.cross_entropy(o, y).exp(),
    "no loss at all": lambda o, y: (o.sum(1) - y).square().mean(),
    "weights from the batch": lambda o, y: F.cross_entropy(
        o, y, weight=1.0 / torch.bincount(y, minlength=C).clamp(min=1)
    ),
    "weights a sample": lambda o, y: F.binary_cross_entropy(
        o.sigmoid(), torch.ones_like(o), weight=torch.rand(N, 1)
    ),
    "own function": lambda o, y: F.cross_entropy(Twice.apply(o), y),
    "result through own function": lambda o, y: Twice.apply(F.cross_entropy(o, y)),
    "decided by a value": lambda o, y: F.cross_entropy(o, y) * (2.0 if y.sum() > 3 else 1.0),
    "reads an item": lambda o, y: F.cross_entropy(o, y) * float(y[0]),
    "written to": lambda o, y: F.cross_entropy(o.clone().sub_(o.mean(0)), y),
    "written through an alias": lambda o, y: F.cross_entropy(written_through_an_alias(o), y),
    "wrong samples for targets": lambda o, y: F.mse_loss(o, torch.rand(N, C)),
    "learned weight": lambda o, y: F.cross_entropy(o, y) * nn.Parameter(torch.ones(())),
    "legacy": lambda o, y: F.mse_loss(o, torch.zeros_like(o), size_average=False),
    "mse with weights": lambda o, y: F.mse_loss(o, torch.zeros_like(o), weight=torch.rand(N, C)),
}


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:size_average")
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples_or_is_not_known_is_never_taken_for_a_sum(name: str) -> None:
    assert watch(COUPLED[name]) is None


@pytest.mark.parametrize("name", ["own function", "result through own function"])
def test_an_own_gradient_is_seen_without_data_too(name: str) -> None:
    # Where a function that is not known meets outputs without data, torch says so.
    with suppress(RuntimeError):
        assert watch(COUPLED[name], count_only=True) is None


def test_the_targets_leaf_of_another_size_is_no_sample() -> None:
    outputs, other = torch.randn(N, C), torch.randint(0, C, (N + 1,))
    seen = Watch(outputs, other, N, count_only=True)
    with seen:
        result = F.cross_entropy(outputs, other[:N])
    assert seen.combination(result) is None
