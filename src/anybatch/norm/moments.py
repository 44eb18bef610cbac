"""Count, mean and squared deviations of the parts of a batch, and of all of it.

``E[x^2] - E[x]^2`` loses everything where the mean is large: in float32, with deviation 0.1, all
of the variance at mean 1000. Moments about the parts' own means merge without that.

    N = n_1 + n_2      mean = mean_1 + n_2 / N * (mean_2 - mean_1)
    M2 = M2_1 + M2_2 + n_1 n_2 / N * (mean_2 - mean_1)^2

Source: Chan, Golub, LeVeque 1979; AGBN, Algorithms 2 and 3, which merge by ``E[x^2] - E[x]^2``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Moments of the values of each channel.

    Attributes:
        count: values a channel.
        mean: [C].
        squares: M2, the sum of squared deviations from the mean, [C].
    """

    count: int
    mean: Tensor
    squares: Tensor

    @property
    def variance(self) -> Tensor:
        """The biased variance, [C]: what BatchNorm normalises with."""
        return self.squares / self.count

    def packed(self) -> Tensor:
        """Return count, mean and squares in one tensor, [1 + 2 C] float64."""
        count = self.mean.new_tensor([self.count], dtype=torch.float64)
        return torch.cat([count, self.mean.double(), self.squares.double()])

    @classmethod
    def unpacked(cls, packed: Tensor) -> Moments:
        """Return the moments that `packed` made one tensor of."""
        count, rest = int(packed[0]), packed[1:]
        mean, squares = rest.chunk(2)
        return cls(count, mean, squares)

    def to(self, dtype: torch.dtype) -> Moments:
        """Return them in another dtype."""
        return Moments(self.count, self.mean.to(dtype), self.squares.to(dtype))


def moments_of(x: Tensor) -> Moments:
    """Return the moments of the channels of [n, C, ...], in float32 for half precision.

    An empty tensor has count 0 and moments 0.
    """
    count = x.numel() // max(x.shape[1], 1)
    if count == 0:
        zeros = x.new_zeros(x.shape[1], dtype=accumulated(x.dtype))
        return Moments(0, zeros, zeros)
    if x.device.type == "cpu":  # four times as fast there as var_mean
        zeros = x.new_zeros((2, x.shape[1]), dtype=accumulated(x.dtype))
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, *zeros, 0.0)
    else:
        wide = x.to(accumulated(x.dtype))
        over = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(wide, over, correction=0)
    return Moments(count, mean, variance * count)


def merged(one: Moments, other: Moments) -> Moments:
    """Return the moments of two parts together, in float64."""
    count = one.count + other.count
    if count == 0:
        return one
    share = other.count / count
    apart = other.mean.double() - one.mean.double()
    return Moments(
        count,
        one.mean.double() + share * apart,
        one.squares.double() + other.squares.double() + one.count * share * apart.square(),
    )


def merged_in_order(
    packed: list[Tensor], add: Callable[[Moments, Moments], Moments] = merged
) -> Moments:
    """Return the moments of parts that came as one tensor each, merged in their order."""
    first, *others = map(Moments.unpacked, packed)
    for other in others:
        first = add(first, other)
    return first


HALF = (torch.float16, torch.bfloat16)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return what sums of a dtype are made in."""
    return torch.float32 if dtype in HALF else dtype
