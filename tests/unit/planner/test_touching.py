"""A lane is rehearsed where one that is alone does what each of many does, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.memory.room import WAITING, Lane

FLOAT = 4


def network(**given: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).to(**given)


class Gathers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        others, _ = anybatch.gather_batch(z)
        return z - others.mean(0)


def planned(model: nn.Module, **given: Any) -> tuple[Engine, anybatch.Plan]:
    engine = Engine(model, F.cross_entropy, memory="1GiB", micro_batch=4, **given)
    x = torch.randn(20, 8, dtype=next(model.parameters()).dtype)
    return engine, engine.foresee(x, torch.randint(3, (20,)), timed=False)


def lanes(engine: Engine) -> list[Lane | None]:
    assert engine._planner is not None
    return [lane for _, f in engine._planner._foreseen._known for lane in f.lanes.values()]


def test_the_turns_of_a_lane_are_those_between_its_batchnorms() -> None:
    (lane,) = lanes(planned(network())[0])
    assert lane is not None
    hidden = 4 * 16 * FLOAT
    waits = sorted(set(lane.apart.tolist()))
    assert waits[0] >= hidden  # before the first meeting and after it: what is normalised
    assert int(lane.untouched[0]) == 0
    assert lane.stays == 0
    assert lane.untouched.max() <= lane.apart.max()


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (network(dtype=torch.bfloat16), {}),
        (nn.Sequential(network(), nn.Dropout()), {"rng": "batch"}),
        (Gathers(), {}),
    ],
    ids=["half precision", "draws of the whole batch", "gathers"],
)
def test_where_turns_are_not_known_it_is_told_as_it_was(
    model: nn.Module, given: dict[str, Any]
) -> None:
    engine, plan = planned(model, **given)
    assert not any(lanes(engine))
    assert plan.memory is not None
    assert WAITING not in dict(plan.memory.owners)


def test_one_size_is_rehearsed_once() -> None:
    engine, _ = planned(network())
    before = lanes(engine)
    engine.foresee(torch.randn(11, 8), torch.randint(3, (11,)), timed=False)
    assert lanes(engine) == before
