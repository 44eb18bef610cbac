from __future__ import annotations

import pytest
import torch
from tests.oracle import assert_exact, same, snapshot, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, NotExactError


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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_norm(), r"1 \(BatchNorm1d\).*batchnorm=\"local\".*GroupNorm"),
        (with_norm(track_running_stats=False).eval(), r"1 \(BatchNorm1d\)"),
        (Bare(positional=True).double(), r"batch_norm.* called in forward"),
        (Bare(positional=False).double(), r"batch_norm.* called in forward"),
        (
            nn.Sequential(*(nn.BatchNorm1d(5) for _ in range(6))).double(),
            r"3 \(BatchNorm1d\) and 2 more",
        ),
    ],
)
def test_batchnorm_in_training_is_refused_by_name_and_nothing_has_changed(
    model: nn.Module, message: str
) -> None:
    x, y = batch()
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    before = snapshot(model)
    for _ in range(2):
        with pytest.raises(NotExactError, match=message):
            engine.backward(x, y)
        assert same(before, snapshot(model))


def test_where_it_does_not_mix_samples_it_is_welcome() -> None:
    x, y = batch()
    model = with_norm()
    whole = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=10).backward(x, y))
    assert_exact(whole, undivided(model, F.cross_entropy, x, y))
    model.eval()
    split = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=4).backward(x, y))
    assert_exact(split, undivided(model, F.cross_entropy, x, y))


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


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
