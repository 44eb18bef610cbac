"""Transforms by products of matrices beside fast ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.conv.fourier import Circle, places, spectrum


def circles(*lengths: int) -> tuple[Circle, ...]:
    return tuple(Circle(length, 1, length, 0, 0, length) for length in lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("lengths", "spans"), [((16,), (5,)), ((12, 10), (3, 10)), ((8, 6, 4), (2, 3, 4)), ((2,), (1,))]
)
def test_it_is_the_fast_transform_and_its_inverse(
    lengths: tuple[int, ...], spans: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    dims = list(range(-len(lengths), 0))
    w = torch.randn(3, 4, *spans).to(dtype)
    fast: Tensor = torch.fft.rfftn(w.double(), s=lengths, dim=dims).reshape(12, -1).t()
    found = spectrum(w, circles(*lengths))
    exact = 1e-6 if dtype == torch.float32 else 1e-13
    assert found.dtype == dtype.to_complex()
    assert float((found - fast).norm()) <= exact * float(fast.norm())
    wanted = [slice(0, k, 2) for k in spans]
    inner: Any = (..., *wanted)
    back = places(found, circles(*lengths), wanted)
    true = w[inner].reshape(12, -1)
    assert back.dtype == dtype
    assert float((back - true).norm()) <= exact * float(true.norm())
