from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, same, snapshot, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Loss
from anybatch.errors import NotExactError
from anybatch.lockstep.batchnorm import MeetingNorms, Tracked


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(10, 5, dtype=torch.float64), torch.randint(0, 5, (10,))


def with_norm(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, **options), nn.Linear(5, 5)).double()


class Bare(nn.Linear):
    def __init__(self, *, positional: bool) -> None:
        super().__init__(5, 5)
        self.positional = positional

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.positional:
            return F.batch_norm(out, None, None, None, None, True)
        return F.batch_norm(out, None, None, training=True)


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


MODELS: dict[str, nn.Module] = {
    "module": with_norm(),
    "without running statistics, in eval": with_norm(track_running_stats=False).eval(),
    "bare, by position": Bare(positional=True).double(),
    "bare, by keyword": Bare(positional=False).double(),
    "six in a row": nn.Sequential(*(nn.BatchNorm1d(5) for _ in range(6))).double(),
}


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("micro_batch", [4, 1])
@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
@pytest.mark.parametrize("name", MODELS)
def test_it_normalises_by_the_full_batch_and_moves_its_statistics_once_a_step(
    name: str, loss: Any, micro_batch: int
) -> None:
    x, y = batch()
    engines: list[Engine] = []

    def full(model: nn.Module) -> Tensor:
        for n in (10, 7):
            found = loss(model(x[:n]), y[:n])
            found.backward()
        return found

    def split(model: nn.Module) -> Tensor:
        engines.append(Engine(model, loss, micro_batch=micro_batch))
        for n in (10, 7):
            found = engines[0].backward(x[:n], y[:n])
        return found

    assert_exact(state_after(MODELS[name], split), state_after(MODELS[name], full))
    plan = engines[0].plan
    assert plan is not None
    assert (plan.mechanism, bool(plan.exact)) == ("lockstep", True)
    assert "samples meet in BatchNorm" in str(plan)


def test_evaluate_in_training_mode_gives_the_loss_and_the_statistics_of_the_full_batch() -> None:
    model, (x, y) = with_norm(), batch()

    def full(copied: nn.Module) -> Tensor:
        with torch.no_grad():
            found: Tensor = F.cross_entropy(copied(x), y)
        return found

    got = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=4).evaluate(x, y))
    assert_exact(got, state_after(model, full))


def test_lanes_of_one_value_a_channel_are_fine_and_a_batch_of_one_is_torchs_own_error() -> None:
    model, (x, y) = with_norm(), batch()
    engine = Engine(model, F.cross_entropy, micro_batch=1)
    assert_exact(
        state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=1).backward(x, y)),
        undivided(model, F.cross_entropy, x, y),
    )
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        engine.backward(x[:1], y[:1])


class Hidden(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return torch.native_batch_norm(out, None, None, None, None, True, 0.1, 1e-5)[0]


def compiled() -> nn.Module:
    model = with_norm()
    model[1].compile(backend="eager")
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "compiled": (
        compiled,
        F.cross_entropy,
        r"1 \(BatchNorm1d\)\), and torch.compile has compiled 1, .*batchnorm=\"local\".*GroupNorm",
    ),
    "Algorithm 1": (
        lambda: nn.Sequential(*(nn.BatchNorm1d(5) for _ in range(6))).double(),
        Loss.algorithm1(F.cross_entropy),
        r"3 \(BatchNorm1d\) and 2 more\), and Algorithm 1 to the letter computes the loss of each",
    ),
    "a kernel called by its name": (
        lambda: Hidden().double(),
        F.cross_entropy,
        r"native_batch_norm called in forward.*batchnorm=\"local\"",
    ),
    "moving buffers": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)), nn.BatchNorm1d(5)
        ).double(),
        F.cross_entropy,
        r"must not move while .*: 0.parametrizations.weight.0._u.*batchnorm=\"local\"",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_micro_batches_cannot_wait_it_is_refused_by_name_and_nothing_has_changed(
    name: str,
) -> None:
    make, loss, message = REFUSED[name]
    model, (x, y) = make(), batch()
    engine = Engine(model, loss, micro_batch=4)
    before = snapshot(model)
    for _ in range(2):
        with pytest.raises(NotExactError, match=message):
            engine.backward(x, y)
        assert same(before, snapshot(model))


def test_where_it_does_not_mix_samples_it_is_welcome() -> None:
    x, y = batch()
    model = with_norm()
    full = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=10).backward(x, y))
    assert_exact(full, undivided(model, F.cross_entropy, x, y))
    model.eval()
    split = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=4).backward(x, y))
    assert_exact(split, undivided(model, F.cross_entropy, x, y))


@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
def test_local_is_each_micro_batch_by_itself(loss: object) -> None:
    model, (x, y) = with_norm(), batch()

    def by_hand(copied: nn.Module) -> Tensor:
        value: Tensor = loss(torch.cat([copied(x[i : i + 4]) for i in range(0, 10, 4)]), y)
        value.backward()
        return value

    got = state_after(
        model, lambda m: Engine(m, loss, micro_batch=4, batchnorm="local").backward(x, y)
    )
    assert_exact(got, state_after(model, by_hand))
    engine = Engine(model, loss, micro_batch=4, batchnorm="local")
    engine.backward(x, y)
    assert engine.plan is not None
    assert not engine.plan.exact
    assert "1 BatchNorm layers normalise each micro-batch by itself" in str(engine.plan)


class Heard(MeetingNorms):
    """Records the functions that it hears."""

    def __init__(self) -> None:
        super().__init__(Tracked([]))
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


def test_the_lines_of_its_backward_are_not_heard() -> None:
    """The mode is on in backward, for what checkpoints compute again, and would slow each line."""
    x = torch.randn(4, 3, requires_grad=True)
    with Heard() as norms:
        total = F.batch_norm(x, None, None, training=True).square().sum()
        norms.names.clear()
        total.backward()  # type: ignore[no-untyped-call]
    assert "backward" in norms.names
    assert "addcmul_" not in norms.names
