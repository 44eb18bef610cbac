"""A loss of torch's is called in one step, and replayed while nothing that it reads has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import LossError
from anybatch.loss import replay
from anybatch.loss.replay import form_of, read_values

N = 11
WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.double)
SMOOTHING = 0.1
Change = Callable[[], None]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(N, 5).double(), torch.randint(0, 3, (N,))


def weighted(out: Tensor, y: Tensor) -> Tensor:
    first = F.cross_entropy(out, y, weight=WEIGHT, label_smoothing=SMOOTHING)
    return 0.5 * first + F.cross_entropy(out, y, reduction="sum") / len(out)


def branching(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) if len(out) > 3 else F.cross_entropy(out, y, weight=WEIGHT)


def adding(out: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(out, y)
    loss += F.cross_entropy(out, y)
    return loss


def closing(value: Any) -> Callable[..., Tensor]:
    return lambda out, y: F.cross_entropy(out, y, weight=value)


def twice(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda out, y: 2 * loss(out, y)


class Own(nn.CrossEntropyLoss):
    pass


class Looking:
    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)


class Focal(nn.Module):
    gamma = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.CrossEntropyLoss(reduction="none")

    def power(self, losses: Tensor) -> Tensor:
        return (1 - torch.exp(-losses)) ** self.gamma

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        losses = self.each(out, y)
        return (self.power(losses) * losses).mean()


class Reads(Focal):
    def __init__(self) -> None:
        super().__init__()
        self.mean = [1.0]

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return self.mean[0] * F.cross_entropy(out, y)


class Calls(nn.Module):
    """An attribute of another module is read, which may be computed by any code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Focal()

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return self.inner.power(F.cross_entropy(out, y, reduction="none")).mean()


INNER = Focal()

REPLAYED: dict[str, Any] = {
    "functional": F.cross_entropy,
    "module": nn.CrossEntropyLoss(weight=WEIGHT),
    "subclass": Own(),
    "partial": partial(F.cross_entropy, ignore_index=1),
    "two terms": weighted,
    "closure": closing(WEIGHT),
    "reshaped": lambda out, y: F.cross_entropy(out.view(-1, out.size(-1)), y.flatten()),
    "sliced": lambda out, y: F.mse_loss(out[:, 1:], out.detach()[:, :-1].sigmoid()),
    "target of the type": lambda out, y: F.mse_loss(out[:, 0], y.double() / 2),
    "module in a closure": twice(nn.CrossEntropyLoss()),
}
TRACED: dict[str, Any] = {
    "branches": branching,
    "in place": adding,
    "reads a list": Reads(),
    "another module inside": Calls(),
    "another module": lambda out, y: INNER.mean(F.cross_entropy(out, y, reduction="none")),
    "object": Looking(),
    "method": Looking().__call__,
    "learned weight": closing(WEIGHT.clone().requires_grad_()),
    "other names": lambda out, y: F.cross_entropy(out, y) + out.grad_fn.metadata["x"],
    "other functions": lambda out, y: F.cross_entropy(sorted([out])[0], y),
}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the replays."""
    found: list[int] = []
    parts = replay.Replay.parts

    def count(self: replay.Replay, tensors: list[Tensor]) -> Any:
        found.append(len(tensors[0]))
        return parts(self, tensors)

    monkeypatch.setattr(replay.Replay, "parts", count)
    return found


@pytest.mark.parametrize("name", REPLAYED)
def test_a_later_step_is_replayed_and_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, found = net(), REPLAYED[name], counted(monkeypatch)
    engine = Engine(model, loss, micro_batch=4)
    for seed in range(3):
        found.clear()
        model.zero_grad()
        inputs = batch(seed)
        want = undivided(model, loss, *inputs)
        assert_exact(state_of(model, engine.backward(*inputs)), want)
        assert found == ([4] if seed == 0 else [4, 4, 3])


@pytest.mark.parametrize(
    "loss",
    [Focal(), lambda out, y: F.cross_entropy(out, y, reduction="none").square().mean()],
)
def test_the_trace_of_a_loss_with_values_of_its_own_is_saved(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches call it; the full batch without data is traced once."""
    model, traced = net(), list[int]()
    engine = Engine(model, loss, micro_batch=4)
    callable_loss: Any = type(engine._inputs.loss)
    trace = callable_loss._traced

    def counting(self: Any, scope: Any) -> Any:
        traced.append(scope.size)
        return trace(self, scope)

    monkeypatch.setattr(callable_loss, "_traced", counting)
    for seed in range(3):
        model.zero_grad()
        inputs = batch(seed)
        want = undivided(model, loss, *inputs)
        assert_exact(state_of(model, engine.backward(*inputs)), want)
    assert len(traced) == 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.cross_entropy(out.view(len(y), -1), y),
        lambda out, y: F.mse_loss(out * (y.dim() / len(y)), out.detach()),
        lambda out, y: F.nll_loss(F.log_softmax(out, 1), y),
    ],
)
def test_a_number_of_samples_in_an_argument_is_not_replayed(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = net(), counted(monkeypatch)
    engine = Engine(model, loss, micro_batch=4)
    for seed in range(3):
        model.zero_grad()
        inputs = batch(seed)
        want = undivided(model, loss, *inputs)
        assert_exact(state_of(model, engine.backward(*inputs)), want)
    assert not found


@pytest.mark.parametrize("name", TRACED)
def test_what_may_do_another_thing_in_each_step_is_not_replayed(name: str) -> None:
    assert not read_values(TRACED[name], [])


def test_a_hook_or_a_forward_of_its_own_ends_the_replay() -> None:
    loss = nn.CrossEntropyLoss()
    assert read_values(loss, [])
    handle = loss.register_forward_hook(lambda *_: None)
    assert not read_values(loss, [])
    handle.remove()
    assert read_values(loss, [])
    loss.forward = F.cross_entropy  # type: ignore[method-assign]
    assert not read_values(loss, [])


@pytest.mark.parametrize(
    ("loss", "home", "name"),
    [
        (nn.CrossEntropyLoss(), F, "cross_entropy"),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss, "forward"),
        (F.mse_loss, torch, "sum"),  # which that calls
        (lambda out, y: F.mse_loss(out, y).square(), Tensor, "square"),
        (lambda out, y: 0.5 * F.mse_loss(out, y), Tensor, "__rmul__"),
        (nn.MSELoss(), nn.Module, "__call__"),
    ],
)
def test_a_function_that_a_loss_may_run_ends_the_replay_and_another_does_not(
    loss: Any, home: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "gaussian_nll_loss", lambda *_: None)
    assert read_values(loss, [])
    monkeypatch.setattr(home, name, lambda *_: None)
    assert not read_values(loss, [])


