"""Count, mean and squared deviations of the parts of a batch, and of all of it.

``E[x^2] - E[x]^2`` loses everything where the mean is large: in float32, with deviation 0.1, all
of the variance at mean 1000. Moments about the parts' own means merge without that.

    N = n_1 + n_2      mean = mean_1 + n_2 / N * (mean_2 - mean_1)
    M2 = M2_1 + M2_2 + n_1 n_2 / N * (mean_2 - mean_1)^2

torch's own kernel for them takes four times as long on the CPU as the rest of BatchNorm, one value
after another. Here rows that fit in the cache are read three times by kernels that process many
values at once: their mean, the difference from it, and the sums of that and of its squares.

    mean = mean(x)      y = x - mean      mean += sum(y) / n      M2 = sum(y^2) - sum(y)^2 / n

The sums are those of BatchNorm's backward, sum dy and sum dy * x_hat, with y for both. y has almost
no mean left, so the last term is small, and the difference exact.

Source: Chan, Golub, LeVeque 1979 and 1983; AGBN, Algorithms 2 and 3, which merge by ``E[x^2] -
E[x]^2``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from anybatch.core.accelerator import of, wide


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

    @cached_property
    def variance(self) -> Tensor:
        """The biased variance, [C], with which BatchNorm normalises."""
        return self.squares / self.count

    def packed(self) -> Tensor:
        """Return count, mean and squares in one tensor, [1 + 2 C] float64."""
        mean, squares = wide(self.mean), wide(self.squares)
        return torch.cat([mean.new_tensor([self.count]), mean, squares])

    @classmethod
    def unpacked(cls, packed: Tensor) -> Moments:
        """Return the moments that `packed` made one tensor of."""
        count, rest = int(packed[0]), packed[1:]
        mean, squares = rest.chunk(2)
        return cls(count, mean, squares)

    def to(self, device: torch.device, dtype: torch.dtype) -> Moments:
        """Return them on a device, in another dtype."""
        return Moments(self.count, self.mean.to(device, dtype), self.squares.to(device, dtype))


def moments_of(x: Tensor) -> Moments:
    """Return the moments of the channels of [n, C, ...]; half precision is summed in float32.

    An empty tensor has count 0 and moments 0.

    Memory: on the CPU a copy, in the precision of the sums, of `CACHED` bytes of rows or one row;
    elsewhere one of a quarter of half-precision values. A budget need not see it: it is no more
    than the normalised rows that come next (on the CPU of float32 and float64), which are counted.
    """
    count = x.numel() // max(x.shape[1], 1)
    if count == 0:
        zeros = x.new_zeros(x.shape[1], dtype=accumulated(x.dtype))
        return Moments(0, zeros, zeros)
    if not of(x.device).host:
        long = max((d for d in range(x.dim()) if d != 1), key=lambda d: x.shape[d])
        pieces = x.chunk(QUARTERS, long) if x.dtype in HALF else (x,)
        return reduce(merged, map(_on_device, pieces))
    rows = max(1, CACHED // (x[0].numel() * accumulated(x.dtype).itemsize))
    return reduce(merged, map(_in_cache, torch.split(x, rows)))


QUARTERS = 4
"""Pieces of half-precision values that are widened one after another on a device."""


def _on_device(x: Tensor) -> Moments:
    over = [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(x.to(accumulated(x.dtype)), over, correction=0)
    count = x.numel() // x.shape[1]
    return Moments(count, mean, variance * count)


CACHED = 1 << 19
"""Bytes of rows that are read from memory once: half of the cache of a core."""


def _in_cache(x: Tensor) -> Moments:
    """Return the moments of a few rows, in float64."""
    wide = x.to(accumulated(x.dtype))
    count, shape = x.numel() // x.shape[1], [1, -1] + [1] * (x.dim() - 2)
    mean = wide.mean([d for d in range(x.dim()) if d != 1])
    y = wide - mean.view(shape) if wide is x else wide.sub_(mean.view(shape))
    zero, one = torch.zeros_like(mean), torch.ones_like(mean)
    _, squares, more = torch.ops.aten.native_batch_norm_backward(
        y, y, None, zero, one, None, None, False, 0.0, [False, True, True]
    )
    more = more.double()
    squares = squares.double().addcmul_(more, more, value=-1 / count).clamp_(min=0)
    return Moments(count, mean.double().add_(more, alpha=1 / count), squares)


def merged(one: Moments, other: Moments) -> Moments:
    """Return the moments of two parts together, in float64."""
    count = one.count + other.count
    if count == 0:
        # Both parts are empty, and a share of 0 / 0 raises
        # (test_moments_of_parts_merge_to_those_of_the_whole).
        return one
    share, mean = other.count / count, wide(one.mean)
    difference = wide(other.mean) - mean
    squares = wide(one.squares) + wide(other.squares)
    return Moments(
        count,
        torch.add(mean, difference, alpha=share),
        squares.addcmul_(difference, difference, value=one.count * share),
    )


def merged_in_order(
    packed: list[Tensor], add: Callable[[Moments, Moments], Moments] = merged
) -> Moments:
    """Return the moments of parts of one tensor each, merged in their order."""
    first, *others = map(Moments.unpacked, packed)
    for other in others:
        first = add(first, other)
    return first


HALF = (torch.float16, torch.bfloat16)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the accumulator for sums of a dtype."""
    return torch.float32 if dtype in HALF else dtype
