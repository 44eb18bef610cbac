"""Losses that a function computes of no functional of torch's: one pass where samples do not meet.

Each is compared with the undivided batch in float64. Those in `MEET` are the same functions with
one step in which samples meet, or in which something depends on their number: they cost a second
pass, and are as exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from anybatch import Engine, LazyBatch

N, C = 13, 3

Lose = Callable[[Tensor, Tensor], Tensor]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Return numbers that every call of a loss finds the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OF_CLASSES, MATRIX, OF_SAMPLES = numbers(C).abs(), numbers(C, 4), numbers(N)
ROW = numbers(1, C)


def squares(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).square()


def each(o: Tensor, y: Tensor, **named: Any) -> Tensor:
    return F.cross_entropy(o, y.argmax(1), reduction="none", **named)


def focal(o: Tensor, y: Tensor) -> Tensor:
    losses = each(o, y)
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def divergence(o: Tensor, y: Tensor) -> Tensor:
    mean, log_variance = o[:, :1], o[:, 1:2]
    return F.mse_loss(o, y) - 0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).mean()


def dice(o: Tensor, y: Tensor, dim: int | None = 1) -> Tensor:
    dims = [0, 1] if dim is None else [dim]
    both, every = (o.sigmoid() * y.abs()).sum(dims), (o.sigmoid() + y.abs()).sum(dims)
    return 1 - ((2 * both + 1) / (every + 1)).mean()


def gaussian(o: Tensor, y: Tensor) -> Tensor:
    mean, log_variance, _ = o.chunk(3, 1)
    return ((mean - y[:, :1]) ** 2 * torch.exp(-log_variance) + log_variance).mean()


def masked(o: Tensor, y: Tensor, least: float, **bound: float) -> Tensor:
    mask = (y > least).double()
    count = mask.sum().clamp(**bound) if bound else mask.sum()
    return (squares(o, y) * mask).sum() / count


def converted(o: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return (squares(o, y) * y.abs()).sum() / y.abs().sum().to(dtype)


def with_zero(o: Tensor, y: Tensor) -> Tensor:
    loss = torch.zeros(())
    for term in (squares(o, y).mean(), o.abs().mean()):
        loss = loss + term
    return loss


def two_masks(o: Tensor, y: Tensor) -> Tensor:
    return masked(o, y, 0.0) + 0.5 * (o.abs() * (y < 0)).sum() / ((y < 0).sum() + 1e-8)


SEPARATE: dict[str, Lose] = {
    "squares": lambda o, y: ((o - y) ** 2).mean(),
    "by their number": lambda o, y: squares(o, y).sum() / len(o),
    "by its elements": lambda o, y: squares(o, y).sum() / o.numel(),
    "sum of each, mean of all": lambda o, y: (o - y).abs().sum(1).mean(),
    "over every dimension": lambda o, y: squares(o, y).mean(dim=(0, -1)),
    "over the one dimension": lambda o, y: squares(o, y).sum(1).mean(0),
    "flattened": lambda o, y: (o.view(-1) - y.reshape(-1)).square().mean(),
    "soft targets of a function": lambda o, y: F.kl_div(
        F.log_softmax(o, 1), F.softmax(y, 1), reduction="batchmean"
    ),
    "soft targets": lambda o, y: -(o.log_softmax(1) * y.softmax(1)).sum(1).mean(),
    "gathered": lambda o, y: -o.log_softmax(1).gather(1, y.argmax(1, keepdim=True)).mean(),
    "one hot": lambda o, y: (o * F.one_hot(y.argmax(1), C)).sum(1).mean(),
    "cosine": lambda o, y: 1 - F.cosine_similarity(o, y).mean(),
    "distance": lambda o, y: F.pairwise_distance(o, y).mean(),
    "norm": lambda o, y: (o - y).norm(dim=1).mean(),
    "quantile": lambda o, y: torch.maximum(0.1 * (y - o), -0.9 * (y - o)).mean(),
    "hinge": lambda o, y: (1 - o * y).clamp(min=0).mean(),
    "log cosh": lambda o, y: torch.log(torch.cosh(o - y)).mean(),
    "where": lambda o, y: torch.where(o > y, 2 * (o - y), y - o).mean(),
    "neighbours in a row": lambda o, _: (o[:, 1:] - o[:, :-1]).square().mean(),
    "largest of each": lambda o, _: o.max(1).values.mean(),
    "best of each": lambda o, _: o.topk(2, 1).values.mean(),
    "joined classes": lambda o, y: torch.cat([o, y], 1).square().mean(),
    "stacked": lambda o, y: torch.stack([o, y, o * y], 1).square().mean(),
    "weights of classes": lambda o, y: (squares(o, y) * OF_CLASSES).mean(),
    "a row of weights": lambda o, y: (squares(o, y) * ROW).mean(),
    "weights from a count": lambda o, _: (o * torch.arange(C)).mean(),
    "a matrix": lambda o, _: (o @ F.normalize(MATRIX, dim=0)).square().mean(),
    "classes of a matrix": lambda o, y: F.cross_entropy(o @ MATRIX, y.argmax(1)),
    "a constant": lambda o, y: 2 - 0.5 * squares(o, y).mean(),
    "targets alone": lambda o, y: squares(o, y).mean() + y.square().mean(),
    "one by one": lambda o, y: each(o, y, weight=OF_CLASSES).mean(),
    "a sum by a mask": lambda o, y: each(o, y).sum() / (y.argmax(1) != 0).sum(),
    "a listed sum by a mask": lambda o, y: (
        F.cross_entropy(o, y.argmax(1), reduction="sum") / (y.argmax(1) != 0).sum()
    ),
    "masked": partial(masked, least=0.0),
    "masked, bounded": partial(masked, least=0.0, min=1),
    "nothing counts": partial(masked, least=9.0, min=1),
    "bounded above the count": partial(masked, least=0.0, min=100),
    "two masks": two_masks,
    "a count as an integer": partial(converted, dtype=torch.long),
    "a count in half precision": partial(converted, dtype=torch.half),
    "clipped, as PPO does": lambda o, y: -torch.min(o * y, o.clamp(0.8, 1.2) * y).mean(),
    "larger of two": lambda o, y: o.max(y).square().mean(),
    "weights of each class": lambda o, y: (
        (OF_CLASSES[y.argmax(1)] * each(o, y)).sum() / OF_CLASSES[y.argmax(1)].sum()
    ),
    "the score of each action": lambda o, y: (
        -(o.log_softmax(1)[torch.arange(len(o)), y.argmax(1)] * y[:, 0]).mean()
    ),
    "several losses, stacked": lambda o, y: torch.stack(
        [squares(o, y).mean(), 2 * o.abs().mean()]
    ).mean(),
    "from a new zero": lambda o, y: o.new_zeros(()) + squares(o, y).mean(),
    "expanded": lambda o, y: (y[:, :1].expand_as(o) * o).mean(),
    "products of each": lambda o, y: torch.bmm(o[:, None], y[:, :, None]).mean(),
    "preferences": lambda o, y: -F.logsigmoid(o[:, 0] - o[:, 1] + y[:, 0]).mean(),
    "outputs and targets, then a functional": lambda o, y: F.mse_loss(o * y, y),
    "soft classes of both": lambda o, y: F.cross_entropy(o + y, y.softmax(1)),
    "focal": focal,
    "divergence": divergence,
    "dice of each": dice,
    "two heads": gaussian,
    "from zero": with_zero,
}

MEET: dict[str, Lose] = {
    "centred": lambda o, _: (o - o.mean(0)).square().mean(),
    "centred targets": lambda o, y: (o - y.mean()).square().mean(),
    "variance": lambda o, y: squares(o, y).mean() + o.var(),
    "root of the mean": lambda o, y: squares(o, y).mean().sqrt(),
    "dice of all": partial(dice, dim=None),
    "dice of classes": partial(dice, dim=0),
    "column against row": lambda o, y: (o[:, :1] - y[:, 0]).square().mean(),
    "pairs": lambda o, y: (o[:, None] - y[None]).square().mean(),
    "products of pairs": lambda o, _: (o @ o.T).mean(),
    "products of classes": lambda o, _: (o.T @ o).square().mean(),
    "samples in a row": lambda o, _: (o[1:] - o[:-1]).square().mean(),
    "sums so far": lambda o, _: o.cumsum(0).mean(),
    "turned over": lambda o, y: (o - y.flip(0)).square().mean(),
    "another sample's": lambda o, y: (o - y.roll(1, 0)).square().mean(),
    "the first row": lambda o, y: (o - y[0]).square().mean(),
    "softmax over samples": lambda o, y: (o.softmax(0) * y).mean(),
    "largest of all": lambda o, y: (o / y.abs().amax(0)).mean(),
    "sorted": lambda o, _: (o.sort(0).values * torch.arange(len(o))[:, None]).mean(),
    "best of all": lambda o, _: o.topk(2, 0).values.mean(),
    "worst samples": lambda o, y: each(o, y).topk(5).values.mean(),
    "gathered over samples": lambda o, y: (o.gather(0, y.argsort(0)).square() * OF_CLASSES).mean(),
    "joined samples": lambda o, y: torch.cat([o, y]).softmax(0).square().mean(),
    "mixed rows": lambda o, y: (o.T.reshape(-1) - y.reshape(-1)).square().mean(),
    "norm of all": lambda o, y: (o - y).norm(),
    "cosine over samples": lambda o, y: 1 - F.cosine_similarity(o, y, dim=0).mean(),
    "chosen rows": lambda o, y: squares(o, y)[y > 0].mean(),
    "mask of the outputs": lambda o, y: (squares(o, y) * (o > 0)).sum() / (o > 0).sum(),
    "weights of samples": lambda o, y: (squares(o, y) * OF_SAMPLES[: len(o), None]).mean(),
    "weights that add up": lambda o, y: (squares(o, y).sum(1) * y.mean(1).softmax(0)).sum(),
    "times their number": lambda o, y: (squares(o, y) * len(o)).mean(),
    "power of their number": lambda o, y: ((o - y).abs() ** (1 + len(o) / 100)).mean(),
    "weights of their number": lambda o, y: (squares(o, y) * torch.full((C,), len(o))).mean(),
    "steps to their number": lambda o, _: (o * torch.linspace(0, len(o), C)).mean(),
    "a number by keyword": lambda o, y: (squares(o, y) * torch.tensor(data=float(len(o)))).mean(),
    "steps from their number": lambda o, _: (o * torch.arange(start=len(o), end=len(o) + C)).mean(),
    "an axis as in numpy": lambda o, y: (
        torch.cat([o[None], y[None]], axis=1)  # type: ignore[call-overload]
        .view(len(o), -1)
        .softmax(1)
        .square()
        .mean()
    ),
    "a margin of the batch": lambda o, y: F.smooth_l1_loss(o, y, beta=y.abs().amax()),  # type: ignore[arg-type]
    "a margin of each batch, then all": lambda o, y: F.huber_loss(
        o, y, reduction="none", delta=(o - y).detach().abs().mean()
    ).mean(),  # type: ignore[arg-type]
    "smoothing of the batch": lambda o, y: F.cross_entropy(
        o, y.argmax(1), label_smoothing=y.amax().sigmoid()
    ),  # type: ignore[arg-type]
    "an operator of the same name": lambda o, y: (OPERATORS.softplus(o) - y).square().mean(),
    "a function of the same name": lambda o, y: (normalize(o) - y).square().mean(),
    "tensors of a class of their own": lambda o, y: (
        (o - y.as_subclass(Centred)).as_subclass(Tensor).square().mean()
    ),
    "weights in the type of the outputs": lambda o, y: F.cross_entropy(
        o, y.argmax(1), weight=OF_CLASSES.to(o), label_smoothing=0.1
    ),
    "one target for all": lambda o, y: F.cosine_embedding_loss(o, y, torch.ones(1)),
    "largest of two, one of all": lambda o, _: torch.max(o, o.mean(0)).mean(),
    "another row of each": lambda o, y: (
        o[torch.arange(len(o)).flip(0), y.argmax(1)] * y[:, 0]
    ).mean(),
    "worst of two losses": lambda o, y: torch.stack([squares(o, y).mean(), o.abs().mean()]).max(),
    "one row for all": lambda o, y: (y[:1].expand(len(o), -1) * o).mean(),
    "an error that is caught": lambda o, y: (squares(o, y) / caught(o)).mean(),
    "another function of few": lambda o, y: (
        squares(o, y).mean() if len(y) > 5 else (o - y).abs().mean()
    ),
    "decided by a value": lambda o, y: (squares(o, y) if y.sum() > 0 else o.abs()).mean(),
    "an item": lambda o, y: (squares(o, y) * y[0, 0].item()).mean(),
    "by way of numpy": lambda o, y: (squares(o, y) * torch.from_numpy(y.numpy().mean(0))).mean(),
    "another gradient": lambda o, y: (Doubled.apply(o) * y).mean(),
    "a mean by another": lambda o, y: (o * y).sum() / y.square().mean(),
    "a hook": lambda o, y: hooked(o - y).square().mean(),
    "classes of the batch": lambda o, y: (o * F.one_hot(y.argmax(1))).sum(1).mean(),
    "weights of classes of the batch": lambda o, y: each(
        o, y, weight=torch.bincount(y.argmax(1), minlength=C).double()
    ).mean(),
}


LIBRARY = torch.library.Library("anybatch_own_functions", "DEF")
LIBRARY.define("softplus(Tensor x) -> Tensor")
LIBRARY.impl("softplus", lambda x: x - x.mean(0), "CompositeImplicitAutograd")
OPERATORS = torch.ops.anybatch_own_functions


def caught(o: Tensor) -> float:
    """Outputs without data have no largest value."""
    with contextlib.suppress(Exception):
        return o.detach().abs().max().item()
    return 1.0


def normalize(x: Tensor) -> Tensor:
    """Has the name of a function of torch's, and is told to function modes as theirs are."""
    if has_torch_function_unary(x):
        result: Tensor = handle_torch_function(normalize, (x,), x)
        return result
    return x - x.mean(0)


