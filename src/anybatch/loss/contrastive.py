"""Contrastive losses: every sample against all others of the batch, in memory linear in the batch.

InfoNCE is ``F.cross_entropy(s * z @ w.T, arange(N))``: sample i is to find w_i among all w. Written
so it couples the samples, which the engine supports, and holds N x N similarities several times,
which it cannot divide. Here they are computed in tiles that are discarded.
The gradient is in closed form. With x_ij = s z_i w_j, the partner's t_i = x_ii, all sums over j !=
i, the maximum m_i of x_ij and t_i, and the shares P_ij of the others:

    r_i = sum_j exp(x_ij - m_i)            l_i = log(r_i + exp(t_i - m_i))
    loss = mean_i (l_i - (t_i - m_i))      P_ij = exp(x_ij - m_i - l_i),  r_i exp(-l_i) in all
    d z_i = s/N sum_j P_ij (w_j - w_i)     d w_j = s/N sum_i P_ij (z_i - z_j)

The partner's own share does not occur: 1 less a number near 1 would leave no digits where the loss
is small. The loss depends only on s z_i w_j, so d s = (sum z dz + sum w dw) / 2 s costs nothing.
Over ranks each computes the sums and the gradients of its own rows; m, r and t of all are
exchanged. Source: van den Oord et al. 2018, Eq. 4 (InfoNCE); Radford et al. 2021, Figure 3 (both
directions); Chen et al. 2020, Eq. 1 (NT-Xent).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anybatch.core import pytree
from anybatch.core.accelerator import of
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.core.modules import call_model, keywords
from anybatch.errors import LossError
from anybatch.loss.base import Loss, Part, Scope, Total, call_loss
from anybatch.memory.fakes import is_fake

Gather = Callable[[Tensor], Tensor]
"""Returns the rows of all ranks, in their order, from those of this one."""


def contrastive(
    *, temperature: float | None = None, symmetric: bool = False, within: bool = False
) -> Loss:
    """Make a contrastive loss, in which every sample must find its partner in the full batch.

    The model returns embeddings, ready to be compared (normalise them in the model): two or more
    tensors of shape [n, d] in a tuple, list or mapping, or one of shape [n, k, d]. The second
    belongs to the first; further ones are more negatives. A 0-dim tensor after them is a learnable
    scale, which multiplies the similarities (``logit_scale.exp()`` of CLIP). Half precision is
    computed in float32.

    Args:
        temperature: divides the similarities, above 0. None (default) is 1, or the model's scale.
        symmetric: the second also finds the first, and the loss is the mean of both directions
            (CLIP). Default False: the first finds the second (InfoNCE).
        within: a searching sample is also compared with all samples of its own side, as negatives.
            Default False. With `symmetric` the loss is NT-Xent (SimCLR).

    Returns:
        The loss. In addition to the embeddings and their gradients it needs memory for a few tiles.

    Raises:
        ValueError: `temperature` is not above 0, or is a tensor.
        LossError: at the first step, the model returns other outputs, or there are targets.

    Example:
        >>> model = anybatch.Encoders({"image": vision, "text": language}, scale=1 / 0.07)
        >>> engine = anybatch.Engine(model, anybatch.contrastive(symmetric=True), memory="8GiB")
        >>> engine.backward({"image": images, "text": texts})
    """
    if isinstance(temperature, Tensor):
        raise ValueError(
            "temperature must be a number, and it is a tensor: a learned temperature is a "
            "parameter of the model, which returns its inverse after the embeddings, as CLIP does"
        )
    if temperature is not None and not temperature > 0:
        raise ValueError(
            f"temperature must be above 0, and is {temperature}: similarities are divided by it"
        )
    return Contrastive(temperature, symmetric=symmetric, within=within)


class Contrastive(Loss):
    """`contrastive`."""

    couples = True

    def __init__(self, temperature: float | None, *, symmetric: bool, within: bool) -> None:
        self.name = "contrastive: NT-Xent" if symmetric and within else "contrastive"
        self._temperature, self._symmetric, self._within = temperature, symmetric, within

    def full_batch(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss of all samples, which are all here."""
        return self.of_rows(outputs, outputs, 0, micro, lambda rows: rows)

    def of_rows(
        self, own: Any, every: Any, begin: int, micro: MicroBatch, gather: Gather
    ) -> Tensor:
        """Return the loss of all samples, with a gradient only for the rows of this rank.

        Args:
            own: outputs for the samples of this rank, perhaps none.
            every: those of all ranks; the same object where this is all of them.
            begin: the first row of this rank.
            micro: the samples of all ranks.
            gather: asks the other ranks, once.
        """
        if micro.targets is not None:
            raise LossError(
                "a contrastive loss must have no targets, because samples are compared by their "
                "positions, and it has targets: leave them out, engine.backward(inputs)"
            )
        embeddings, scale = self._parsed(every, micro.size)
        if own is every:
            here, factor = embeddings, scale
        else:
            here, factor = self._parsed(own, None)
        pairs = _pairs(len(embeddings), symmetric=self._symmetric, within=self._within)
        task = _Task(pairs, begin, gather)
        gathered = None if own is every else [embedding.detach() for embedding in embeddings]
        loss: Tensor = _Function.apply(task, gathered, factor, *here)  # type: ignore[no-untyped-call]
        return loss

    def totals(self, scope: Scope) -> list[Total] | None:  # noqa: ARG002
        """Samples meet."""
        return None

    def parts(self, outputs: Any, micro: MicroBatch, totals: list[Total]) -> list[Part]:
        """Raise NotImplementedError: a coupled loss has no parts."""
        raise NotImplementedError

    def _parsed(self, outputs: Any, size: int | None) -> tuple[list[Tensor], Tensor | float]:
        """Return the embeddings, [n, d] each, and the factor of their similarities."""
        found = [tensor for _, tensor in pytree.tensors(outputs)]
        scales = [tensor for tensor in found if tensor.dim() == 0]
        embeddings = list[Tensor]()
        for tensor in (tensor for tensor in found if tensor.dim() > 0):
            embeddings.extend(tensor.unbind(1) if tensor.dim() == 3 else [tensor])
        first = embeddings[0] if embeddings else None
        alike = first is not None and all(
            e.shape == first.shape and e.dtype == first.dtype for e in embeddings
        )
        rows = len(first) if first is not None and first.dim() else None
        if (
            not alike
            or len(embeddings) < 2
            or first is None
            or first.dim() != 2
            or not first.is_floating_point()
            or size not in (None, rows)
            or len(scales) > 1
        ):
            came = ", ".join(f"{tuple(t.shape)} of {t.dtype}".replace("torch.", "") for t in found)
            raise LossError(
                "a model with a contrastive loss must return two or more embeddings of one shape "
                f"[n, d] (or one tensor [n, k, d]), and a 0-dim scale at most, and it returned "
                f"{came}: return no more than the loss needs, samples first"
            )
        if scales and self._temperature is not None:
            raise LossError(
                "similarities must be scaled once, and the model returned a scale while "
                f"temperature is {self._temperature}: leave one of them out"
            )
        return embeddings, scales[0] if scales else 1 / (self._temperature or 1.0)


