"""What a finite change of one row changes is in its mask, kernel by kernel.

A kernel that has no rule is asked by NaN, and one that compares may take another branch for it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.execution.proof.follow import Follow, Masks

ROWS, LINES = 4, 6
CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda row: row + 1.5,
    lambda row: row * 7,
    lambda row: -row,
    torch.zeros_like,
    lambda row: row / 9,
]


def in_lines(x: Tensor) -> Tensor:
    return x.mT.contiguous()


def moved_to(x: Tensor) -> Tensor:
    other = torch.empty(0, dtype=x.dtype)
    other.set_(x.clone())  # type: ignore[call-overload]
    return other


def renormed_entries(x: Tensor) -> Tensor:
    return torch.embedding_renorm_(in_lines(x), torch.arange(LINES), 0.5, 2.0)


def observed(x: Tensor) -> Tensor:
    on, numbers = torch.ones(1, dtype=torch.int64), [torch.zeros(1) for _ in range(3)]
    return torch.fused_moving_avg_obs_fake_quant(
        x.float(), on, on, *numbers, torch.zeros(1, dtype=torch.int32), 0.5, -9, 9, 0
    ).double()


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "renorm": lambda x: x.renorm(2, 1, 0.5),
    "renorm of rows": lambda x: x.renorm(2, 0, 0.5),
    "renorm in place": lambda x: x.clone().renorm_(1, 1, 0.5),
    "renormed entries": renormed_entries,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp by the batch": lambda x: x.clamp(max=x.mean(0)),
    "where": lambda x: torch.where(x > 0.2, x, 1.0),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "fmax": lambda x: torch.fmax(x, x.flip(0)),
    "fmin": lambda x: torch.fmin(x, x.roll(1, 0)),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "nan_to_num": lambda x: x.nan_to_num(0.0),
    "isfinite": lambda x: x.isfinite() * x,
    "sign": lambda x: x.sign(),
    "greater in place": lambda x: x.clone().gt_(0.3),
    "less in place": lambda x: x.clone().lt_(x.mean(0)),
    "at least in place": lambda x: x.clone().ge_(0.3),
    "equal in place": lambda x: x.clone().eq_(0.0),
    "logical in place": lambda x: x.relu().logical_not_(),
    "heaviside in place": lambda x: x.clone().heaviside_(torch.ones((), dtype=x.dtype)),
    "heaviside": lambda x: torch.heaviside(x, torch.ones((), dtype=x.dtype)),
    "sort": lambda x: x.sort(0)[0],
    "topk": lambda x: x.topk(2, 0)[0],
    "kthvalue": lambda x: x.kthvalue(2, 0)[0],
    "median": lambda x: x.median(0)[0],
    "nanmedian": lambda x: x.nanmedian(0)[0],
    "nansum": lambda x: x.nansum(0),
    "mode": lambda x: x.round().mode(0)[0],
    "quantile": lambda x: x.quantile(0.4, 0),
    "nanquantile": lambda x: x.nanquantile(0.4, 0),
    "cummax": lambda x: x.cummax(0)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "histc": lambda x: x.histc(4, -2, 2),
    "histogram": lambda x: torch.histogram(x.flatten(), 4)[0],
    "histogramdd": lambda x: torch.histogramdd(x[:, :2], [3, 3])[0],
    "edges": lambda x: torch.histogramdd(x[:, :2], [3, 3])[1][0],
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-0.5, 0.5], dtype=x.dtype)) * 1.0,
    "bucketize by the batch": lambda x: torch.bucketize(x[:1, :1], x[:, 0].sort()[0]) * 1.0,
    "searchsorted": lambda x: torch.searchsorted(in_lines(x).sort(1)[0], in_lines(x) / 2) * 1.0,
    "margins": lambda x: F.multi_margin_loss(x, torch.arange(ROWS), reduction="none"),
    "a mean of margins": lambda x: F.multi_margin_loss(x, torch.arange(ROWS)),
    "labels": lambda x: F.multilabel_margin_loss(
        x, torch.tensor([[0, 2, -1, 0, 0, 0]] * ROWS), reduction="none"
    ),
    "max pooling": lambda x: F.max_pool1d(in_lines(x)[None], 2),
    "adaptive max pooling": lambda x: F.adaptive_max_pool1d(in_lines(x)[None], 2),
    "resized": lambda x: x.clone().resize_(LINES, ROWS),
    "resized to fewer": lambda x: x.clone().resize_(2, LINES),
    "another memory": moved_to,
    "turned in place": lambda x: x.clone().t_(),
    "squeezed in place": lambda x: x[:, None].clone().squeeze_(),
    "with one dimension more in place": lambda x: x.clone().unsqueeze_(1),
    "strided in place": lambda x: x.clone().as_strided_((3, 5), (7, 1), 2),
    "poured into wider": lambda x: x[0].masked_scatter(x > 0, torch.arange(24.0).double()),
    "cdist": lambda x: torch.cdist(x, x),
    "pdist": torch.pdist,
    "counted": lambda x: (x > 0).count_nonzero(0) * 1.0,
    "quantised": lambda x: torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -9, 9).double(),
    "quantised channels": lambda x: torch.fake_quantize_per_channel_affine(
        x.float(), torch.full((LINES,), 0.1), torch.zeros(LINES, dtype=torch.int32), 1, -9, 9
    ).double(),
    "quantised by the batch": lambda x: torch.fake_quantize_per_tensor_affine(
        x.float(), x.abs().amax().float() / 9, torch.zeros((), dtype=torch.int32), -9, 9
    ).double(),
    "quantised by an observer": observed,
    "least squares": lambda x: torch.linalg.lstsq(x[:, :2], x[:, 2:3], driver="gels").solution,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", KERNELS)
def test_a_mask_names_what_a_finite_change_changes(name: str, seed: int) -> None:
    kernel = KERNELS[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, LINES, dtype=torch.float64, generator=generator)
    follow = Follow(nn.Identity(), Masks())
    follow.seed(x, list(range(ROWS)))
    with follow:
        out = kernel(x)
    mask = follow.masks.of(out)
    every = torch.zeros(out.shape, dtype=torch.uint8) if mask is None else mask.expand(out.shape)
    for row in range(ROWS):
        for change in CHANGES:
            other = x.clone()
            other[row] = change(x[row])
            found = kernel(other)
            changed = (found - out).abs() > 1e-9 if found.shape == out.shape else every >= 0
            assert not bool((changed & ~(every >> row & 1).bool()).any())
