from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, same, snapshot, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from anybatch import Engine
from anybatch.errors import NotExactError


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(10, 5, dtype=torch.float64), torch.randint(0, 3, (10,))


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


class Counter(nn.Linear):
    """Counts its calls, by a new tensor or in place."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__(5, 3)
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_counter_counts_one_forward_a_step(loss: object, in_place: bool) -> None:
    model, (x, y) = Counter(in_place=in_place).double(), batch()

    def two_steps(copied: nn.Module) -> Tensor:
        engine = Engine(copied, loss, micro_batch=4)
        engine.backward(x, y)
        copied.zero_grad()
        return engine.backward(x, y)

    def truth(copied: nn.Module) -> Tensor:
        copied(x)
        value: Tensor = loss(copied(x), y)
        value.backward()
        return value

    assert_exact(state_after(model, two_steps), state_after(model, truth))


@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
@pytest.mark.parametrize(
    "norm",
    [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm],
    ids=["parametrization", "hook"],
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm`:FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_spectral_norm_iterates_once_a_step(loss: object, norm: object) -> None:
    model, (x, y) = nn.Sequential(norm(nn.Linear(5, 3))).double(), batch()
    got = state_after(model, lambda m: Engine(m, loss, micro_batch=4).backward(x, y))
    assert_exact(got, undivided(model, loss, x, y))


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_buffer_that_a_checkpoint_moves_again_is_refused_where_the_loss_is_coupled(
    size: int, reentrant: bool
) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.part = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.part, self.first(x), use_reentrant=reentrant)
            return out

    model, (x, y) = Inside().double(), batch()
    before = snapshot(model)
    with pytest.raises(NotExactError, match="must not move in backward .*part.parametrizations"):
        Engine(model, coupled, micro_batch=size).backward(x, y)
    assert same(before, snapshot(model))


class Average(nn.Linear):
    """Keeps a running mean of what it sees, as a codebook does."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Average(), "mean"),
        (
            nn.Sequential(
                nn.Unflatten(1, (1, 5)),
                nn.InstanceNorm1d(1, track_running_stats=True),
                nn.Flatten(),
                nn.Linear(5, 3),
            ),
            "1.running_mean",
        ),
    ],
    ids=["codebook", "InstanceNorm"],
)
def test_a_buffer_that_depends_on_the_samples_is_refused(
    model: nn.Module, name: str, steps: int
) -> None:
    model, (x, y) = model.train().double(), batch()
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    for _ in range(steps):
        before = snapshot(model)
        with pytest.raises(NotExactError, match=f"must not depend on the samples.*{name}.*eval"):
            engine.backward(x, y)
        assert same(before, snapshot(model))
    Engine(model, F.cross_entropy, micro_batch=10).backward(x, y)
    model.eval()
    if isinstance(model, nn.Sequential):
        engine.backward(x, y)


class Moves(nn.Linear):
    """Does something to its buffer in forward."""

    def __init__(self, buffer: Tensor | None, move: Callable[[Moves, Tensor], None]) -> None:
        super().__init__(5, 3)
        self.register_buffer("b", buffer)
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        self.move(self, x)
        return super().forward(x)


def nothing(module: Moves, x: Tensor) -> None:
    pass


def to_none(module: Moves, x: Tensor) -> None:
    module.b = None


def to_constant(module: Moves, x: Tensor) -> None:
    assert module.b is None, "every micro-batch starts where the step did"
    module.b = torch.tensor([float("nan"), 1.0])


def to_mean(module: Moves, x: Tensor) -> None:
    module.b = x.detach().mean(0)


@pytest.mark.product
@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
@pytest.mark.parametrize(
    ("buffer", "move"),
    [
        (torch.tensor([float("nan"), 1.0]), nothing),
        (torch.eye(3).to_sparse(), nothing),
        (torch.ones(()).expand(3), nothing),
        (None, nothing),
        (torch.ones(2), to_none),
        (None, to_constant),
    ],
    ids="nan sparse expanded none to-none from-none".split(),
)
def test_unusual_buffers_are_no_reason_to_fail(
    buffer: Tensor | None, move: Callable[[Moves, Tensor], None], loss: object
) -> None:
    """NaN was called a buffer that depends on the samples; None and sparse ones crashed."""
    model, (x, y) = Moves(buffer, move).double(), batch()

    def two_steps(copied: nn.Module) -> Tensor:
        engine = Engine(copied, loss, micro_batch=4)
        start = copied.b
        engine.backward(x, y)
        copied.b = start
        copied.zero_grad()
        return engine.backward(x, y)

    assert_exact(state_after(model, two_steps), undivided(model, loss, x, y))


def test_a_buffer_that_forward_fills_first_is_watched_too() -> None:
    """A running mean registered as None kept that of the last micro-batch."""
    model, (x, y) = Moves(None, to_mean).double(), batch()
    with pytest.raises(NotExactError, match="must not depend on the samples.*: b. Update a queue"):
        Engine(model, F.cross_entropy, micro_batch=4).backward(x, y)
    assert model.b is None


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
def test_a_scripted_model_with_a_buffer_is_exact(loss: object) -> None:
    """Reading its buffers raised AttributeError."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    plain, (x, y) = Scaled().double(), batch()
    model = torch.jit.script(plain)
    loss_value = Engine(model, loss, micro_batch=4).backward(x, y)
    got = {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    plain.zero_grad()  # they are the same parameters
    want = undivided(plain, loss, x, y)
    assert_exact(got | {"loss": loss_value}, {n: t for n, t in want.items() if "buffer" not in n})
