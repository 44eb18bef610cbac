"""Similarities of all embeddings with all others, a tile at a time: sums over them without them.

The N x N matrix of a contrastive loss grows with the square of the batch: at N = 32,768 in float32
it is 4 GiB, its exponentials as much again, and backward has both. Only sums over its rows and
columns are needed, and those can be computed from tiles that are discarded:

    forward     m_i = max_j s a_i b_j      r_i = sum_j exp(s a_i b_j - m_i)     running
    backward    sum_j exp(s a_i b_j - m_i - l_i) b_j                            the tile again

Maximum and sum are stored as two numbers. In float32 their one logarithm m + log r has only the
digits of m, and a small loss lies in the lost ones: at temperature 0.05 the gradient was wrong by
2.6e-3. For the same reason the sum omits one entry of each row, that of the true partner, from
which its part of the loss is computed: see `anybatch.loss.contrastive`.

So memory is that of the embeddings and of a few tiles, linear in N, for one more product a tile
than with a stored matrix. In half precision all of it is computed in float32. Source: the softmax
of Milakov and Gimelshein 2018 (arXiv:1805.02867), Algorithm 3, over tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from anybatch.core.accelerator import of
from anybatch.memory.fakes import is_fake

SIDE, SIDE_THERE = 512, 4096
"""Rows and columns of a tile at most, on the host and on an accelerator."""

LEAST = 256
"""Rows and columns at least; between them a tile is no larger than its embeddings."""

FIRST = 2
"""Tiles that are computed of tensors without data: the others hold no more."""


def computed_in(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over similarities: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of rows, [n], of two [n, d], without their n x d products."""
    dtype = computed_in(a)
    return torch.bmm(a.to(dtype).unsqueeze(1), b.to(dtype).unsqueeze(2)).reshape(-1)


class Sums(NamedTuple):
    """Sums of exponentials over rows or columns, relative to the largest entry.

    Attributes:
        most: [n], the maximum m.
        of: [n], sum_j exp(x_ij - m_i).
    """

    most: Tensor
    of: Tensor

    @classmethod
    def none(cls, like: Tensor) -> Sums:
        """Return empty sums, as many as `like`; their maximum is finite: -inf - -inf is NaN."""
        return cls(torch.full_like(like, torch.finfo(like.dtype).min), torch.zeros_like(like))

    def including(self, other: Tensor) -> Sums:
        """Return the sums relative to a maximum that includes the [n] values of `other`."""
        most = torch.maximum(self.most, other)
        return Sums(most, (self.most - most).exp_().mul_(self.of))


class Shares(NamedTuple):
    """Maximum and logarithm that map a similarity to its share of a sum, exp(x - m - l).

    Attributes:
        most: [n], m.
        log: [n], l.
    """

    most: Tensor
    log: Tensor


def add_sums(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    rows: Sums,
    columns: Sums | None = None,
    partner: int | None = None,
    true: Tensor | None = None,
) -> None:
    """Add the exponentials of scaled similarities to sums over rows and columns.

    Args:
        a: [n, d].
        b: [m, d].
        scale: multiplies every similarity.
        rows: of n, to which those of all m are added.
        columns: of m, the same over n; None (default) where it is not wanted; `rows` again where
            `a` is `b`, of which each pair of rows is then taken once.
        partner: the row of `b` that belongs to the first of `a`, the next to the next: those pairs
            are left out. None (default) where no row has one.
        true: [n], becomes the similarity of each row with its partner: computed like the others, or
            equal ones would differ by a rounding that a low temperature enlarges.
    """
    for i, j in _tiles(a, b):
        tile = _similar(a, b, scale, i, j, partner, true)
        across = None if a is b and i == j else columns
        _add(tile, rows.most[i], rows.of[i], 1, keep=across is not None)
        if across is not None:
            _add(tile, across.most[j], across.of[j], 0, keep=False)


def add_weighted(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    shares: tuple[Shares | None, Shares | None],
    into: tuple[Tensor, Tensor | None],
    partner: int | None = None,
) -> None:
    """Add the rows of the other side, weighted by their shares of the sums.

    Args:
        a: [n, d].
        b: [m, d].
        scale: multiplies every similarity.
        shares: of rows, and of columns; the weight of (i, j) is the sum of those that are not None.
        into: [n, d], to which sum_j weight b_j is added; and [m, d] or None, for sum_i weight a_i;
            where `a` is `b` both are the same, as in `add_sums`.
        partner: as in `add_sums`.
    """
    rows, columns = shares
    for i, j in _tiles(a, b):
        both_ways = a is b and i == j
        across = None if both_ways else columns
        weights = _weights(
            _similar(a, b, scale, i, j, partner),
            None if rows is None else (rows.most[i].unsqueeze(1), rows.log[i].unsqueeze(1)),
            None if across is None else (across.most[j], across.log[j]),
        )
        into[0][i].addmm_(weights, b[j].to(weights.dtype))
        if into[1] is not None:
            into[1][j].addmm_(weights.T, a[i].to(weights.dtype))
        del weights


def _tiles(a: Tensor, b: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of `a` and of `b` in each tile; where they are one, each pair of them once."""
    most = SIDE if of(a.device).host else SIDE_THERE
    side = min(max(LEAST, isqrt(b.numel())), most)
    every = (
        (slice(i, min(i + side, len(a))), slice(j, min(j + side, len(b))))
        for i in range(0, len(a), side)
        for j in range(i if a is b else 0, len(b), side)
    )
    return islice(every, FIRST) if is_fake(a) else every


def _similar(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    i: slice,
    j: slice,
    partner: int | None,
    true: Tensor | None = None,
) -> Tensor:
    """Return the scaled similarities of a tile; that of a row with its partner is -inf.

    They are scaled after the product: that of j with i is then the one of i with j bit for bit, and
    backward weights the same values that forward has summed, for tiles of either side.
    """
    dtype = computed_in(a)
    tile = torch.mm(a[i].to(dtype), b[j].to(dtype).T).mul_(scale)
    if partner is not None:
        offset = partner + i.start - j.start
        of_partners = tile.diagonal(offset)
        if true is not None and len(of_partners):
            true[i].narrow(0, max(0, -offset), len(of_partners)).copy_(of_partners)
        of_partners.fill_(-torch.inf)
    return tile


def _add(tile: Tensor, most: Tensor, of: Tensor, dim: int, *, keep: bool) -> None:
    """Add exponentials over `dim`, in the memory of the tile unless `keep` is set.

    The kernel of that name makes a second tile that no meter sees.
    """
    larger = torch.maximum(most, tile.amax(dim))
    raised = tile - larger.unsqueeze(dim) if keep else tile.sub_(larger.unsqueeze(dim))
    of.mul_(most.sub_(larger).exp_()).add_(raised.exp_().sum(dim))
    most.copy_(larger)


Column = tuple[Tensor, Tensor]
"""Maximum and logarithm, in a shape that a tile takes."""


def _weights(tile: Tensor, rows: Column | None, columns: Column | None) -> Tensor:
    """Return the sum of both shares, in the memory of the tile where there is but one."""
    if rows is None or columns is None:
        one = rows or columns
        assert one is not None
        most, log = one
        return tile.sub_(most).sub_(log).exp_()
    weights = (tile - rows[0]).sub_(rows[1]).exp_()
    return weights.add_(tile.sub_(columns[0]).sub_(columns[1]).exp_())
