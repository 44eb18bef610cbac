from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.oracle import same, state_after
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.lockstep.batchnorm import batch_norm


def distance(model: nn.Module, exact: nn.Module) -> float:
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    found = [
        float((a.grad.double() - b.grad).norm() / b.grad.norm())
        for a, b in pairs
        if a.grad is not None and b.grad is not None
    ]
    return max(found)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5),
    )  # fmt: skip


@pytest.mark.parametrize("how", ["autocast", "bfloat16", "float16", "float32", "channels last"])
def test_low_precision_is_as_near_as_the_undivided_batch_is(how: str) -> None:
    model, x, y = net(), torch.randn(24, 3, 8, 8), torch.randint(5, (24,))
    exact = copy.deepcopy(model).double()
    F.cross_entropy(exact(x.double()), y).backward()
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(how, torch.float32)
    model, x = model.to(dtype), x.to(dtype)
    if how == "channels last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        F.cross_entropy(plain(x), y).backward()
        Engine(model, F.cross_entropy, micro_batch=7).backward(x, y)
    assert distance(model, exact) <= 2 * distance(plain, exact) + 1e-6
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-2)


def half_net(dims: int, how: str) -> nn.Module:
    """Make a network whose BatchNorm weights, in float32, are large enough to leave."""
    conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    affine = how != "not affine"
    model = nn.Sequential(
        conv(3, 80, 2, bias=False), norm(80, affine=affine), nn.ReLU(), conv(80, 80, 1),
        norm(80, affine=affine), nn.Flatten(), nn.Linear(80 * 2**dims, 5),
    )  # fmt: skip
    if how == "weight frozen":
        model[1].weight.requires_grad_(False)
    if how == "without bias":
        model[1].bias = model[4].bias = None
    return model


HALVES = [
    *((1, how) for how in ("plain", "not affine", "weight frozen", "without bias", "autocast")),
    *((2, "plain"), (3, "plain"), (2, "autocast")),
]


@pytest.mark.product
@pytest.mark.parametrize(("dims", "how"), HALVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_all_that_waits_may_be_offloaded(
    dtype: torch.dtype, dims: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a bf16 model under memory= ended in a segmentation fault: of its weights, the copies in
    # float32 had left, and were read past the mode that brings them back
    monkeypatch.setattr("anybatch.lockstep.lockstep.AHEAD", 0)
    made = torch.float32 if how == "autocast" else dtype
    model, x = half_net(dims, how).to(made), torch.randn(7, 3, *(3,) * dims).to(made)
    y = torch.randint(5, (7,))

    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        assert_same_where_nothing_leaves(model, x, y, 3, monkeypatch)


class Ended(nn.Module):
    """Normalises the values before the end of the longest sample, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 80, 1, bias=False), nn.BatchNorm1d(80)
        self.out = nn.Linear(80, 5)

    def forward(self, x: Tensor) -> Tensor:
        end = int((x.detach().abs().sum((0, 1)) > 0).sum())
        found: Tensor = self.out(self.norm(self.conv(x)[:, :, :end]).sum(2))
        return found


def test_micro_batches_without_a_value_may_wait_where_all_that_waits_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anybatch.lockstep.lockstep.AHEAD", 0)
    x, y = torch.randn(6, 3, 4), torch.randint(5, (6,))
    x[:2] = x[4:] = 0
    assert_same_where_nothing_leaves(Ended(), x, y, 1, monkeypatch)


def assert_same_where_nothing_leaves(
    model: nn.Module, x: Tensor, y: Tensor, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(copied: nn.Module) -> Tensor:
        engines.append(Engine(copied, F.cross_entropy, micro_batch=micro_batch))
        return engines[-1].backward(x, y)

    engines: list[Engine] = []
    found = state_after(model, step)
    monkeypatch.setattr("anybatch.lockstep.lockstep._pager", lambda *_: None)
    assert same(found, state_after(model, step))
    assert [bool(e.last and e.last.moved_bytes) for e in engines] == [True, False]


def test_sums_of_many_lanes_in_bfloat16_do_not_stall() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).bfloat16()
    x, y = torch.randn(300, 4).bfloat16(), torch.full((300, 1), 50.0).bfloat16()
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    F.mse_loss(exact(x.double()), y.double()).backward()
    Engine(plain, F.mse_loss, micro_batch=150).backward(x, y)
    Engine(model, F.mse_loss, micro_batch=1).backward(x, y)
    last = ("2.weight", "2.bias")  # gradients that all point the same way
    many, few = (
        max(
            float((p.grad.double() - q.grad).norm() / q.grad.norm())
            for (name, p), q in zip(m.named_parameters(), exact.parameters(), strict=True)
            if name in last and p.grad is not None and q.grad is not None
        )
        for m in (model, plain)
    )
    assert many <= 2 * few + 2**-8


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (2, 4, 3, 2)])
def test_in_a_single_lane_it_is_torchs_own(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.rand(2, 4, dtype=torch.float64).requires_grad_().unbind()
    grad = torch.randn_like(x)

    def with_gradients(fn: Callable[[], Tensor]) -> list[Tensor]:
        out = fn()
        return [out, *torch.autograd.grad(out, [x, weight, bias], grad)]

    got = with_gradients(lambda: batch_norm(x, weight, bias, 1e-5)[0])
    want = with_gradients(lambda: F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5))
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_one_value_a_channel_is_refused_as_torch_does() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        batch_norm(torch.ones(1, 4), None, None, 1e-5)
