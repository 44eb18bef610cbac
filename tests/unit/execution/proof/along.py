"""Operations along one dimension of a tensor: whether samples meet is whether it is theirs.

Each takes numbers `z`, a dimension, and a parameter of three numbers; it returns the shape of `z`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Along = Callable[[Tensor, int, Tensor], Tensor]
FIRST = torch.tensor([0])


def last(fn: Callable[[Tensor, Tensor], Tensor]) -> Along:
    """Return an operation along the last dimension as one along any."""
    return lambda z, d, w: fn(z.movedim(d, -1), w).movedim(-1, d)


def lines(fn: Callable[[Tensor, Tensor], Tensor]) -> Along:
    """Return an operation on `[lines, 1, length]` as one along any dimension."""

    def run(z: Tensor, w: Tensor) -> Tensor:
        return fn(z.reshape(-1, 1, z.shape[-1]), w).reshape(z.shape)

    return last(run)


def columns(fn: Callable[[Tensor], Tensor]) -> Along:
    """Return an operation on `[lines, length, 1]` as one along any dimension."""
    return last(lambda z, _: fn(z.reshape(-1, z.shape[-1], 1)).reshape(z.shape))


def numbers(fn: Callable[[int, Tensor], Tensor]) -> Along:
    """Return an operation with numbers that are as many as the dimension is long."""
    return last(lambda z, _: z * fn(z.shape[-1], z))


def reversed_places(z: Tensor, d: int) -> Tensor:
    """Return places along a dimension, the last first, in the shape of `z`."""
    line = torch.arange(z.shape[d] - 1, -1, -1)
    return line.view([-1 if k == d else 1 for k in range(z.dim())]).expand(z.shape)


def attention(z: Tensor) -> Tensor:
    return (z @ z.mT).softmax(-1) @ z


def fused_attention(z: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(z[:, None], z[:, None], z[:, None])[:, 0]


def recurrence(z: Tensor, d: int, w: Tensor) -> Tensor:
    parts = list(z.unbind(d))
    for at in range(1, len(parts)):
        parts[at] = torch.tanh(parts[at] + w[0] * parts[at - 1])
    return torch.stack(parts, d)


def halves(z: Tensor, d: int, w: Tensor) -> Tensor:
    middle = z.shape[d] // 2
    first, second = torch.split(z, [middle, z.shape[d] - middle], d)
    return torch.cat([second, first * w[0]], d)


def shift_in_place(z: Tensor, d: int, w: Tensor) -> Tensor:
    out, size = z.clone(), z.shape[d] - 1
    out.narrow(d, 1, size).add_(w[1] * z.narrow(d, 0, size))
    return out


def written_one_by_one(z: Tensor, d: int, w: Tensor) -> Tensor:
    out = torch.zeros_like(z)
    total = torch.zeros_like(z.select(d, 0))
    for at in range(z.shape[d]):
        total = total * w[2] + z.select(d, at)
        out.select(d, at).copy_(total)
    return out


def by_matrix(make: Callable[[Tensor], Tensor]) -> Along:
    return columns(lambda z: make(z.new_ones(z.shape[1], z.shape[1])) @ z / z.shape[1])


def neighbours(z: Tensor) -> Tensor:
    return (-torch.cdist(z, z.tanh())).softmax(-1) @ z


def ranks(z: Tensor, w: Tensor) -> Tensor:
    return z + w[0] * (z[..., None] > z[..., None, :]).sum(-1)


def greatest(z: Tensor, w: Tensor) -> Tensor:
    return z + w[0] * F.one_hot(z.argmax(-1), z.shape[-1])


def solved(z: Tensor) -> Tensor:
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    found: Tensor = torch.linalg.solve(z.tanh() @ z.tanh().mT + eye, z)
    return found


def in_bags(z: Tensor, d: int, _: Tensor) -> Tensor:
    moved = z.movedim(d, 0)
    places = torch.arange(len(moved)).div(2, rounding_mode="floor")
    return z + torch.zeros_like(moved).index_add(0, places, moved).movedim(0, d)


def inner_gradient(z: Tensor, d: int, _: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda one: one.softmax(d).square().sum())(z)
    return z + found


def each(z: Tensor, d: int, _: Tensor) -> Tensor:
    moved = z.movedim(d, -1)
    flat = moved.reshape(-1, z.shape[d])
    found: Tensor = torch.func.vmap(lambda line: line - line.logsumexp(0))(flat)
    return found.reshape(moved.shape).movedim(-1, d)


def doubled(z: Tensor, d: int, _: Tensor) -> Tensor:
    return torch.cat([z, z.tanh()], d).narrow(d, 1, z.shape[d])


def constant_in_place(z: Tensor, d: int, _: Tensor) -> Tensor:
    out = z * 1
    out.select(d, -1).fill_(0.5)
    return out


def windows(z: Tensor, w: Tensor) -> Tensor:
    return (F.pad(z, (1, 1)).unfold(-1, 3, 1) * w).sum(-1)


def centred_in_place(z: Tensor, d: int, _: Tensor) -> Tensor:
    out = z * 1
    out -= z.mean(d, keepdim=True)
    return out


ALONG: dict[str, Along] = {
    "softmax": lambda z, d, _: 4 * z.softmax(d),
    "log_softmax": lambda z, d, _: z.log_softmax(d),
    "cumsum": lambda z, d, _: z.cumsum(d) / 4,
    "cumprod": lambda z, d, _: (1 + z.tanh() / 4).cumprod(d),
    "logcumsumexp": lambda z, d, _: z.logcumsumexp(d),
    "cummax": lambda z, d, _: z.cummax(d).values,
    "flip": lambda z, d, _: z.flip(d),
    "roll": lambda z, d, _: z.roll(1, d),
    "sort": lambda z, d, _: z.sort(d).values,
    "an order that is gathered": lambda z, d, _: z.tanh().gather(d, z.argsort(d)),
    "topk": lambda z, d, _: z - z.topk(min(2, z.shape[d]), d).values.mean(d, keepdim=True),
    "mean": lambda z, d, _: z - z.mean(d, keepdim=True),
    "mean, in place": centred_in_place,
    "variance": lambda z, d, _: z / (z.var(d, correction=0, keepdim=True) + 0.1).sqrt(),
    "largest": lambda z, d, _: z - z.amax(d, keepdim=True),
    "median": lambda z, d, _: z - z.median(d, keepdim=True).values,
    "logsumexp": lambda z, d, _: z - z.logsumexp(d, keepdim=True),
    "normalize": lambda z, d, _: F.normalize(z, dim=d),
    "product": lambda z, d, _: z + (z / 2).cos().prod(d, keepdim=True),
    "quantile": lambda z, d, _: z - torch.quantile(z, 0.3, dim=d, keepdim=True),
    "layer_norm": last(lambda z, _: F.layer_norm(z, z.shape[-1:])),
    "instance_norm": last(
        lambda z, _: (
            F.instance_norm(z.flatten(0, -2)[None]).reshape(z.shape) if z.shape[-1] > 1 else z * 0
        )
    ),
    "group_norm": lines(lambda z, _: F.group_norm(z, 1)),
    "differences": lambda z, d, _: torch.diff(
        z, dim=d, prepend=torch.zeros_like(z.narrow(d, 0, 1))
    ),
    "attention": columns(attention),
    "fused attention": columns(fused_attention),
    "cdist": columns(neighbours),
    "solve": columns(solved),
    "conv1d": lines(lambda z, w: F.conv1d(z, w.view(1, 1, 3), padding=1)),
    "avg_pool1d": lines(lambda z, _: F.avg_pool1d(z, 3, 1, 1)),
    "max_pool1d": lines(lambda z, _: F.max_pool1d(z, 3, 1, 1)),
    "interpolate": lines(
        lambda z, _: F.avg_pool1d(F.interpolate(z, scale_factor=2.0, mode="linear"), 3, 2, 1)
    ),
    "circular padding": lines(
        lambda z, w: F.conv1d(F.pad(z, (1, 1), "replicate"), w.view(1, 1, 3))
    ),
    "unfold": last(windows),
    "recurrence": recurrence,
    "halves": halves,
    "a shift in place": shift_in_place,
    "written in turn": written_one_by_one,
    "a lower triangle": by_matrix(torch.tril),
    "a matrix of ones": by_matrix(lambda ones: ones),
    "indices": lambda z, d, _: z.index_select(d, torch.arange(z.shape[d] - 1, -1, -1)),
    "gather": lambda z, d, _: z.gather(d, reversed_places(z, d)),
    "scatter": lambda z, d, _: torch.zeros_like(z).scatter(d, reversed_places(z, d), z),
    "index_add": in_bags,
    "fft": lambda z, d, _: torch.fft.fft(z, dim=d).real / 2,
    "einsum": last(lambda z, _: z * torch.einsum("...l,...l->...", z, z).sqrt()[..., None]),
    "the length": lambda z, d, _: z / z.shape[d],
    "ones that are summed": lambda z, d, _: z / torch.ones(z.shape[d], dtype=z.dtype).sum(),
    "linspace": numbers(lambda n, z: torch.linspace(0.5, 1.5, n, dtype=z.dtype)),
    "positions": numbers(lambda n, z: torch.arange(n, dtype=z.dtype).cos()),
    "the first": lambda z, d, w: z + w[0] * z.narrow(d, 0, 1),
    "the last": lambda z, d, w: z + w[0] * z.select(d, -1).unsqueeze(d),
    "a constant for the first": lambda z, d, _: z.index_fill(d, FIRST, 0.5),
    "a constant for the last, in place": constant_in_place,
    "how many are positive": lambda z, d, _: z / (z > 0).sum(d, keepdim=True).add(1),
    "ranks": last(ranks),
    "argmax": last(greatest),
    "above the mean": lambda z, d, _: z.where(z > z.mean(d, keepdim=True), z.tanh()),
    "a gradient in forward": inner_gradient,
    "vmap": each,
    "doubled and cut": doubled,
    "pairs": lambda z, d, _: (z.unsqueeze(d) - z.unsqueeze(d + 1)).tanh().mean(d),
}
"""Operations whose backward is torch's own."""
