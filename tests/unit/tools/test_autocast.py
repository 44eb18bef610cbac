"""CUDA's autocast, in effect on the host while a plan is made for a device that is not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import anybatch
from anybatch import Plan
from anybatch.devices import AbsentDevice, planned_for
from anybatch.tools import autocast
from anybatch.tools.autocast import SWITCHED_OFF, autocast_of_absent, unknown

HALVES = [torch.bfloat16, torch.float16]


@contextmanager
def switched_on(dtype: torch.dtype) -> Iterator[None]:
    """CUDA's autocast as torch has it where there is CUDA."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


@contextmanager
def planning() -> Iterator[autocast.AutocastUse]:
    with planned_for(AbsentDevice("1GiB", 1 << 30)), autocast_of_absent() as use:
        yield use


def state() -> list[Any]:
    kinds = "cpu", "cuda"
    names = "set_autocast_enabled", "set_autocast_dtype"
    return [
        *(
            (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in kinds
        ),
        *(getattr(torch, name) for name in names),
        torch.cuda.is_bf16_supported,
        torch.cuda.amp.common.amp_definitely_not_available,
        autocast._operators("AutocastCPU"),
    ]


class Casting(nn.Module):
    """A network whose forward may switch on autocast by itself."""

    def __init__(self, how: str = "", dtype: torch.dtype | None = None) -> None:
        super().__init__()
        wide = [nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Softmax(-1)]
        self.inner = nn.Sequential(*wide, nn.Linear(256, 5))
        self.how, self.dtype = how, dtype

    def forward(self, x: Tensor) -> Tensor:
        if not self.how:
            return self.inner(x).float()  # type: ignore[no-any-return]
        device_type = x.device.type if self.how == "of the tensor" else self.how
        with torch.autocast(device_type, self.dtype):
            return self.inner(x).float()  # type: ignore[no-any-return]


def plan(net: nn.Module) -> Plan:
    batch = torch.randn(64, 64), torch.randint(5, (64,))
    return anybatch.plan(net, F.cross_entropy, batch, device="cuda:2GiB")


def peaks(found: Plan) -> tuple[int, int]:
    assert found.memory is not None
    assert found.memory.how == "two dry runs on fake tensors"
    return found.memory.floor, found.memory.undivided


def test_every_operator_that_cuda_casts_is_listed() -> None:
    assert [name for name in unknown() if name.startswith("aten::")] == []


@pytest.mark.parametrize("dtype", HALVES)
def test_it_casts_as_cuda_does(dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    half = x.to(dtype)
    with switched_on(dtype), planning():
        assert F.linear(x, w).dtype == torch.einsum("ab,cb->ac", x, w).dtype == dtype
        for wide in (
            half.softmax(-1),
            F.layer_norm(half, (8,)),
            half.sum(),
            half.norm(),
            half.norm(1, 0),
            half.norm(1, 0, keepdim=True),
            half.exp(),
            F.cross_entropy(half, torch.tensor([0, 1, 2, 3])),
            torch.addcmul(x, half, half),
        ):
            assert wide.dtype == torch.float32
        with FakeTensorMode():  # the host has no such kernel
            pooled = F.avg_pool3d(torch.empty(1, 1, 2, 2, 2, dtype=dtype), 1)
        for same in (F.relu(half), torch.cat([half, half]), pooled):
            assert same.dtype == dtype
        assert half.sum(dtype=torch.float64).dtype == x.double().exp().dtype == torch.float64
        with pytest.raises(RuntimeError, match="binary_cross_entropy must run outside CUDA's"):
            F.binary_cross_entropy(x.sigmoid(), x.sigmoid())
        F.linear(x, w).softmax(-1).sum().backward()
        assert w.grad is not None
        assert w.grad.dtype == torch.float32


def test_autocast_in_forward_counts_as_around() -> None:
    with switched_on(torch.bfloat16):
        around = peaks(plan(Casting()))
    inside = peaks(plan(Casting("cuda", torch.bfloat16)))
    plain = peaks(plan(Casting()))
    weights = 2 * sum(p.numel() for p in Casting().parameters())
    assert inside == peaks(plan(Casting("of the tensor", torch.bfloat16)))
    # Around, the casts of weights are kept for the whole step.
    assert all(0 <= a - b <= weights + 4096 for a, b in zip(around, inside, strict=True))
    assert inside[1] != plain[1]
    with torch.autocast("cpu", torch.bfloat16):  # which CUDA does not hear
        assert peaks(plan(Casting())) == plain


def test_autocast_that_torch_has_switched_off_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    common = torch.cuda.amp.common
    monkeypatch.setattr(common, "amp_definitely_not_available", lambda: True)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        lost = torch.autocast("cuda", torch.bfloat16)
    with lost:
        found = plan(Casting())
    assert found.device is not None
    with switched_on(torch.bfloat16):
        device = plan(Casting()).device
    assert device is not None
    assert SWITCHED_OFF not in device.not_measured
    assert found.device.not_measured == (*device.not_measured, SWITCHED_OFF)


def test_operators_that_are_not_listed_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(autocast.POLICIES, "addmv")
    with switched_on(torch.bfloat16), planning() as use:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert use.not_measured() == ("autocast of aten::addmv",)
    with planning() as use:
        pass
    assert use.not_measured() == ()


def test_nothing_is_left_behind_and_other_threads_cast_as_they_did() -> None:
    half, found = torch.ones(2, 3, dtype=torch.bfloat16), dict[str, Any]()

    def other() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            found["softmax"] = half.softmax(-1).dtype
            found["pooled"] = F.avg_pool3d(half[None, None, None], 1).dtype
            found["cuda"] = torch.is_autocast_enabled("cuda")

    before = state()
    with pytest.raises(ZeroDivisionError), switched_on(torch.float16), planning():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert state() == before
    there = dict(found)
    other()
    assert there == found
    assert there["softmax"] == torch.bfloat16
