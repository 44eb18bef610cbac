"""Optimizers that ask for the loss several times a step, and modules in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from torch import Tensor

pytest.importorskip(
    "lightning.pytorch", reason="pip install 'anybatch[lightning]' is needed for these tests"
)

from tests.integrations.fits import Net, assert_full_batch, fit, made

from anybatch.integrations.lightning import FullBatch, full_batch_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]


class Searches(Net):
    """Takes several evaluations of the loss a step, in automatic optimisation."""

    full = True

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class SearchesByHand(Searches):
    """The same in manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss(self, rows: Any) -> Tensor:
        return self.lose(*rows)[0]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            self.calls += 1
            loss = full_batch_loss(self, self.loss, batch) if self.full else self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@pytest.mark.large(few=1)
@pytest.mark.parametrize("class_", [Searches, SearchesByHand])
def test_a_search_takes_the_loss_of_the_full_batch_each_time(class_: type[Searches]) -> None:
    own, ours = made(class_), made(class_)
    own.full = False
    fit(own)
    fit(ours, FullBatch(micro_batch=3))
    assert ours.calls == own.calls
    assert_exact(ours.state_dict(), own.state_dict())


def test_a_module_that_the_trainer_makes_double() -> None:
    torch.manual_seed(0)
    assert_full_batch(fit(Net(), FullBatch(micro_batch=3), precision="64-true"))
