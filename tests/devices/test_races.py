"""No step leaves a race, or reads what has not arrived; the copies come as late as they may.

The matrix is mechanism x place of the batch x stream x precision x what leaves. In
float64 a step is exact; in every precision nothing is a number that was not one in torch's own
undivided step, and the plugin fails a test that leaves a race.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from tests.oracle import assert_exact, error_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.errors import BudgetError
from anybatch.offloading import saved_tensors
from anybatch.planner import offload_memory

N = 22


def coupled(out: Tensor, y: Tensor) -> Tensor:
    out = F.normalize(out, dim=1)
    return F.cross_entropy(out @ out.T, torch.arange(len(out), device=out.device)) + out[0, 0] * 0


def net(norm: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 8, 3, padding=1), norm(), nn.ReLU()]
    inner = [
        layer() for _ in range(3) for layer in (lambda: nn.Conv2d(8, 8, 3, padding=1), nn.Tanh)
    ]
    last = [norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)]
    return nn.Sequential(*first, *inner, *last)


MECHANISMS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "streaming": (lambda: nn.GroupNorm(2, 8), F.cross_entropy),
    "two-pass": (lambda: nn.GroupNorm(2, 8), coupled),
    "lockstep": (lambda: nn.BatchNorm2d(8), F.cross_entropy),
    "lockstep, coupled": (lambda: nn.BatchNorm2d(8), coupled),
}
PLACES = {"host": lambda t: t.clone(), "pinned": Tensor.pin_memory, "device": Tensor.cuda}
PRECISIONS = ("float64", "float32", "bfloat16", "float16", "autocast", "scaler")
LEAVES = ("nothing", "what has no room", "host", "file")


class Run(NamedTuple):
    """One cell of the matrix."""

    mechanism: str
    place: str
    side: bool
    precision: str
    leaves: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


RUNS = [Run(*cell) for cell in product(MECHANISMS, PLACES, (False, True), PRECISIONS, LEAVES)]


@contextlib.contextmanager
def on(side: bool) -> Iterator[None]:
    if not side:
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def cast(precision: str) -> contextlib.AbstractContextManager[Any]:
    if precision not in ("autocast", "scaler"):
        return contextlib.nullcontext()
    half_type = torch.bfloat16 if precision == "autocast" else torch.float16
    return torch.autocast("cuda", half_type)


def dtype_of(precision: str) -> torch.dtype:
    return torch.float32 if precision in ("autocast", "scaler") else getattr(torch, precision)


def engine_of(run: Run, model: nn.Module, loss: Any, batch: tuple[Tensor, Tensor]) -> Engine:
    if run.leaves == "nothing":
        return Engine(model, loss, micro_batch=4)
    if run.leaves == "what has no room":
        found = anybatch.plan(model, loss, batch, memory="4GiB", timed=False).memory
        assert found is not None
        return Engine(model, loss, memory=(3 * found.floor + found.undivided) // 4)
    chosen = {"offload": run.leaves, "micro_batch": 4, "timed": False}
    ample = {"memory": "4GiB", "micro_batch": 4, "timed": False}
    found = anybatch.plan(model, loss, batch, **ample).memory
    assert found is not None
    for tenths in range(4, 16):  # the smallest of these with which it can be planned
        with contextlib.suppress(BudgetError):
            memory = found.predicted * tenths // 10
            return Engine(
                model, loss, plan=anybatch.plan(model, loss, batch, memory=memory, **chosen)
            )
    raise AssertionError(f"no plan {chosen} within 1.5 times {found.predicted} bytes")


@pytest.fixture(autouse=True)
def _small_tensors_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (saved_tensors, offload_memory):
        monkeypatch.setattr(module, "SMALL", 1 << 10)


@pytest.mark.large(of="races", few=8, part=100)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_no_step_leaves_a_race(stand_in: Any, run: Run) -> None:
    gc.collect()  # what other tests have left would count
    stand_in.workspace(0)
    norm, loss = MECHANISMS[run.mechanism]
    dtype = dtype_of(run.precision)
    model = net(norm).to("cuda", dtype)
    x, y = torch.randn(N, 3, 12, 12).to(dtype), torch.randint(5, (N,))
    there = x.cuda(), y.cuda()
    with cast(run.precision):
        want = undivided(model, loss, *there)
    batch = PLACES[run.place](x), PLACES[run.place](y)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0) if run.precision == "scaler" else None
    mine = copy.deepcopy(model)
    with on(run.side), cast(run.precision):
        engine = engine_of(run, mine, loss, batch)
        for _ in range(2):
            mine.zero_grad()
            found = engine.backward(*batch, scaler=scaler)
            torch.cuda.synchronize()
            got = {f"{n}.grad": p.grad.clone() for n, p in mine.named_parameters()}
            got["loss"] = found.clone()
            if scaler is not None:
                got = {n: g / 8 if "grad" in n else g for n, g in got.items()}
            torch.cuda.synchronize()
    assert engine.last is not None
    if run.mechanism == "streaming" and run.leaves in ("host", "file"):
        assert engine.last.moved_bytes > 0
    want = {name: value for name, value in want.items() if "buffer" not in name}
    assert all(bool(value.isfinite().all()) for value in got.values())
    if run.precision == "float64":
        order = torch.randperm(N)
        permuted = undivided(model, loss, there[0][order], there[1][order])
        noise = {n: e for n, e in error_of(permuted, want).items() if n in want}
        assert_exact(got, want, noise)


def test_lanes_follow_a_stream_of_a_device_that_is_not_the_present_one(stand_in: Any) -> None:
    stand_in.devices(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double().to("cuda:1")
    x, y = torch.randn(10, 4).double(), torch.randint(3, (10,))
    engine = anybatch.Engine(model, F.cross_entropy, micro_batch=3)
    torch.cuda.synchronize(1)
    stand_in.faults()
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")), torch.cuda.device(0):
        for _ in range(2):
            for p in model.parameters():  # on that stream, as an optimizer does
                p.detach().mul_(1.0)
            model.zero_grad()
            engine.backward(x, y)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert stand_in.faults() == []


def test_what_a_lane_copies_before_and_after_its_work_is_on_the_callers_stream() -> None:
    model = net(lambda: nn.BatchNorm2d(8)).cuda()
    x, y = torch.randn(N, 3, 12, 12), torch.randint(5, (N,))
    memory = anybatch.plan(model, F.cross_entropy, (x, y), memory="4GiB", timed=False).memory
    assert memory is not None
    with on(True):
        engine = Engine(model, F.cross_entropy, memory=(3 * memory.floor + memory.undivided) // 4)
        for _ in range(2):
            engine.backward(x, y)
    assert engine.last is not None
    assert engine.last.moved_bytes > 0
    torch.cuda.synchronize()
