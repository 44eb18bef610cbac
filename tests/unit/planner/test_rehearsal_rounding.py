"""A forecast where each allocation is rounded up to a block."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.cases import case_of
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.devices import AbsentDevice, planned_for
from anybatch.planner import rehearsal

BLOCK = 512


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 7)
        for t in range(4):
            state = self.cell(x[:, t], state)
        out: Tensor = self.out(state)
        return out


def convolved(*, norm: bool) -> nn.Module:
    middle = nn.BatchNorm2d(6) if norm else nn.GroupNorm(2, 6)
    body = nn.Conv2d(3, 6, 3, padding=1), middle, nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(6, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(9, 33), nn.GELU(), nn.Linear(33, 3)), (9,)),
    "groups": (lambda: convolved(norm=False), (3, 8, 8)),
    "batches": (lambda: convolved(norm=True), (3, 8, 8)),
    "recurrent": (Recurrent, (4, 5)),
}


@pytest.mark.large(few=2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
def test_a_plan_predicts_the_step_that_its_size_would_be(name: str, share: float) -> None:
    """The line at the size that was chosen is what a dry run of just that size counts."""
    make, shape = MODELS[name]
    model, size, device = make(), 50, AbsentDevice("1GiB", 1 << 30)
    x, y = torch.randn(size, *shape), torch.randint(0, 3, (size,))

    def plan(memory: int | None) -> anybatch.Plan:
        return anybatch.plan(
            *(copy.deepcopy(model), F.cross_entropy, (x, y)),
            device="cuda:1GiB",
            memory=memory,
            batchnorm="local",
            offload="off",
        )

    loose = plan(None).memory
    assert loose is not None
    found = plan(loose.floor + int(share * (loose.undivided - loose.floor)))
    assert found.memory is not None
    n = found.micro_batch
    with planned_for(device):
        case = case_of(model, F.cross_entropy, x, y, fakes=True, batchnorm="local")
        _, observed = rehearsal.inspect_model(case, 4)
        observed = rehearsal.watch_loss(case, observed)
        first = rehearsal.first_rows(case, size)
        line = (
            rehearsal.divided(first, n, observed, accumulator=found.accumulate == "accumulator")
            if n < size
            else rehearsal.full_batch(case, size, observed)[0]
        )
    owners = dict(found.memory.owners)
    assert (n == size) == (share == 1)
    copies = sum(-(-b.nbytes // BLOCK) * BLOCK for b in model.buffers()) * (2 if n < size else 1)
    extra = owners["cuBLAS"] + owners["other tensors"] + copies
    assert found.memory.predicted == line.peak + extra


@pytest.mark.parametrize("layers", [1, 40])
def test_every_small_parameter_takes_a_block(layers: int) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    x, y = torch.randn(8, 2), torch.randint(0, 2, (8,))
    plan = anybatch.plan(model, F.cross_entropy, (x, y), device="cuda:1GiB")
    assert plan.memory is not None
    owners = dict(plan.memory.owners)
    assert owners["parameters"] == 2 * layers * BLOCK
    assert owners["other tensors"] == BLOCK
