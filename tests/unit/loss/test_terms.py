"""What is a sum over samples is seen, and what is not is never taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.loss.function_trace import LossTrace, UnfollowableError, same_calls

N, C = 5, 3
WEIGHT = torch.rand(C)


def doubled(o: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    return loss + loss


def added_in_place(o: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    loss += 3 * F.mse_loss(o, torch.zeros_like(o))
    return loss


def added_through_an_alias(o: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    alias = loss.detach()
    alias += F.mse_loss(o, torch.zeros_like(o)).detach()
    return loss


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
    "added in place": (added_in_place, [1.0, 3.0]),
    "a number before": (lambda o, y: torch.mul(F.cross_entropy(o, y), 2).add(0), [2.0]),
    "twice": (doubled, [2.0]),
    "per length": (lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(o), [1 / N]),
    "per shape": (lambda o, y: F.cross_entropy(o, y, reduction="sum") / o.shape[0], [1 / N]),
    "an offset": (lambda o, y: F.cross_entropy(o, y) + 1.5, [1.0, 1.5]),
    "reduction none": (lambda o, y: 2 * F.cross_entropy(o, y, reduction="none").mean(), [2.0]),
    "no loss of torch's": (lambda o, y: (o.sum(1) - y).square().mean(), [1.0]),
    "negated": (lambda o, y: -F.cross_entropy(o, y), [-1.0]),
    "transposed back": (lambda o, y: F.mse_loss(o.t(), torch.zeros_like(o.t())), [1.0]),
    "pooled": (lambda o, y: F.cross_entropy(o[:, None].sum(1), y), [1.0]),
    "reduced": (
        lambda o, y: F.mse_loss(
            o.mean(1, keepdim=True), o.detach()[..., None].amax((1, 2))[:, None]
        ),
        [1.0],
    ),
    "of many": (lambda o, y: F.mse_loss(o.logsumexp(dim=-1), o.detach().prod(1)), [1.0]),
    "constants": (
        lambda o, y: F.binary_cross_entropy_with_logits(o, torch.full((len(o), C), 0.9)),
        [1.0],
    ),
}


def watch(fn: Callable[..., Any], size: int = N) -> tuple[LossTrace, Any]:
    """Return the watch of a loss of `size` samples, and what it found."""
    outputs = torch.empty(size, C, device="meta", requires_grad=True)
    targets = torch.arange(size) % C
    trace = LossTrace((outputs, (0,)), targets, size, torch.device("cpu"))
    try:
        with trace:
            result = fn(outputs, targets)
    except (UnfollowableError, RuntimeError):  # what meets outputs without data raises
        return trace, None
    return trace, trace.combination(result)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_recognised_losses_is_detected(name: str) -> None:
    fn, weights = SUMS[name]
    trace, found = watch(fn)
    assert found is not None
    assert [weight for weight, _ in found] == pytest.approx(weights)
    other, also = watch(fn, 7)
    assert also is not None
    assert same_calls(trace, other)


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
    "shuffled": lambda o, y: F.cross_entropy(o[torch.randperm(N)], y),
    "some samples": lambda o, y: F.cross_entropy(o[1:], y[1:]),
    "masked": lambda o, y: F.cross_entropy(o[y > 0], y[y > 0]),
    "square of a loss": lambda o, y: F.cross_entropy(o, y) ** 2,
    "product": lambda o, y: F.cross_entropy(o, y) * F.mse_loss(o, torch.zeros_like(o)),
    "mean of samples": lambda o, y: F.mse_loss(o.mean(0), torch.zeros(C)),
    "mean of all": lambda o, y: F.mse_loss(o.mean((-1, 0)), torch.zeros(())),
    "exponential": lambda o, y: F.cross_entropy(o, y).exp(),
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
    "added through an alias": added_through_an_alias,
    "wrong samples for targets": lambda o, y: F.mse_loss(o, torch.rand(N, C)),
    "learned weight": lambda o, y: F.cross_entropy(o, y) * nn.Parameter(torch.ones(())),
    "legacy": lambda o, y: F.mse_loss(o, torch.zeros_like(o), size_average=False),
    "mse with weights": lambda o, y: F.mse_loss(o, torch.zeros_like(o), weight=torch.rand(N, C)),
}


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:size_average")
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples_or_is_not_recognised_is_never_mistaken_for_a_sum(name: str) -> None:
    assert watch(COUPLED[name])[1] is None


SIZED: dict[str, Callable[..., Any]] = {
    "targets over the size": lambda o, y: F.mse_loss(o[:, 0], y.float() / len(y)),
    "delta of the size": lambda o, y: F.huber_loss(o, torch.zeros_like(o), delta=len(o) / 10),
    "smoothing of the size": lambda o, y: F.cross_entropy(o, y, label_smoothing=1 / len(o)),
    "filled with the size": lambda o, y: F.mse_loss(o, torch.full_like(o, 1 / len(o))),
    "full of the size": lambda o, y: F.mse_loss(o, torch.full((len(o), C), 1 / len(o))),
    "other loss for few": lambda o, y: (
        F.l1_loss(o, torch.zeros_like(o)) if len(o) < 6 else F.mse_loss(o, torch.zeros_like(o))
    ),
    "rows that do not grow": lambda o, y: F.mse_loss(
        o.reshape(30, -1), torch.zeros_like(o).reshape(30, -1)
    ),
    "columns of the size": lambda o, y: F.mse_loss(
        o[:, : len(o) - 4], torch.zeros_like(o[:, : len(o) - 4])
    ),
}


@pytest.mark.parametrize("name", SIZED)
def test_a_number_that_depends_on_the_size_shows_at_another_size(name: str) -> None:
    """Each of these was once streamed, and wrong by up to 1.2."""
    trace, found = watch(SIZED[name], 10)
    other, also = watch(SIZED[name], 5)
    assert found is None or also is None or not same_calls(trace, other)


def test_halves_of_a_list_of_labels_are_no_constant() -> None:
    def gan(o: Tensor, _: Tensor) -> Tensor:
        labels = torch.tensor([[1.0] * C] * (len(o) // 2) + [[0.0] * C] * (len(o) - len(o) // 2))
        return F.binary_cross_entropy_with_logits(o, labels)

    assert watch(gan)[1] is None


def test_a_loss_may_ask_for_the_device_and_gets_the_real_one() -> None:
    weight = torch.rand(C)
    _, found = watch(lambda o, y: F.cross_entropy(o, y, weight=weight.to(o.device)))
    assert found is not None
    assert float(found[0][1].denominator()) == pytest.approx(
        float(weight[torch.arange(N) % C].sum())
    )


def test_weights_a_sample_from_the_targets_are_samples_and_no_constants() -> None:
    def fn(o: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(o[:, 0].sigmoid(), (y > 0).float(), weight=1 + 4 * y.float())

    _, found = watch(fn)
    assert found is not None
    assert found[0][1].constants == ()


@pytest.mark.parametrize("size", [3, 5])
def test_samples_along_another_dimension_are_followed(size: int) -> None:
    outputs = torch.empty(4, size, C, device="meta", requires_grad=True)
    targets = torch.zeros(size, 4, dtype=torch.long, device="meta")
    trace = LossTrace((outputs, (1,)), targets, size, torch.device("cpu"))
    with trace:
        result = F.cross_entropy(outputs.permute(1, 2, 0), targets)
    assert trace.combination(result) is not None
    with trace:
        other = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    assert trace.combination(other) is None, "time-major rows against sample-major targets"


def test_nothing_is_written_to_the_targets_while_watching() -> None:
    """`y -= 1` ran on the person's targets, and ran twice."""
    outputs, targets = torch.empty(N, C, device="meta"), torch.ones(N, dtype=torch.long)
    trace = LossTrace((outputs, (0,)), targets, N, torch.device("cpu"))

    def in_place(o: Tensor, y: Tensor) -> Tensor:
        y -= 1
        return F.cross_entropy(o, y)

    def through_out(o: Tensor, y: Tensor) -> Tensor:
        torch.sub(y, 1, out=y)
        return F.cross_entropy(o, y)

    for fn in (in_place, through_out):
        with pytest.raises(UnfollowableError), trace:
            fn(outputs, targets)
        assert targets.tolist() == [1] * N


def test_an_output_without_samples_is_no_sample() -> None:
    """A [K, D] table of parameters with K == micro_batch was once taken for samples."""
    table = torch.empty(N, C, device="meta", requires_grad=True)
    targets = torch.zeros(N, dtype=torch.long, device="meta")
    trace = LossTrace((table, (None,)), targets, N, torch.device("cpu"))
    with trace:
        result = F.cross_entropy(table, targets)
    assert trace.combination(result) is None
