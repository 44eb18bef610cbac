"""The one measure of exactness, used by every test, every benchmark and `check`.

In float64, the error of a tensor is ``max|g - g0| / max(max|g0|, 0.01 * largest)`` where
``largest`` is the largest entry of all true tensors: a tensor whose truth is zero (a convolution
bias before BatchNorm) is measured against the others, for its own scale is rounding noise.
It must be at most 1e-12, or at most ten times the same figure between two undivided runs whose
rows are permuted: the noise that no split can avoid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

FLOOR = 1e-12
NOISE_FACTOR = 10.0
SMALL = 0.01


def error_of(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of every tensor of `got` against the truth `want`, by name.

    A tensor that only one side has, another shape, or NaN on one side only gives infinity.
    Integer tensors (counters) give 0 or infinity.

    Args:
        got: name -> tensor, any floating dtype.
        want: name -> the true tensor.
    """
    largest = max((_largest(tensor) for tensor in want.values()), default=0.0)
    return {name: _error(got.get(name), want.get(name), largest) for name in sorted({*got, *want})}


def tolerance(noise: Mapping[str, float] | None = None) -> float:
    """Return the bound that errors must keep: ``max(1e-12, 10 * worst noise)``.

    Args:
        noise: `error_of` between two undivided runs with permuted rows; None means none.
    """
    return max(FLOOR, NOISE_FACTOR * max((noise or {}).values(), default=0.0))


def _error(got: Tensor | None, want: Tensor | None, largest: float) -> float:
    if got is None or want is None or got.shape != want.shape:
        return math.inf
    if not (got.is_floating_point() or got.is_complex()):
        return 0.0 if torch.equal(got, want) else math.inf
    got, want = _wide(got), _wide(want)
    if not torch.equal(got.isnan(), want.isnan()):
        return math.inf
    same = (got == want) | want.isnan()
    gap = torch.where(same, 0.0, (got - want).abs())
    worst = float(gap.max()) if gap.numel() else 0.0
    if worst == 0.0:
        return 0.0
    scale = max(_largest(want), SMALL * largest)
    return worst / scale if scale > 0 and math.isfinite(worst) else math.inf


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return 0.0
    sizes = _wide(tensor).abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0