class Centred(Tensor):
    """Its difference from another tensor is another one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("sub", "__sub__", "rsub", "__rsub__"):
            a, b = (one.as_subclass(Tensor) for one in args)
            return a - b + b.mean(0)
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(5, C).double(), numbers(N, 5, seed=2), numbers(N, C, seed=3)


def found(lose: Lose, micro_batch: int, steps: int = 2) -> tuple[str, dict[str, Tensor]]:
    """Return the mechanism, and the state after the last of some steps: later ones may replay."""
    model, x, y = problem()
    engine = Engine(model, lose, micro_batch=micro_batch)
    for _ in range(steps):
        model.zero_grad()
        loss = engine.backward(x, y)
    assert engine.plan is not None
    return engine.plan.mechanism, state_of(model, loss)


def wanted(lose: Lose) -> dict[str, Tensor]:
    model, x, y = problem()
    return undivided(model, lose, x, y)


@pytest.mark.parametrize("micro_batch", [1, 4, 12])
@pytest.mark.parametrize("name", SEPARATE)
def test_one_pass_is_enough_where_samples_do_not_meet(name: str, micro_batch: int) -> None:
    mechanism, got = found(SEPARATE[name], micro_batch)
    assert mechanism == "streaming"
    assert_exact(got, wanted(SEPARATE[name]))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("micro_batch", [1, 4, 12])
@pytest.mark.parametrize("name", MEET)
def test_two_passes_are_taken_where_samples_meet(name: str, micro_batch: int) -> None:
    mechanism, got = found(MEET[name], micro_batch)
    assert mechanism == "two-pass"
    assert_exact(got, wanted(MEET[name]))


class Second(nn.Linear):
    """Its outputs hold the samples in their second dimension: [T, n, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


SECOND: dict[str, tuple[str, Lose]] = {
    "mean": ("streaming", lambda o, y: (o - y[None]).square().mean()),
    "each, then all": ("streaming", lambda o, y: (o.mean(0) - y).square().sum(1).mean()),
    "over samples": ("two-pass", lambda o, _: o.mean(1).square().mean()),
    "turned": ("two-pass", lambda o, y: (o.transpose(0, 1)[:, 0] - y.mean(0)).square().mean()),
    "matched from the first": ("two-pass", lambda o, _: (o - OF_SAMPLES[:, None]).abs().mean()),
}


@pytest.mark.parametrize("length", [4, N])
@pytest.mark.parametrize("name", SECOND)
def test_samples_in_the_second_dimension_are_followed(name: str, length: int) -> None:
    """As many steps as samples are no samples."""
    mechanism, lose = SECOND[name]
    x, y = numbers(N, length, 5), numbers(N, C)
    if name == "matched from the first" and length != N:
        pytest.skip("it has weights of N steps")
    torch.manual_seed(0)
    model = Second(5, C).double()
    want = undivided(model, lose, x, y)
    engine = Engine(model, lose, micro_batch=4)
    got = state_of(model, engine.backward(x, y))
    assert engine.plan is not None
    assert engine.plan.mechanism == mechanism
    assert_exact(got, want)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        _, x, y = problem()
        return x[index], y[index]


@pytest.mark.parametrize("name", ["squares", "focal", "masked", "two masks", "a constant"])
def test_it_is_exact_where_the_batch_is_loaded(name: str) -> None:
    """A sum of weights is of rows that are not here yet: it costs two passes."""
    model, _, _ = problem()
    engine = Engine(model, SEPARATE[name], micro_batch=4)
    got = state_of(model, engine.backward(LazyBatch(Rows())))
    assert_exact(got, wanted(SEPARATE[name]))
    assert engine.plan is not None
    assert (engine.plan.mechanism == "streaming") == (name in ("squares", "focal"))


class Weighted(nn.Module):
    """A loss with parameters of its own, which are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(numbers(C))

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        return (squares(o, y) * self.scale.exp()).mean()


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_parameters_of_the_loss_are_trained(micro_batch: int) -> None:
    lose = Weighted()
    model, x, y = problem()
    lose(model(x), y).backward()
    want = lose.scale.grad
    lose.scale.grad = None
    optimizer = torch.optim.SGD([*model.parameters(), *lose.parameters()], 0.1)
    engine = Engine(model, lose, optimizer, micro_batch=micro_batch)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.mechanism == "streaming"
    torch.testing.assert_close(lose.scale.grad, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_targets_that_are_trained_receive_their_gradient(micro_batch: int) -> None:
    model, x, _ = problem()
    y = numbers(N, C).requires_grad_()
    want = undivided(model, SEPARATE["soft targets"], x, y)
    gradient, y.grad = y.grad, None
    engine = Engine(model, SEPARATE["soft targets"], micro_batch=micro_batch)
    assert_exact(state_of(model, engine.backward(x, y)), want)
    assert y.grad is not None
    assert gradient is not None
    assert_exact({"targets": y.grad}, {"targets": gradient})


class Settings(nn.Module):
    """A loss whose code is straight, and reads attributes that may change between steps."""

    T = 1.0
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.mse_loss = nn.MSELoss(reduction="none")
        self.power, self.values = 2.0, [1.0]
        self.register_buffer("weight", OF_CLASSES.clone())

    def mean(self, x: Tensor) -> Tensor:
        return (x * self.scale).mean()

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        terms = self.mse_loss(o, y) ** self.power * self.weight
        return self.T * self.mean(terms) * self.values[0] + self.power


def replaced(lose: Settings) -> None:
    lose.mean = lambda x: 3 * x.mean()  # type: ignore[method-assign,assignment]


def of_class(name: str, lose: Settings) -> None:
    setattr(type(lose), name, 3.0)


CHANGES: dict[str, Callable[[Settings], Any]] = {
    "a number": lambda lose: setattr(lose, "power", 3.0),
    "a number of the class": partial(of_class, "scale"),
    "a number with a name of torch's": partial(of_class, "T"),
    "a number in a list": lambda lose: lose.values.__setitem__(0, 3.0),
    "a layer with a name of torch's": lambda lose: setattr(lose, "mse_loss", nn.L1Loss()),
    "an option of a layer": lambda lose: setattr(lose.mse_loss, "reduction", "sum"),
    "a method": replaced,
    "a buffer": lambda lose: lose.register_buffer("weight", 2 * OF_CLASSES),
    "a buffer, in place": lambda lose: lose.weight.mul_(2),  # type: ignore[operator,union-attr]
    "a forward": lambda lose: setattr(lose, "forward", lambda o, y: (o - y).abs().mean()),
    "a hook": lambda lose: lose.register_forward_hook(lambda _m, _i, loss: 2 * loss),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_module_reads_is_that_of_each_step(change: str) -> None:
    class Own(Settings):
        """A class that only this test changes."""

    lose = Own()
    model, x, y = problem()
    engine = Engine(model, lose, micro_batch=4)
    for step in range(4):
        if step == 2:
            CHANGES[change](lose)
        model.zero_grad()
        got = state_of(model, engine.backward(x, y))
        assert_exact(got, wanted(lose))


def test_several_rows_of_a_sample_are_not_those_of_its_number() -> None:
    """As many as samples are chosen, and those are rows of the first few."""

    def lose(o: Tensor, y: Tensor) -> Tensor:
        rows = o.view(-1, C).log_softmax(1)
        return -(rows[torch.arange(len(o)), y] * rows.exp()[: len(o), 0]).mean()

    torch.manual_seed(0)
    model, x, y = nn.Linear(5, C).double(), numbers(N, 4, 5), torch.arange(N) % C
    want = undivided(model, lose, x, y)
    assert_exact(state_of(model, Engine(model, lose, micro_batch=4).backward(x, y)), want)


def test_weights_that_change_between_steps_are_those_of_each_step() -> None:
    weights = [OF_CLASSES]

    def lose(o: Tensor, y: Tensor) -> Tensor:
        return (squares(o, y) * weights[0]).mean()

    model, x, y = problem()
    engine = Engine(model, lose, micro_batch=4)
    for step in range(3):
        weights[0] = OF_CLASSES * (step + 1) if step < 2 else OF_CLASSES[:1]
        model.zero_grad()
        assert_exact(state_of(model, engine.backward(x, y)), wanted(lose))


class Threshold(nn.Module):
    """Another loss for few samples; how few changes between steps."""

    least = 0

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        return squares(o, y).mean() if len(o) >= self.least else (o - y).abs().mean()


class OtherTensors(Threshold):
    """The same functions, of other tensors."""

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        target, weight = (y, y.exp()) if len(o) >= self.least else (y.exp(), y)
        return (squares(o, target) * weight).mean()


class OtherWeights(Threshold):
    """The same functions, of another tensor from outside."""

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        return (squares(o, y) * (OF_CLASSES if len(o) >= self.least else ROW)).mean()


class OtherMode(Threshold):
    """The same functions of the same tensors, without a gradient for few samples."""

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        with torch.set_grad_enabled(len(o) >= self.least):
            weight = o.exp()
        return (squares(o, y) * weight).mean()


@pytest.mark.parametrize("make", [Threshold, OtherTensors, OtherWeights, OtherMode])
def test_a_threshold_between_the_sizes_is_noticed_when_it_moves(make: type[Threshold]) -> None:
    """The full batch calls the same as before, and its micro-batches do not."""
    lose = make()
    model, x, y = problem()
    engine = Engine(model, lose, micro_batch=4)
    for least in (0, 0, 6, 0):
        lose.least = least
        model.zero_grad()
        assert_exact(state_of(model, engine.backward(x, y)), wanted(lose))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    """A sum of 60,000 numbers ends at 65504 in float16."""
    model = nn.Linear(4, 500, bias=False)
    x, y = torch.rand(128, 4), torch.zeros(128, 500)

    def lose(o: Tensor, y: Tensor) -> Tensor:
        return (o.to(dtype) - y.to(dtype)).abs().add(1).mean()

    want = undivided(model, lose, x, y)
    engine = Engine(model, lose, micro_batch=64)
    got = state_of(model, engine.backward(x, y))
    for name, value in want.items():
        torch.testing.assert_close(got[name].float(), value.float(), rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("name", ["squares", "masked", "two masks", "a constant", "focal"])
def test_an_evaluation_has_the_same_loss(name: str) -> None:
    model, x, y = problem()
    loss = Engine(model, SEPARATE[name], micro_batch=4).evaluate(x, y)
    torch.testing.assert_close(loss, wanted(SEPARATE[name])["loss"], rtol=1e-12, atol=0)


def test_a_batch_norm_between_waits_in_lockstep() -> None:
    _, x, y = problem()
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, C)).double()
    for name in ("focal", "masked, bounded", "dice of each"):
        want = undivided(model, SEPARATE[name], x, y)
        copied = copy_of(model)
        engine = Engine(copied, SEPARATE[name], micro_batch=4)
        assert_exact(state_of(copied, engine.backward(x, y)), want)
        assert engine.plan is not None
        assert engine.plan.mechanism == "lockstep"
