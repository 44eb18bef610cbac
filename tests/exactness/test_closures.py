"""Closures: an optimizer that asks for the loss several times, and a loss that calls the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Loss
from anybatch.errors import NotExactError


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


class Moving(nn.Module):
    """A model with a buffer that each call moves, or with a part that only its loss calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body, self.head = kind, nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Identity()
        if kind == "spectral norm":
            nn.utils.parametrizations.spectral_norm(self.body)
        self.register_buffer("calls", torch.tensor(0.0))
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.body(x))
        if self.kind == "counter":
            self.calls += 1
            z = z * (1 + self.calls / 8)
        if self.kind == "replaced":
            self.calls = self.calls + self.head.weight.detach().mean()
        found: Tensor = self.head(z.tanh())
        return found

    def distance(self, outputs: Tensor, x: Tensor) -> Tensor:
        """Return one distance a sample, by another call of the model or from a running centre."""
        if self.kind != "centre":
            return (outputs - self(x).detach()).square().mean(1)
        centre, self.centre = self.centre, 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return (outputs - centre).square().mean(1)


KINDS = ["still", "counter", "replaced", "spectral norm", "batch norm", "centre"]


@pytest.mark.parametrize("form", ["mean", "coupled", "declared"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [{"micro_batch": 4}, {"micro_batch": 13}, {"memory": "4MiB"}])
def test_a_loss_that_calls_a_part_of_the_model_is_exact_or_refused(
    kind: str, form: str, size: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    own = Moving(kind).double()
    ours, x, noisy = copy_of(own), torch.randn(13, 6).double(), torch.randn(13, 6).double()

    def loss_of(model: Moving) -> Any:
        def of_each(outputs: Tensor, noisy: Tensor) -> Tensor:
            return model.distance(outputs, noisy) + outputs.square().sum(1)

        def of_all(outputs: Tensor, noisy: Tensor) -> Tensor:
            spread = outputs.softmax(1).mean(0).square().sum() if form == "coupled" else 0
            return of_each(outputs, noisy).mean() + spread

        return Loss.per_sample(of_each) if form == "declared" and model is ours else of_all

    loss = loss_of(own)(own(x), noisy)
    loss.backward()
    engine, before = Engine(ours, loss_of(ours), **size), state_of(ours, loss)
    try:
        assert_exact(state_of(ours, engine.backward(x, noisy)), state_of(own, loss))
    except NotExactError:
        assert size == {"micro_batch": 4}
        assert kind != "still"
        assert_exact(state_of(ours, loss), before)
