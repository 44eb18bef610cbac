from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.cases import inputs_of
from tests.oracle import assert_exact
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torch.utils.weak import TensorWeakRef

from anybatch import Engine, LazyBatch
from anybatch.devices import RNGState
from anybatch.engine.inputs import LOSS
from anybatch.errors import AnybatchError


def step_inputs(
    optimizer: torch.optim.Optimizer | None = None, loss: nn.Module | None = None
) -> Any:
    return inputs_of(nn.Linear(5, 3), loss or F.cross_entropy, optimizer=optimizer)


def test_leaves_are_those_of_model_loss_optimizer_closure_and_batch_each_once() -> None:
    other, inside = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    loss = nn.CrossEntropyLoss()
    loss.scale = nn.Parameter(torch.ones(1))
    it = step_inputs(torch.optim.SGD([other]), loss)
    it.closure.append(TensorWeakRef(inside))
    x = torch.ones(4, 5, requires_grad=True)
    batch = it.batch(x, torch.zeros(4).long())
    found = it.leaves(it.modules(), batch)
    want = [*it.model.parameters(), loss.scale, inside, other, x]
    assert {id(t) for t in found} == {id(t) for t in want}
    assert len(found) == len(want)
    assert [path for path, _ in it.modules() if path.startswith(LOSS)] == [LOSS]


def test_kinds_know_no_sizes() -> None:
    it = step_inputs()
    y = torch.zeros(4).long()
    one, other = (it.batch(torch.ones(n, 5), y[:n]) for n in (4, 2))
    assert one.form == other.form
    assert it.batch(torch.ones(4, 5).double(), y).form != one.form


def test_the_rows_that_are_loaded_of_a_lazy_batch_draw_nothing() -> None:
    class Draws(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            x, y = super().__getitem__(index)
            return x + torch.rand(()), y

    it, before = step_inputs(), RNGState.now()
    batch = it.batch(LazyBatch(Draws(torch.ones(40, 5), torch.zeros(40).long())), None)
    case = it.case(batch, it.modules(), trains=True)
    assert (case.size, case.rows.size, case.lazy) == (40, 9, True)
    signature = it.signature(batch, it.modules(), trains=True, before=0)
    assert (signature.shapes, signature.size) == (((5,), ()), 40)
    assert RNGState.now().same_as(before)


def test_targets_next_to_a_lazy_batch_are_refused() -> None:
    lazy = LazyBatch(TensorDataset(torch.ones(4, 5), torch.zeros(4).long()))
    with pytest.raises(AnybatchError, match="must come from its items"):
        step_inputs().batch(lazy, torch.zeros(4))


class FrozenBeginning(nn.Module):
    """What peft does for checkpoints: the output of a frozen embedding is made a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Embedding(50, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)
        self.made: list[weakref.ref[Tensor]] = []
        self.held: list[Tensor] = []
        self.alive: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.alive.append(sum(one() is not None for one in self.made))
        rows = self.frozen(ids).requires_grad_()
        self.made.append(weakref.ref(rows))
        out: Tensor = self.head(rows).mean(1)
        return out


@pytest.mark.parametrize("micro_batch", [3, 9])
def test_leaves_that_forward_makes_are_not_held_after_the_step(micro_batch: int) -> None:
    model = FrozenBeginning()
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=micro_batch)
    for width in (4, 5):
        engine.backward(torch.randint(50, (9, width)), torch.randint(3, (9,)))
    gc.collect()
    assert len(model.made) >= 18 // micro_batch
    assert not [one for one in model.made if one() is not None]


@pytest.mark.parametrize("rng", ["micro_batch", "batch"])
def test_leaves_that_forward_makes_end_with_their_micro_batch(rng: str) -> None:
    model = FrozenBeginning()
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=3, rng=rng)
    engine.backward(torch.randint(50, (12, 4)), torch.randint(3, (12,)))
    assert len(model.alive) >= 4
    assert max(model.alive) == 0


def test_a_leaf_that_forward_makes_and_the_program_holds_gets_its_gradient() -> None:
    class Holding(FrozenBeginning):
        def forward(self, ids: Tensor) -> Tensor:
            rows = self.frozen(ids).requires_grad_()
            if len(ids) == 3:
                self.held.append(rows)
            out: Tensor = self.head(rows).mean(1)
            return out

    model = Holding().double()
    x, y = torch.randint(50, (12, 4)), torch.randint(3, (12,))
    Engine(model, nn.CrossEntropyLoss(), micro_batch=3).backward(x, y)
    got = torch.cat([one.grad for one in model.held if one.grad is not None])
    whole = model.frozen(x).requires_grad_()
    nn.functional.cross_entropy(model.head(whole).mean(1), y).backward()
    assert whole.grad is not None
    assert_exact({"rows": got}, {"rows": whole.grad})
