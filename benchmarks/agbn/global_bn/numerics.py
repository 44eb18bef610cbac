"""Three formulas for the variance over ranks, in float32, where the mean is large."""

import torch
from torch import Tensor

from anybatch.core.moments import Moments, merged_in_order, moments_of

EPS = 1e-5
ROWS, DEVIATION, SEED = 4096, 0.1, 0


def merged(parts: list[Tensor]) -> float:
    """anybatch: counts, means and squared deviations of the parts, merged in float64."""
    total: Moments = merged_in_order([moments_of(part).packed() for part in parts])
    return float(total.variance)


def inverse_deviations(parts: list[Tensor]) -> float:
    """torch.nn.SyncBatchNorm: mean and 1 / sqrt(var + eps) of each rank, merged in float32.

    As its CUDA kernel does it; it refuses the CPU, so the formula is written here.
    """
    count, mean, squares = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for part in parts:
        n, its = torch.tensor(float(len(part))), part.mean()
        inverse = (part.var(correction=0) + EPS).rsqrt()
        variance = 1 / inverse.square() - EPS
        factor = 1 / (count + n)
        squares = squares + variance * n + (mean - its).square() * count * n * factor
        mean = count * factor * mean + n * factor * its
        count = count + n
    return float(squares / count)


def mean_of_squares(parts: list[Tensor]) -> float:
    """AGBN, Equation 5, and fairscale: E[x^2] - E[x]^2."""
    count = float(sum(map(len, parts)))
    mean = torch.stack([part.sum() for part in parts]).sum() / count
    squares = torch.stack([part.square().sum() for part in parts]).sum() / count
    return float(squares - mean.square())


FORMULAS = {
    "merged moments (anybatch)": merged,
    "inverse deviations (torch.nn.SyncBatchNorm)": inverse_deviations,
    "E[x^2] - E[x]^2 (AGBN Eq. 5, fairscale)": mean_of_squares,
}


def errors(mean: float, ranks: int) -> dict[str, float]:
    """Return the relative error of each formula's variance against float64 of all rows."""
    torch.manual_seed(SEED)
    x = (mean + DEVIATION * torch.randn(ROWS, 1)).float()
    true = float(x.double().var(correction=0))
    parts = list(x.chunk(ranks))
    return {name: abs(formula(parts) - true) / true for name, formula in FORMULAS.items()}
