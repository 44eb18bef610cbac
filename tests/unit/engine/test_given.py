from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anybatch import LazyBatch
from anybatch.core.rng import Dice
from anybatch.engine.given import LOSS, Given
from anybatch.errors import AnybatchError
from anybatch.execution.kinds import shapes_of
from anybatch.lockstep.adaptive import Fixed
from anybatch.loss.watched import Watched


def given(optimizer: torch.optim.Optimizer | None = None, loss: nn.Module | None = None) -> Given:
    return Given(nn.Linear(5, 3), Watched(loss or F.cross_entropy), optimizer, Fixed("exact"))


def test_leaves_are_those_of_model_loss_optimizer_closure_and_batch_each_once() -> None:
    other, inside = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    loss = nn.CrossEntropyLoss()
    loss.scale = nn.Parameter(torch.ones(1))
    it = given(torch.optim.SGD([other]), loss)
    it.closure.append(inside)
    x = torch.ones(4, 5, requires_grad=True)
    batch = it.batch(x, torch.zeros(4).long())
    found = it.leaves(it.modules(), batch)
    want = [*it.model.parameters(), loss.scale, inside, other, x]
    assert {id(t) for t in found} == {id(t) for t in want}
    assert len(found) == len(want)
    assert [path for path, _ in it.modules() if path.startswith(LOSS)] == [LOSS]


def test_kinds_know_no_sizes_and_shapes_no_rows() -> None:
    it = given()
    y = torch.zeros(4).long()
    one, other = (it.batch(torch.ones(n, 5), y[:n]) for n in (4, 2))
    assert it.kinds(one) == it.kinds(other)
    assert shapes_of(one) == shapes_of(other) == ((5,), ())
    assert it.kinds(it.batch(torch.ones(4, 5).double(), y)) != it.kinds(one)
    lazy = it.batch(LazyBatch(TensorDataset(torch.ones(4, 5), y)), None)
    assert it.kinds(lazy) == ("lazy",)


def test_the_rows_that_are_loaded_of_a_lazy_batch_draw_nothing() -> None:
    class Draws(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            x, y = super().__getitem__(index)
            return x + torch.rand(()), y

    it, before = given(), Dice.now()
    batch = it.batch(LazyBatch(Draws(torch.ones(40, 5), torch.zeros(40).long())), None)
    case = it.case(batch, it.modules(), trains=True)
    assert (case.size, case.rows.size, case.lazy) == (40, 9, True)
    kind = it.kind(batch, it.modules(), trains=True, before=0)
    assert (kind.shapes, kind.size) == (((5,), ()), 40)
    assert Dice.now().same_as(before)


def test_targets_beside_a_lazy_batch_are_refused() -> None:
    lazy = LazyBatch(TensorDataset(torch.ones(4, 5), torch.zeros(4).long()))
    with pytest.raises(AnybatchError, match="must come from its items"):
        given().batch(lazy, torch.zeros(4))
