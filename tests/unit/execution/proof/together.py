"""Operations on `[n, t, d]` of which each has a form in which samples meet, and mostly its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Tools(nn.Module):
    """Layers of which an operation takes what it needs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        heads = {"num_heads": 2, "batch_first": True}
        self.table = nn.Parameter(torch.randn(9, width))
        self.experts = nn.Parameter(torch.randn(3, width, width) / 2)
        self.rows = nn.MultiheadAttention(width, **heads)
        self.mixed = nn.MultiheadAttention(width, num_heads=2)
        self.gru, self.mixed_gru = nn.GRU(width, width, batch_first=True), nn.GRU(width, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.deep = nn.TransformerEncoderLayer(width, 2, width, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(width).eval()
        self.linear = nn.Linear(width, width)


Form = Callable[[Tools, Tensor, Tensor], Any]


class Twin(NamedTuple):
    """An operation in two forms.

    Attributes:
        separate: each sample by itself; None where there is no such form.
        meets: samples meet; None where there is no such form.
    """

    separate: Form | None
    meets: Form | None


def attended(layer: nn.MultiheadAttention, h: Tensor, *, weights: bool = False) -> Tensor:
    found: Tensor = layer(h, h, h, need_weights=weights)[0]
    return found


def energy(h: Tensor, *, mean: bool) -> Tensor:
    """Return the derivative of an energy."""
    with torch.enable_grad():
        own = h if h.requires_grad else h.detach().requires_grad_()
        each = own.cumsum(1).sin().square()
        made = torch.autograd.grad(each.mean() if mean else each.sum(), own, create_graph=True)[0]
    return h + made


def solved(solve: Callable[[Tensor, Tensor], Tensor]) -> Twin:
    """Return a solver of systems whose right sides are tokens; in one form tokens make the system.

    Args:
        solve: it takes a positive definite matrix [d, d] and right sides [d, k].
    """

    def run(m: Tools, h: Tensor, *, all_rows: bool) -> Tensor:
        flat = h.flatten(0, 1)
        weights = m.experts[0] @ m.experts[0].T + 2 * torch.eye(h.shape[2], dtype=h.dtype)
        matrix = weights + flat.T @ flat / 9 if all_rows else weights
        return solve(matrix, flat.T).T.reshape(h.shape)

    return Twin(lambda m, h, _: run(m, h, all_rows=False), lambda m, h, _: run(m, h, all_rows=True))


def regrouped(h: Tensor) -> Tensor:
    """Return tokens first without moving them: what `transpose` would have done."""
    return h.reshape(h.shape[1], h.shape[0], h.shape[2])


def routed(tools: Tools, h: Tensor, scores: Tensor) -> Tensor:
    """Return tokens after the expert of their highest score."""
    flat, chosen = h.flatten(0, 1), scores.flatten(0, 1).argmax(-1)
    weights = scores.flatten(0, 1).softmax(-1).gather(1, chosen[:, None])
    found = torch.einsum("rd,rde->re", flat, tools.experts[chosen]) * weights
    return found.reshape(h.shape)


def balanced(tools: Tools, h: Tensor, _: Tensor) -> Tensor:
    """Give tokens to experts that take a part of the batch each."""
    scores = (h @ tools.table[:3].T).flatten(0, 1)
    available = max(1, len(scores) // 3)
    out = torch.zeros_like(h).flatten(0, 1)
    for at in range(3):
        best = scores[:, at].topk(available).indices
        out = out.index_add(0, best, h.flatten(0, 1)[best] @ tools.experts[at])
    return out.reshape(h.shape)


def as_strided(h: Tensor, *, separate: bool) -> Tensor:
    n, t, d = h.shape
    flat = h.contiguous()
    if separate:
        return flat.as_strided((n, t, d), (t * d, d, 1)).flip(1)
    return flat.as_strided((n, t, d), (d, n * d, 1)) * 1


def looked_up(tools: Tools, h: Tensor, ids: Tensor) -> Tensor:
    return h + tools.table[ids][:, None]


def often(ids: Tensor) -> Tensor:
    """Return how often the number of each sample comes in the batch."""
    return (ids[:, None] == ids).sum(1)


def unique(tools: Tools, h: Tensor, ids: Tensor) -> Tensor:
    found: list[Tensor] = list(ids.unique(return_inverse=True, return_counts=True))  # type: ignore[no-untyped-call]
    return h / found[2][found[1]][:, None, None]


def pooled(h: Tensor, ids: Tensor) -> Tensor:
    sums = torch.zeros(9, *h.shape[1:], dtype=h.dtype).index_add(0, ids, h)
    return h + sums[ids] / 2


def hooked(layer: nn.Linear, h: Tensor, d: int) -> Tensor:
    def hook(_module: nn.Module, grads: Any, _outputs: Any) -> Any:
        return (grads[0] / (grads[0].norm(dim=d, keepdim=True) + 0.01),)

    handle = layer.register_full_backward_hook(hook)
    try:
        found: Tensor = layer(h)
    finally:  # a checkpoint ends its second forward early, by an exception
        handle.remove()
    return found


TWINS: dict[str, Twin] = {
    "linear": Twin(lambda m, h, _: m.linear(h), None),
    "attention of a module": Twin(
        lambda m, h, _: attended(m.rows, h), lambda m, h, _: attended(m.mixed, h)
    ),
    "attention of transposed rows": Twin(
        lambda m, h, _: attended(m.mixed, h.transpose(0, 1), weights=True).transpose(0, 1),
        lambda m, h, _: attended(m.rows, h.transpose(0, 1), weights=True).transpose(0, 1),
    ),
    "GRU": Twin(lambda m, h, _: m.gru(h)[0], lambda m, h, _: m.mixed_gru(h)[0]),
    "a layer of a transformer": Twin(
        lambda m, h, _: m.deep(h), lambda m, h, _: m.deep(h.transpose(0, 1)).transpose(0, 1)
    ),
    "convolution": Twin(
        lambda m, h, _: m.conv(h.mT).mT, lambda m, h, _: m.conv(h.permute(1, 2, 0)).permute(2, 0, 1)
    ),
    "BatchNorm at rest": Twin(lambda m, h, _: m.norm(h.mT).mT, None),
    "tokens that are regrouped": Twin(
        lambda m, h, _: regrouped(regrouped(h).tanh()).reshape(h.shape),
        lambda m, h, _: regrouped(h).transpose(0, 1) + h,
    ),
    "tokens that are viewed": Twin(
        lambda m, h, _: h.mT.reshape(h.shape), lambda m, h, _: h.transpose(0, 1).reshape(h.shape)
    ),
    "strides": Twin(
        lambda m, h, _: as_strided(h, separate=True), lambda m, h, _: as_strided(h, separate=False)
    ),
    "a product with itself": Twin(
        lambda m, h, _: (h @ h.mT / 4) @ h,
        lambda m, h, _: ((h.flatten(1) @ h.flatten(1).T / 9) @ h.flatten(1)).reshape(h.shape),
    ),
    "a second moment": Twin(
        lambda m, h, _: h @ (h.mT @ h) / 4,
        lambda m, h, _: h @ (h.flatten(0, 1).T @ h.flatten(0, 1)) / 9,
    ),
    "einsum": Twin(
        lambda m, h, _: torch.einsum("ntd,nsd,nse->nte", h, h, h) / 4,
        lambda m, h, _: torch.einsum("ntd,mtd,mte->nte", h, h, h) / 9,
    ),
    "layer_norm": Twin(
        lambda m, h, _: F.layer_norm(h, h.shape[1:]), lambda m, h, _: F.layer_norm(h, h.shape)
    ),
    "norm": Twin(
        lambda m, h, _: h / h.flatten(1).norm(dim=1)[:, None, None], lambda m, h, _: h / h.norm()
    ),
    "experts": Twin(
        lambda m, h, _: routed(m, h, h @ m.table[:3].T),
        lambda m, h, _: routed(m, h, (h @ m.table[:3].T).softmax(0)),
    ),
    "experts with room": Twin(None, balanced),
    "embedding": Twin(looked_up, lambda m, h, ids: h + m.table[often(ids)][:, None]),
    "an embedding bag": Twin(
        lambda m, h, ids: h + F.embedding_bag(ids[:, None], m.table)[:, None],
        lambda m, h, ids: h + F.embedding_bag(ids[None], m.table)[:, None],
    ),
    "ids": Twin(
        lambda m, h, ids: h * F.one_hot(ids, 9).to(h.dtype).cumsum(1)[:, None, :1].add(1),
        lambda m, h, ids: h / F.one_hot(ids, 9).sum(0)[ids][:, None, None],
    ),
    "unique": Twin(None, unique),
    "sums by an id": Twin(None, lambda m, h, ids: pooled(h, ids)),
    "the largest id": Twin(None, lambda m, h, ids: h / ids.max().add(1)),
    "an order by ids": Twin(None, lambda m, h, ids: h + h[ids.argsort()].tanh()),
    "bins": Twin(None, lambda m, h, ids: h / ids.bincount(minlength=9)[ids][:, None, None]),
    "an energy": Twin(lambda m, h, _: energy(h, mean=False), lambda m, h, _: energy(h, mean=True)),
    "a hook of a module": Twin(
        lambda m, h, _: hooked(m.linear, h, 2), lambda m, h, _: hooked(m.linear, h, 0)
    ),
    "what Python reads": Twin(None, lambda m, h, _: h if float(h.detach().sum()) > 0 else h * 2),
    "weights of all samples": Twin(
        lambda m, h, _: h @ (m.experts[0] + h.mean(1, keepdim=True)),
        lambda m, h, _: h @ (m.experts[0] + h.mean((0, 1))),
    ),
    "filters of samples": Twin(
        lambda m, h, _: F.conv1d(
            h.reshape(1, -1, h.shape[2]),
            h[:, :, :3].reshape(-1, 1, 3),
            padding=1,
            groups=h.shape[:2].numel(),
        ).reshape(h.shape),
        lambda m, h, _: F.conv1d(h.flatten(0, 1)[:, None], h[:1, :1, :3], padding=1).reshape(
            h.shape
        ),
    ),
    "a row of the batch": Twin(
        lambda m, h, _: h + h[:, :1].tanh(), lambda m, h, _: h + h[:1].tanh()
    ),
    "every other": Twin(
        lambda m, h, _: torch.cat([h[:, ::2].tanh(), h[:, 1::2]], 1),
        lambda m, h, _: torch.cat([h[::2].tanh(), h[1::2]]),
    ),
    "a mask that fills": Twin(
        lambda m, h, _: h.masked_fill(h > h.amax((1, 2), keepdim=True) / 2, 0.5),
        lambda m, h, _: h.masked_fill(h > h.amax() / 2, 0.5),
    ),
    "masked writes": Twin(
        lambda m, h, ids: h.where((ids > 3)[:, None, None], h.tanh()),
        lambda m, h, ids: h.where((ids > ids.double().mean())[:, None, None], h.tanh()),
    ),
    "a system": solved(torch.linalg.solve),
    "a system from the right": solved(lambda a, b: torch.linalg.solve(a, b.T, left=False).T),
    "a triangular system": solved(
        lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False)
    ),
    "a system in factors": solved(
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b)
    ),
    "a system by Cholesky": solved(lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(a))),
    "dropout at rest": Twin(lambda m, h, _: F.dropout(h, 0.5, training=False), None),
    "a triangle of rows": Twin(
        lambda m, h, _: h.tril(), lambda m, h, _: h.transpose(0, 1).tril().transpose(0, 1)
    ),
}
"""Linear layers, attention, recurrent layers, tables, experts, views."""