def changes(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, Change]]:
    """Return losses, and changes between two steps of what they read."""
    smoothing, ignoring, summed, hooked = (nn.CrossEntropyLoss() for _ in range(4))
    heavy = nn.CrossEntropyLoss(WEIGHT.clone())

    def scaled(out: Tensor, y: Tensor) -> Tensor:
        return number * F.cross_entropy(out, y)

    number = 1.0

    def set_number() -> None:
        nonlocal number
        number = 3.0

    def replaced(out: Tensor, y: Tensor, **options: Any) -> Tensor:
        return 2 * F.nll_loss(out.log_softmax(1), y) if options else out.sum()

    def ten_times(_module: Any, _inputs: Any, result: Tensor) -> Tensor:
        return 10 * result

    forward, call = nn.CrossEntropyLoss.forward, nn.Module.__call__

    @wraps(forward)
    def trebled(self: Any, out: Tensor, y: Tensor) -> Tensor:
        return 3 * forward(self, out, y)

    def called(self: Any, *args: Any) -> Any:
        return call(self, *args) * (2 if isinstance(self, nn.CrossEntropyLoss) else 1)

    def with_attribute(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)

    with_attribute.T = 1.0  # type: ignore[attr-defined]

    def in_order(out: Tensor, y: Tensor, *, first: float = 1.0, later: float = 2.0) -> Tensor:
        return first * F.cross_entropy(out, y) + later * F.cross_entropy(later * out, y)

    log_softmax = F.log_softmax

    @wraps(log_softmax)
    def doubled(out: Tensor, dim: int) -> Tensor:
        return 2 * log_softmax(out, dim)

    here = globals()
    return {
        "number in a closure": (scaled, set_number),
        "number in a global": (weighted, partial(monkeypatch.setitem, here, "SMOOTHING", 0.4)),
        "tensor in a global": (
            weighted,
            partial(monkeypatch.setitem, here, "WEIGHT", WEIGHT.flip(0)),
        ),
        "option": (smoothing, partial(setattr, smoothing, "label_smoothing", 0.3)),
        "ignored": (ignoring, partial(setattr, ignoring, "ignore_index", 1)),
        "reduction": (summed, partial(setattr, summed, "reduction", "sum")),
        "values of a weight": (heavy, lambda: heavy.weight.mul_(WEIGHT)),  # type: ignore[union-attr]
        "hook": (hooked, lambda: hooked.register_forward_hook(ten_times)),
        "functional": (
            nn.CrossEntropyLoss(),
            partial(monkeypatch.setattr, F, "cross_entropy", replaced),
        ),
        "module of functionals": (
            lambda out, y: nn.functional.cross_entropy(out, y),
            partial(monkeypatch.setattr, nn, "functional", SimpleNamespace(cross_entropy=replaced)),
        ),
        "functional that is no loss": (
            lambda out, y: F.cross_entropy(F.softplus(out), y),
            partial(monkeypatch.setattr, F, "softplus", torch.tanh),
        ),
        "forward of a class of torch": (
            nn.CrossEntropyLoss(),
            partial(monkeypatch.setattr, nn.CrossEntropyLoss, "forward", trebled),
        ),
        "call of all modules": (
            nn.CrossEntropyLoss(),
            partial(monkeypatch.setattr, nn.Module, "__call__", called),
        ),
        "functional that is wrapped": (
            lambda out, y: -(F.log_softmax(out, 1) * F.one_hot(y, out.shape[1])).sum(1).mean(),
            partial(monkeypatch.setattr, F, "log_softmax", doubled),
        ),
        "method that torch calls for an operator": (
            lambda out, _y: (out - 1).abs().mean(),
            partial(monkeypatch.setattr, Tensor, "sub", lambda one, other: 3 * one.add(-other)),
        ),
        "attribute of a function": (
            lambda out, y: with_attribute.T * with_attribute(out, y),  # type: ignore[attr-defined]
            partial(setattr, with_attribute, "T", 5.0),
        ),
        "names of default values": (
            in_order,
            partial(setattr, in_order, "__kwdefaults__", {"later": 1.0, "first": 2.0}),
        ),
    }


