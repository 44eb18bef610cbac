from __future__ import annotations

from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.oracle import error_of, tolerance
from tests.peaks import metered
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.core import moments
from anybatch.core.moments import CACHED, HALF, merged, moments_of


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    mean=st.sampled_from([0.0, 1.0, -1e3, 1e6]),
    shape=st.sampled_from([(), (3,), (2, 3), (1, 2, 2)]),
)
def test_moments_of_parts_merge_to_those_of_the_whole(
    sizes: list[int], mean: float, shape: tuple[int, ...]
) -> None:
    x = mean + torch.randn(sum(sizes), 4, *shape, dtype=torch.float64)
    found = reduce(merged, [moments_of(part) for part in x.split(sizes)])
    over = [d for d in range(x.dim()) if d != 1]
    variance, want = torch.var_mean(x, over, correction=0)
    assert found.count == x.numel() // 4
    assert torch.allclose(found.mean, want, rtol=1e-12, atol=1e-12)
    bound = 1e-14 * mean * mean + 1e-12
    assert (found.variance - variance).abs().max() <= bound


@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0])
def test_a_large_mean_costs_float32_nothing(mean: float) -> None:
    x = mean + 0.1 * torch.randn(400, 3, dtype=torch.float64)
    found = reduce(merged, [moments_of(part) for part in x.float().split(37)])
    want = x.float().double().var(0, correction=0)
    assert ((found.variance.double() - want).abs() / want).max() < 1e-3
    naive = (x.float() ** 2).mean(0) - x.float().mean(0) ** 2
    assert mean < 1000 or ((naive.double() - want).abs() / want).max() > 1


def test_half_precision_is_summed_in_float32() -> None:
    x = torch.randn(64, 3).bfloat16()
    found = moments_of(x)
    assert torch.allclose(found.mean.float(), x.float().mean(0), atol=1e-6)
    assert torch.allclose(found.variance.float(), x.float().var(0, correction=0), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 700])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_rows_that_follow_take_no_less_memory(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 4, 300).to(dtype)
    vectors = 32 * 8 * 4
    with metered({"x": [x]}) as meter:
        moments_of(x)
    cached = CACHED if dtype in HALF else 0
    assert meter.peak - x.nbytes <= max(x.nbytes, cached) + vectors
    assert meter.peak - x.nbytes <= CACHED + vectors


@pytest.mark.parametrize("length", [35, 41, 62, 140, 182])
def test_values_that_are_alike_have_no_negative_variance(length: int) -> None:
    """Sums of what rounding left of them had: -1e-25 in float32, whose root is NaN."""
    x = (10 * torch.rand(1, 1000, 1)).expand(3, -1, length).contiguous()
    assert bool((moments_of(x).squares >= 0).all())


def test_moments_are_merged_in_float64() -> None:
    """A thousand ranks or lanes lose nothing: in float32 the mean of these moved by 1e-5."""
    x = (1000 + torch.randn(3000, 2)).float()
    parts = [moments_of(part).to(x.device, torch.float32) for part in x.split(3)]
    found = reduce(merged, parts)
    want = reduce(merged, [part.to(x.device, torch.float64) for part in parts])
    assert found.mean.dtype == torch.float64
    assert torch.equal(found.mean, want.mean)
    assert torch.equal(found.squares, want.squares)


class NoFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note kernels that make float64 on MPS."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.found += [
            str(func)
            for one in made
            if isinstance(one, Tensor) and one.device.type == "mps" and one.dtype == torch.float64
        ]
        return result


def test_sums_are_float64_where_the_device_has_none() -> None:
    device = torch.device("mps")
    with FakeTensorMode(), NoFloat64() as observed:
        parts = [moments_of(torch.empty(n, 3, 4, device=device)) for n in (5, 2)]
        total = merged(*parts)
        assert total.mean.dtype == total.squares.dtype == torch.float64
        assert total.mean.device.type == "cpu"
        assert parts[0].packed().device.type == "cpu"
        assert observed.found == []
        torch.empty(2, device=device).double()
        assert observed.found == ["aten._to_copy.default"]  # it would be noted


def test_moments_of_parts_in_float32_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of an accelerator, on the host: parts by its kernel, merged in float64."""
    monkeypatch.setattr(moments, "of", lambda _: SimpleNamespace(host=False))
    torch.manual_seed(0)
    x = torch.randn(23, 3, 8)
    total = moments_of(x[:0])
    for part in (x[:7], x[7:8], x[8:]):
        total = merged(total, moments_of(part))
    variance, mean = torch.var_mean(x.double(), [0, 2], correction=0)
    own_variance, own_mean = torch.var_mean(x, [0, 2], correction=0)
    want = {"mean": mean, "variance": variance}
    noise = error_of({"mean": own_mean, "variance": own_variance}, want)
    assert total.count == 23 * 8
    got = error_of({"mean": total.mean, "variance": total.variance}, want)
    assert max(got.values()) <= tolerance(noise)
