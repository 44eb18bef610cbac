"""A lane is rehearsed where one that is alone does what each of many does, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.memory.lockstep_budget import WAITING, Lane

FLOAT = 4


def network(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).to(**options)


class Gathers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        others, _ = anybatch.gather_batch(z)
        return z - others.mean(0)


def planned(model: nn.Module, **options: Any) -> tuple[Engine, anybatch.Plan]:
    engine = Engine(model, F.cross_entropy, memory="1GiB", micro_batch=4, **options)
    x = torch.randn(20, 8, dtype=next(model.parameters()).dtype)
    return engine, engine.foresee(x, torch.randint(3, (20,)), timed=False)


def lanes(engine: Engine) -> list[Lane | None]:
    assert engine._planner is not None
    return [lane for _, f in engine._planner._foreseen._stored for lane in f.lanes.values()]


def test_the_turns_of_a_lane_are_those_between_its_batchnorms() -> None:
    (lane,) = lanes(planned(network())[0])
    assert lane is not None
    hidden = 4 * 16 * FLOAT
    waits = sorted(set(lane.at_barrier.tolist()))
    assert waits[0] >= hidden  # before the first meeting and after it: what is normalised
    assert int(lane.untouched[0]) == 0
    assert lane.stays == 0
    assert lane.untouched.max() <= lane.at_barrier.max()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (network(dtype=torch.bfloat16), {}),
        (nn.Sequential(network(), nn.Dropout()), {"rng": "batch"}),
        (Gathers(), {}),
    ],
    ids=["half precision", "draws of the whole batch", "gathers"],
)
def test_where_segments_are_not_recorded_it_is_reported_as_it_was(
    model: nn.Module, options: dict[str, Any]
) -> None:
    engine, plan = planned(model, **options)
    assert not any(lanes(engine))
    assert plan.memory is not None
    assert WAITING not in dict(plan.memory.owners)


def test_one_size_is_rehearsed_once() -> None:
    engine, _ = planned(network())
    before = lanes(engine)
    engine.foresee(torch.randn(11, 8), torch.randint(3, (11,)), timed=False)
    assert lanes(engine) == before
