"""Similarities of all embeddings with all others, a tile at a time: sums over them without them.

The N x N matrix of a contrastive loss grows with the square of the batch: at N = 32,768 in float32
it is 4 GiB, its exponentials as much again, and backward has both. What is wanted of it are sums
over its rows and columns, and those can be taken of tiles that are thrown away:

    forward     log sum_j exp(s a_i b_j)                   a running log-sum-exp
    backward    sum_j exp(s a_i b_j - L_i) b_j             the tile is computed again from L

So memory is that of the embeddings and of a few tiles, linear in N, for one more product a tile
than a matrix that is kept would need. In half precision all of it is computed in float32.
Source: the softmax of Milakov and Gimelshein 2018 (arXiv:1805.02867), Algorithm 3, over tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import isqrt

import torch
from torch import Tensor

from anybatch.fakes import is_fake

SIDE = {"cpu": 512, "cuda": 4096}
"""Rows and columns of a tile at most; 4096 on other devices, too."""

LEAST = 256
"""Rows and columns at least; between them a tile is no larger than what it is computed from."""

FIRST = 2
"""Tiles that are computed of tensors without data: the others hold no more."""


def computed_in(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which sums over similarities are taken: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of rows, [n], of two [n, d], without their n x d products."""
    dtype = computed_in(a)
    return torch.bmm(a.to(dtype).unsqueeze(1), b.to(dtype).unsqueeze(2)).reshape(-1)


def add_log_sums(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    rows: Tensor,
    columns: Tensor | None = None,
    own: int | None = None,
) -> None:
    """Add to logarithms of sums of exponentials those of scaled similarities.

    Args:
        a: [n, d].
        b: [m, d].
        scale: multiplies every similarity.
        rows: [n], becomes log(exp(rows_i) + sum_j exp(scale a_i b_j)).
        columns: [m], the same over i; None (default) where it is not wanted.
        own: where `a` lies among the rows of `b`, of which a row is then not compared with itself;
            None (default) where they are different things.
    """
    for i, j in _tiles(a, b):
        down = None if columns is None else columns[j]
        _add_log_sums(_similar(a, b, scale, i, j, own), rows[i], down)


def add_weighted(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    logs: tuple[Tensor | None, Tensor | None],
    into: tuple[Tensor, Tensor | None],
    own: int | None = None,
) -> None:
    """Add the rows of the other side, weighted by their shares of the sums.

    Args:
        a: [n, d].
        b: [m, d].
        scale: multiplies every similarity.
        logs: L of rows [n] and of columns [m], from `add_log_sums`; the weight of (i, j) is
            exp(scale a_i b_j - L_i) + exp(scale a_i b_j - L_j), without the one that is None.
        into: [n, d], to which sum_j weight b_j is added; and [m, d] or None, for sum_i weight a_i.
        own: as in `add_log_sums`.
    """
    for i, j in _tiles(a, b):
        weights = _weights(
            _similar(a, b, scale, i, j, own),
            None if logs[0] is None else logs[0][i],
            None if logs[1] is None else logs[1][j],
        )
        into[0][i].addmm_(weights, b[j].to(weights.dtype))
        if into[1] is not None:
            into[1][j].addmm_(weights.T, a[i].to(weights.dtype))
        del weights


def _tiles(a: Tensor, b: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of `a` and of `b` in each tile."""
    side = min(max(LEAST, isqrt(b.numel())), SIDE.get(a.device.type, SIDE["cuda"]))
    every = (
        (slice(i, min(i + side, len(a))), slice(j, min(j + side, len(b))))
        for i in range(0, len(a), side)
        for j in range(0, len(b), side)
    )
    return islice(every, FIRST) if is_fake(a) else every


def _similar(
    a: Tensor, b: Tensor, scale: Tensor | float, i: slice, j: slice, own: int | None
) -> Tensor:
    """Return the scaled similarities of a tile; that of a row with itself is -inf."""
    dtype = computed_in(a)
    tile = torch.mm(a[i].to(dtype) * scale, b[j].to(dtype).T)
    if own is not None:
        tile.diagonal(own + i.start - j.start).fill_(-torch.inf)
    return tile


def _add_log_sums(tile: Tensor, rows: Tensor, columns: Tensor | None) -> None:
    rows.copy_(torch.logaddexp(rows, _log_sum(tile, 1, keep=columns is not None)))
    if columns is not None:
        columns.copy_(torch.logaddexp(columns, _log_sum(tile, 0, keep=False)))


def _log_sum(tile: Tensor, dim: int, *, keep: bool) -> Tensor:
    """Return log sum exp over `dim`, in the memory of the tile unless that is to be kept.

    The kernel of that name makes a second tile that no meter sees.
    """
    most = tile.amax(dim, keepdim=True).clamp_min_(torch.finfo(tile.dtype).min)
    raised = tile - most if keep else tile.sub_(most)
    return raised.exp_().sum(dim).log_().add_(most.squeeze(dim))


def _weights(tile: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    if rows is None:
        assert columns is not None
        return tile.sub_(columns).exp_()
    if columns is None:
        return tile.sub_(rows.unsqueeze(1)).exp_()
    weights = (tile - rows.unsqueeze(1)).exp_()
    return weights.add_(tile.sub_(columns).exp_())
