"""A budget that a plan or an error names is enough: planned with, and for the step."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.devices.test_budget import MODELS, Words
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import Engine
from anybatch.errors import BudgetError
from anybatch.units import parse_bytes

N = 24


class Recomputed(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU()) for _ in range(3))
        self.back = nn.ModuleList(nn.Linear(256, 64) for _ in range(3))
        self.last = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer, back in zip(self.layers, self.back, strict=True):
            x = x + back(checkpoint(layer, x, use_reentrant=False))
        return self.last(x)


def rows(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(N, *shape), torch.randint(5, (N,))


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(2000, (N, 16)), torch.randint(2000, (N, 16))


Made = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]

TABLE: dict[str, Made] = {
    **{name: (make, lambda shape=shape: rows(shape)) for name, (make, shape) in MODELS.items()},
    "recomputed": (Recomputed, lambda: rows((64,))),
    "words": (Words, words),
}

FOR_ALL = [
    pytest.param(name, amp, where, id=f"{name}-{'bfloat16' if amp else 'float32'}-{where}")
    for name in TABLE
    for amp in (False, True)
    for where in ("host", "device")
]


@contextmanager
def case(stand_in: Any, name: str, where: str, *, amp: bool) -> Iterator[tuple[nn.Module, Any]]:
    """Yield a model and its batch, in the precision that is asked for."""
    gc.collect()  # what other tests have left would be counted, and be gone
    stand_in.clear_workspaces()
    torch.manual_seed(0)
    make, batch = TABLE[name]
    model, pair = make().cuda(), batch()
    with torch.autocast("cuda", torch.bfloat16, enabled=amp):
        yield model, tuple(t.cuda() for t in pair) if where == "device" else pair


def planned(model: nn.Module, batch: Any, memory: Any) -> anybatch.Plan:
    return anybatch.plan(model, F.cross_entropy, batch, memory=memory, timed=False)


def holds(stand_in: Any, model: nn.Module, batch: Any, budget: int) -> int:
    """Return the most bytes of two steps of a plan, on a device that has just its budget."""
    engine = Engine(model, F.cross_entropy, plan=planned(model, batch, budget))
    model.zero_grad()
    stand_in.clear_workspaces()
    stand_in.cap(budget)
    failures, most = stand_in.statistics()["failures"], 0
    try:
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            engine.backward(*batch)
            most = max(most, torch.cuda.max_memory_allocated())
    finally:
        stand_in.cap(1 << 40)
    assert stand_in.statistics()["failures"] == failures
    return most


def refusal(model: nn.Module, batch: Any, memory: int) -> tuple[int, str]:
    """Return the bytes that an error needs, and its advice."""
    try:
        planned(model, batch, memory)
    except BudgetError as error:
        advice = re.search(r'memory="(\w+)"', str(error))
        return error.needed, advice[1] if advice else str(error)
    return 0, "it was planned"


@pytest.mark.large(of="floors", few=3)
@pytest.mark.parametrize(("name", "amp", "where"), FOR_ALL)
def test_the_floor_is_enough(stand_in: Any, name: str, amp: bool, where: str) -> None:
    with case(stand_in, name, where, amp=amp) as (model, batch):
        found = planned(model, batch, "4GiB").memory
        assert found is not None
        assert holds(stand_in, model, batch, found.floor) <= found.floor


@pytest.mark.large(of="advice", few=3)
@pytest.mark.parametrize("share", [0.02, 0.95])
@pytest.mark.parametrize(("name", "amp", "where"), FOR_ALL)
def test_what_an_error_advises_is_enough(
    stand_in: Any,
    name: str,
    amp: bool,
    where: str,
    share: float,
) -> None:
    with case(stand_in, name, where, amp=amp) as (model, batch):
        found = planned(model, batch, "4GiB").memory
        assert found is not None
        needed, advice = refusal(model, batch, int(share * min(found.floor, found.undivided)))
        assert needed <= parse_bytes(advice) < needed + 1024
        assert planned(model, batch, advice).memory is not None
        assert holds(stand_in, model, batch, needed) <= needed


@pytest.mark.parametrize("name", ["mlp", "images, BatchNorm", "recomputed"])
def test_a_refused_plan_leaves_no_tensor(stand_in: Any, name: str) -> None:
    with case(stand_in, name, "device", amp=False) as (model, batch):
        planned(model, batch, "4GiB")
        stand_in.clear_workspaces()
        gc.collect()
        gc.disable()
        try:
            before = torch.cuda.memory_allocated()
            refusal(model, batch, 1 << 16)
            refusal(model, batch, before)
            stand_in.clear_workspaces()
            assert torch.cuda.memory_allocated() == before
        finally:
            gc.enable()


@pytest.mark.parametrize("name", ["mlp", "images, BatchNorm", "recomputed", "words"])
def test_a_dry_run_on_a_full_device_ends_in_a_budget_error(stand_in: Any, name: str) -> None:
    with case(stand_in, name, "device", amp=False) as (model, batch):
        before = torch.cuda.memory_allocated()
        stand_in.cap(before + 4096)
        try:
            with pytest.raises(BudgetError, match="in a dry run of them memory ran out") as found:
                planned(model, batch, "4GiB")
        finally:
            stand_in.cap(1 << 40)
        assert found.value.needed > before
        del found
        gc.collect()
        stand_in.clear_workspaces()
        assert torch.cuda.memory_allocated() == before
