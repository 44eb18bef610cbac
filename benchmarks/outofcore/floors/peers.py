"""What other libraries offer for a sample that is too long, as flags of a step.

`checkpoint` is transformers' own. `head` is torch's `F.linear_cross_entropy` at its default, or
`OnlineHead`, which stands for the fused head of TRL: its tiles of logits, the running sum of
exponentials, and their computation again in backward. `shards` is `Sharded`, which stands for the
tiled MLP of Liger: shards of the tokens without a graph, computed again in backward, where each
adds to the gradients of the weights. Both are written anew, work in place where they can, and
their sizes are free, so that they hold no more than those they stand for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.outofcore.floors.networks import IGNORED, Network, Task


@dataclass(frozen=True)
class Flags:
    """What is switched on in a step.

    Attributes:
        checkpoint: blocks are computed again.
        head: "torch", or rows and columns of the tiles of logits; None is all logits.
        shards: tokens of a shard of an MLP; 0 is all.
    """

    checkpoint: bool = False
    head: str | tuple[int, int] | None = None
    shards: int = 0


HEADS = (256, 1024), (1024, 8192)
"""Rows and columns of the tiles of logits that are tried."""
SHARDS = 32, 256
"""Tokens of the shards of an MLP that are tried."""


def ways(task: Task) -> dict[str, list[Flags]]:
    """Return way -> its settings, of those that apply to a network."""
    network = task.network
    found = {"plain": [Flags()], "checkpoint": [Flags(checkpoint=True)]}
    if network.head is not None:
        found["fused head"] = [Flags(head=size) for size in HEADS]
        found["torch's op"] = [Flags(head="torch")]
    if network.parts["mlps"]:
        found["tiled MLP"] = [Flags(shards=n) for n in SHARDS]
    return found


def together(best: dict[str, Flags]) -> list[Flags]:
    """Return the settings of all flags at once, from the best of each."""
    heads = [best[way].head for way in ("fused head", "torch's op") if way in best] or [None]
    shards = {0, best["tiled MLP"].shards if "tiled MLP" in best else 0}
    return [Flags(checkpoint=True, head=head, shards=n) for head in heads for n in sorted(shards)]


def step_of(task: Task, flags: Flags) -> Callable[[], Tensor]:
    """Switch flags on, and return forward and backward of one sample."""
    network = task.network.train()
    for mlp in network.parts["mlps"] if flags.shards else []:
        mlp.forward = partial(_sharded, mlp, mlp.forward, flags.shards)
    if flags.checkpoint:
        network.checkpoint()

    def step() -> Tensor:
        loss = _loss(task, network, flags.head)
        torch.autograd.backward(loss)
        return loss.detach()

    return step


def _loss(task: Task, network: Network, head: str | tuple[int, int] | None) -> Tensor:
    if head is None:
        return task.loss(network(task.inputs), task.targets)
    weight = network.head
    assert weight is not None
    h, y = network.hidden(task.inputs).flatten(0, 1), task.targets.flatten()
    if head == "torch":
        options = nn.LinearCrossEntropyOptions()
        found: Tensor = F.linear_cross_entropy(h, weight, y, ignore_index=IGNORED, options=options)
        return found
    fused: Tensor = OnlineHead.apply(h, weight, y, *head)  # type: ignore[no-untyped-call]
    return fused


class OnlineHead(torch.autograd.Function):
    """Mean cross-entropy of a linear map: tiles of logits, of some rows and some columns."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, y: Tensor, rows: int, columns: int) -> Tensor:
        n, buffer = len(h), h.new_empty(min(rows, len(h)), columns)
        most, total, target = h.new_full((n,), -torch.inf), h.new_zeros(n), h.new_zeros(n)
        for at, of in _tiles(h, w, rows, columns):
            z, places, inside = _logits(buffer, h[at], w[of]), y[at] - of.start, _in(y[at], of)
            target[at] = torch.where(inside, _picked(z, places), target[at])
            new = torch.maximum(most[at], z.amax(1))
            total[at] *= (most[at] - new).exp_()
            total[at] += z.sub_(new[:, None]).exp_().sum(1)
            most[at] = new
        ctx.sizes, logs, counts = (rows, columns), most + total.log_(), y != IGNORED
        ctx.save_for_backward(h, w, y, logs)
        return (logs - target)[counts].sum() / counts.sum()

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        h, w, y, logs = ctx.saved_tensors
        rows, columns = ctx.sizes
        below, weights = torch.zeros_like(h), torch.zeros_like(w)
        buffer, scale = h.new_empty(min(rows, len(h)), columns), above / (y != IGNORED).sum()
        for at, of in _tiles(h, w, rows, columns):
            z = _logits(buffer, h[at], w[of]).sub_(logs[at][:, None]).exp_()
            places = (y[at] - of.start).clamp(0, z.shape[1] - 1)[:, None]
            z.scatter_add_(1, places, -_in(y[at], of).to(z.dtype)[:, None])
            z *= (scale * (y[at] != IGNORED))[:, None]
            below[at].addmm_(z, w[of])
            weights[of].addmm_(z.t(), h[at])
        return below, weights, None, None, None


def _tiles(h: Tensor, w: Tensor, rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Return the rows and the columns of each tile of logits."""
    return [
        (slice(i, min(i + rows, len(h))), slice(j, min(j + columns, len(w))))
        for i, j in product(range(0, len(h), rows), range(0, len(w), columns))
    ]


def _logits(buffer: Tensor, h: Tensor, w: Tensor) -> Tensor:
    into = buffer.flatten()[: len(h) * len(w)].view(len(h), len(w))
    found: Tensor = torch.mm(h, w.t(), out=into)
    return found


def _in(y: Tensor, of: slice) -> Tensor:
    return torch.logical_and(y >= of.start, y < of.stop)


def _picked(z: Tensor, places: Tensor) -> Tensor:
    return z.gather(1, places.clamp(0, z.shape[1] - 1)[:, None]).squeeze(1)


def _sharded(mlp: nn.Module, own: Callable[[Tensor], Tensor], size: int, x: Tensor) -> Tensor:
    found: Tensor = Sharded.apply(own, size, x, *mlp.parameters())  # type: ignore[no-untyped-call]
    return found


class Sharded(torch.autograd.Function):
    """A module of single tokens, in shards of `size` tokens that backward computes again."""

    @staticmethod
    def forward(
        ctx: Any, own: Callable[[Tensor], Tensor], size: int, x: Tensor, *_weights: Tensor
    ) -> Tensor:
        ctx.own, ctx.size, out = own, size, torch.empty_like(x)
        ctx.save_for_backward(x)
        for part, into in zip(torch.split(x, size, 1), torch.split(out, size, 1), strict=True):
            into.copy_(own(part))
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        below = torch.empty_like(x)
        parts = (torch.split(one, ctx.size, 1) for one in (x, above, below))
        for part, over, into in zip(*parts, strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                found = ctx.own(leaf)
            torch.autograd.backward(found, over)
            assert leaf.grad is not None
            into.copy_(leaf.grad)
        return (None, None, below, *[None] * (len(ctx.needs_input_grad) - 3))