class _Pair(NamedTuple):
    """Two embeddings that are compared, by their numbers.

    Attributes:
        a: the one that searches.
        b: the one in which it searches; the same number excludes the sample itself.
        both: b searches in a, too.
    """

    a: int
    b: int
    both: bool


class _Task(NamedTuple):
    """Pairs of embeddings to compare, the first row of this rank, and a gather over ranks."""

    pairs: list[_Pair]
    begin: int
    gather: Gather

    @property
    def searching(self) -> int:
        """How many of the embeddings search: the first, or the first two."""
        return 2 if self.pairs[0].both else 1


def _pairs(count: int, *, symmetric: bool, within: bool) -> list[_Pair]:
    found = [_Pair(0, 1, symmetric), *(_Pair(0, more, both=False) for more in range(2, count))]
    return [*found, *(_Pair(k, k, both=True) for k in range((1 + symmetric) * within))]


class _Function(torch.autograd.Function):
    """The loss of all rows; the gradient of those that are here."""

    @staticmethod
    def forward(
        ctx: Any, task: _Task, every: list[Tensor] | None, scale: Tensor | float, *own: Tensor
    ) -> Tensor:
        with torch.autocast(own[0].device.type, enabled=False):
            found = task.gather(_sums(task, every, scale, own).T)
        ctx.task, ctx.every, ctx.scale = task, every, None if isinstance(scale, Tensor) else scale
        ctx.save_for_backward(found, *([scale] if isinstance(scale, Tensor) else []), *own)
        true, *each = found.unbind(1)
        sums = map(Sums._make, zip(each[::2], each[1::2], strict=True))
        return torch.stack([_log(one, true) - (true - one.most) for one in sums]).mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found, *own = ctx.saved_tensors
        scale = own.pop(0) if ctx.scale is None else ctx.scale
        factor = gradient / (len(found) * ctx.task.searching)
        with torch.autocast(own[0].device.type, enabled=False):
            sums = _weighted(ctx.task, ctx.every, scale, own, found)
            of_scale = None
            if ctx.scale is None:
                each = [dots(e, r).sum() for e, r in zip(own, sums, strict=True)]
                of_scale = (torch.stack(each).sum() * factor / 2).to(scale.dtype)
            shares = [r.mul_(factor * scale).to(own[0].dtype) for r in sums]
        return None, None, of_scale, *shares