@pytest.mark.parametrize("name", changes(pytest.MonkeyPatch()))
def test_a_change_between_steps_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, change = changes(monkeypatch)[name]
    model = net()
    engine = Engine(model, loss, micro_batch=4)
    for step in range(4):
        if step == 2:
            change()
        model.zero_grad()
        inputs = batch(step)
        want = undivided(model, loss, *inputs)
        assert_exact(state_of(model, engine.backward(*inputs)), want)


def test_a_step_of_another_size_is_planned_after_a_replay() -> None:
    """A dry run copies the loss: what it had traced could not be copied."""
    model = net()
    engine = Engine(model, nn.CrossEntropyLoss(WEIGHT), memory="64MiB", micro_batch=4)
    for size in (11, 11, 7, 9):
        inputs, targets = batch(size)
        inputs, targets = inputs[:size], targets[:size]
        model.zero_grad()
        want = undivided(model, nn.CrossEntropyLoss(WEIGHT), inputs, targets)
        assert_exact(state_of(model, engine.backward(inputs, targets)), want)
        assert copy.deepcopy(engine._inputs.loss)._replays == {}


class Weighing(nn.Module):
    """Changes the weight of the loss in its forward, from some step on."""

    def __init__(self, loss: nn.CrossEntropyLoss) -> None:
        super().__init__()
        self.body, self.loss, self.moves = net(), [loss], False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.loss[0].weight
        if self.moves and weight is not None:
            weight.mul_(1 + x.square().mean().detach())
        out: Tensor = self.body(x)
        return out


def test_a_weight_that_forward_writes_is_refused_in_a_later_step_too() -> None:
    loss = nn.CrossEntropyLoss(WEIGHT.clone())
    model = Weighing(loss)
    engine = Engine(model, loss, micro_batch=4)
    for seed in range(3):
        engine.backward(*batch(seed))
    model.moves = True
    with pytest.raises(LossError, match=r"reads .*weight"):
        engine.backward(*batch(3))


def test_a_mapping_in_another_order_is_another_form() -> None:
    a, b, y = torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2)
    assert form_of({"a": a, "b": b}, y) != form_of({"b": b, "a": a}, y)
    assert form_of({"a": a, "b": b}, y) == form_of({"a": b, "b": a}, y)
    assert form_of([a, b], y) != form_of((a, b), y)
    assert form_of(nn.Parameter(a), y) is None
    assert form_of(a, {1: object()}) is None


def two_outputs(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out["a"], y) + 2 * F.cross_entropy(out["b"], y)


class TwoHeads(nn.Module):
    """Returns its outputs in another order from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.swaps = net(), net(), False
        nn.init.normal_(self.b[0].weight)  # type: ignore[index,arg-type]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = {"a": self.a(x), "b": self.b(x)}
        return dict(reversed(found.items())) if self.swaps else found


def test_outputs_in_another_order_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = TwoHeads(), counted(monkeypatch)
    engine = Engine(model, two_outputs, micro_batch=4)
    for seed in range(4):
        model.swaps = seed % 2 == 1
        model.zero_grad()
        inputs = batch(seed)
        want = undivided(model, two_outputs, *inputs)
        assert_exact(state_of(model, engine.backward(*inputs)), want)
    assert found
