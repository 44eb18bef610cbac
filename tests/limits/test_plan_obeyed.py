"""A plan is data: its text alone drives the step that it describes, by every mechanism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Plan
from anybatch.execution.streaming import stream


class Case(NamedTuple):
    """A training, and the plan that is made of it."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: tuple[Any, Any]
    options: dict[str, Any]
    mechanism: str


def images(norm: Callable[[int], nn.Module] = nn.Identity) -> nn.Module:
    layers = nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    return nn.Sequential(*layers).double()


def deep() -> nn.Module:
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())]).double()


def spread(out: Tensor) -> Tensor:
    """A loss in which all samples meet."""
    return out.std(0).sum() + out.mean(0).square().sum()


X, Y = torch.randn(64, 3, 8, 8, dtype=torch.double), torch.randint(5, (64,))
ROWS = torch.randn(256, 64, dtype=torch.double)
CASES = {
    "undivided": Case(images, F.cross_entropy, (X, Y), {"memory": "4MiB"}, "undivided"),
    "streaming": Case(images, F.cross_entropy, (X, Y), {"memory": "256KiB"}, "streaming"),
    "two-pass": Case(deep, spread, (ROWS, None), {"memory": "8MiB", "micro_batch": 64}, "two-pass"),
    "lockstep": Case(
        lambda: images(nn.BatchNorm2d), F.cross_entropy, (X, Y), {"memory": "400KiB"}, "lockstep"
    ),
    "saved tensors in a file": Case(
        deep, F.mse_loss, (ROWS, ROWS), {"memory": "1MiB", "offload": "file"}, "streaming"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_run_from_nothing_but_the_text_of_a_plan(name: str) -> None:
    """Its mechanism, sizes and offloading are the plan's, nothing is forecast, and it is exact."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    made = anybatch.plan(model, case.loss, case.batch, timed=False, **case.options)
    assert made.mechanism == case.mechanism
    text = made.to_json()
    engines: list[Engine] = []

    def step(ours: nn.Module) -> Tensor:
        engines.append(Engine(ours, case.loss, plan=Plan.from_json(text)))
        with mock.patch("anybatch.engine.executor.stream", wraps=stream) as streamed:
            loss = engines[-1].backward(*case.batch)
        assert streamed.called == (case.mechanism == "streaming")
        return loss

    assert_exact(state_after(model, step), undivided(model, case.loss, *case.batch))
    (engine,) = engines
    assert engine.plan is not None
    for field in ("mechanism", "micro_batch", "accumulate", "loss", "offload", "memory"):
        assert getattr(engine.plan, field) == getattr(made, field), field
    assert engine.last is not None
    assert engine.last.micro_batches == -(-len(case.batch[0]) // made.micro_batch)
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed == 0