def _sums(
    task: _Task, every: list[Tensor] | None, scale: Tensor | float, own: tuple[Tensor, ...]
) -> Tensor:
    """Return t, and m and r of the k searching embeddings, for the local rows: [1 + 2 k, n]."""
    true = own[0].new_zeros(len(own[0]), dtype=computed_in(own[0]))
    each = [Sums.none(true) for _ in range(task.searching)]
    for a, b, both in task.pairs:
        partner = task.begin if b < 2 else None
        into = None if a == b or partner is None else true
        there = every or own
        if both and every is None:
            add_sums(own[a], own[b], scale, each[a], each[b], partner, into)
            continue
        add_sums(own[a], there[b], scale, each[a], None, partner, into)
        if both and a != b:
            add_sums(own[b], there[a], scale, each[b], None, partner)
    return torch.stack([true, *(tensor for one in each for tensor in one.including(true))])


def _log(sums: Sums, true: Tensor) -> Tensor:
    """Return l; the partner is the largest, except where samples are confused."""
    return torch.log1p(sums.of + torch.expm1(true - sums.most))


def _weighted(
    task: _Task,
    every: list[Tensor] | None,
    scale: Tensor | float,
    own: list[Tensor],
    found: Tensor,
) -> list[Tensor]:
    """Return sum_j P_ij (w_j - w_i) and the like, for each embedding that is here.

    Args:
        task: the tensors to compare.
        every: embeddings of all ranks; None where they are `own`.
        scale: of the similarities.
        own: embeddings that are here.
        found: t, m and r of all rows, [N, 1 + 2 k], for k embeddings that search.
    """
    sums = [torch.zeros_like(e, dtype=found.dtype) for e in own]
    here = slice(task.begin, task.begin + len(own[0]))
    true, *each = found.unbind(1)
    shares, others = list[Shares](), torch.zeros_like(true)
    for one in map(Sums._make, zip(each[::2], each[1::2], strict=True)):
        log = _log(one, true)
        shares.append(Shares(one.most, log))
        others.add_(one.of * log.neg().exp_())
    ours = [Shares(share.most[here], share.log[here]) for share in shares]
    for a, b, both in task.pairs:
        partner = task.begin if b < 2 else None
        of_b, in_b = (shares[b], ours[b]) if both else (None, None)
        if every is None:
            add_weighted(own[a], own[b], scale, (shares[a], of_b), (sums[a], sums[b]), partner)
            continue
        add_weighted(own[a], every[b], scale, (ours[a], of_b), (sums[a], None), partner)
        if a != b:
            add_weighted(own[b], every[a], scale, (in_b, shares[a]), (sums[b], None), partner)
    others = others[here].unsqueeze(1)
    sums[0].addcmul_(own[1].to(found.dtype), others, value=-1)
    sums[1].addcmul_(own[0].to(found.dtype), others, value=-1)
    return sums


# Similarities of all embeddings with all others, a tile at a time: sums over them without them.
#
# The N x N matrix of a contrastive loss grows with the square of the batch: at N = 32,768 in
# float32 it is 4 GiB, its exponentials as much again, and backward has both. Only sums over its
# rows and columns are needed, and those can be computed from tiles that are discarded:
#
#     forward     m_i = max_j s a_i b_j      r_i = sum_j exp(s a_i b_j - m_i)     running
#     backward    sum_j exp(s a_i b_j - m_i - l_i) b_j                            the tile again
#
# Maximum and sum are stored as two numbers. In float32 their one logarithm m + log r has only the
# digits of m, and a small loss lies in the lost ones: at temperature 0.05 the gradient was wrong by
# 2.6e-3. For the same reason the sum omits one entry of each row, that of the true partner, from
# which its part of the loss is computed, as above.
#
# So memory is that of the embeddings and of a few tiles, linear in N, for one more product a tile
# than with a stored matrix. In half precision all of it is computed in float32. Source: the softmax
# of Milakov and Gimelshein 2018 (arXiv:1805.02867), Algorithm 3, over tiles.

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


# Detection of a loss in which each sample is to find its partner in the full batch.
#
# InfoNCE is written as a cross-entropy of N x N similarities whose right classes are 0, 1 ... N -
# 1; CLIP takes it of both directions. Then `anybatch.contrastive` says the same in memory that
# grows with the batch, not with its square.


class Partners(TorchFunctionMode):
    """Counts the cross-entropies in which sample i is to find the i-th of all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.directions = 0
        self._size = size

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count a cross-entropy, and run every function."""
        kwargs = keywords(func, kwargs)
        if func is F.cross_entropy:
            arguments = dict(zip(("input", "target"), args, strict=False)) | kwargs
            self.directions += self._pairs(arguments.get("input"), arguments.get("target"))
        return func(*args, **kwargs)

    def _pairs(self, scores: Any, target: Any) -> bool:
        if not (isinstance(scores, Tensor) and isinstance(target, Tensor)):
            return False
        if scores.shape != (self._size, self._size) or target.shape != (self._size,):
            return False
        return bool((target == torch.arange(self._size, device=target.device)).all())


def directions(model: nn.Module, loss_fn: Any, batch: TensorBatch) -> int:
    """Return the number of directions in which partners are searched, 0 for no search."""
    partners = Partners(batch.size)
    with torch.no_grad():
        outputs = call_model(model, batch.inputs)
        with partners:
            call_loss(loss_fn, outputs, batch.targets)
    return partners.directions
