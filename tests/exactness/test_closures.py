"""An optimizer that asks for the loss several times a step gets the full batch each time."""

from __future__ import annotations

import pytest
import torch
from tests.oracle import assert_exact, copy_of
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
def test_lbfgs_goes_the_way_that_the_undivided_batch_shows(norm: type[nn.Module]) -> None:
    x, y = torch.randn(40, 6).double(), torch.randint(3, (40,))
    layer = norm(8) if norm is nn.BatchNorm1d else norm()
    own = nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), nn.Linear(8, 3)).double()
    ours, requested = copy_of(own), {"own": 0, "ours": 0}
    engine = Engine(ours, F.cross_entropy, micro_batch=7)

    def train(name: str, model: nn.Module) -> None:
        options = {"lr": 0.5, "max_iter": 6, "line_search_fn": "strong_wolfe"}
        optimizer = torch.optim.LBFGS(model.parameters(), **options)  # type: ignore[arg-type]

        def closure() -> float:
            requested[name] += 1
            optimizer.zero_grad()
            if name == "ours":
                return float(engine.backward(x, y))
            loss: Tensor = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        for _ in range(3):
            optimizer.step(closure)

    train("own", own)
    train("ours", ours)
    assert requested["ours"] == requested["own"] > 6
    assert_exact(ours.state_dict(), own.state_dict())
