"""Asking a kernel itself: NaN in the numbers of one sample, and where it comes out.

0 x NaN is NaN, so a result that stays finite has no part of what was NaN, whatever the values are.
A kernel that takes no NaN (LAPACK) is given other values instead, and its results are compared bit
for bit. Integers hold no NaN: they are taken to stay in their row where the result has that row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from anybatch.proof.masks import CUT, LOOSE, PLACE, fold, total
from anybatch.proof.rules import Call

IN_ORDER = frozenset(
    ("_grouped_mm", "_pack_padded_sequence", "_pad_packed_sequence", "mkldnn_rnn_layer")
)
"""Kernels that bring rows which are in an order of their own back to their samples."""

Values = tuple[tuple[Any, ...], dict[str, Any]]


def ask(call: Call, before: Values, unfollowed: Callable[[str], None]) -> list[Tensor]:
    """Return the masks of what a kernel has made or written, by calling it again for each sample.

    Args:
        call: the call, which has been made.
        before: its arguments as they were before it, copies of what it has written to.
        unfollowed: told the error of a kernel that takes neither NaN nor other values.
    """
    leaves, spec = tree_flatten(before)
    named = [id(one) for one in tree_leaves((call.args, call.kwargs))]
    made = (*call.results, *call.written)
    marks = [torch.zeros(r.shape, dtype=torch.uint8, device=r.device) for r in made]
    bits = 0
    for mask in call.masks.values():
        bits |= total(mask)
    for bit in range(8):
        ordered = call.name in IN_ORDER and bool(1 << bit & (LOOSE | CUT))
        if not bits >> bit & 1 or ordered:
            continue
        chosen = [
            (call.masks[name] >> bit & 1).bool()
            if name in call.masks and bool((call.masks[name] >> bit & 1).any())
            else None
            for name in named
        ]
        floats = [one is not None and _real(leaf) for leaf, one in zip(leaves, chosen, strict=True)]
        if any(floats):
            _ask_floats(call, leaves, spec, chosen, marks, bit, unfollowed)
        if call.name not in IN_ORDER and 1 << bit != PLACE:  # a place among whole numbers leads
            for leaf, one in zip(leaves, chosen, strict=True):
                if one is not None and not _real(leaf):
                    _by_row(leaf, one, marks, bit)
    return marks


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _ask_floats(
    call: Call,
    leaves: list[Any],
    spec: Any,
    chosen: list[Tensor | None],
    marks: list[Tensor],
    bit: int,
    unfollowed: Callable[[str], None],
) -> None:
    named = [id(one) for one in tree_leaves((call.args, call.kwargs))]
    written = [named.index(id(one)) for one in call.written]

    def again(other: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        changed: list[Any] = []
        for leaf, one in zip(leaves, chosen, strict=True):
            if _real(leaf) and leaf.layout == torch.strided:
                finite = (
                    leaf if bool(leaf.sum().isfinite()) else torch.where(leaf.isfinite(), leaf, 0)
                )
                changed.append(other(finite, one) if one is not None else _own(call, finite))
            else:
                changed.append(_own(call, leaf))
        args, kwargs = tree_unflatten(changed, spec)
        results = tree_leaves(call.func(*args, **kwargs))
        return [r for r in results if isinstance(r, Tensor)] + [changed[at] for at in written]

    try:
        found = again(lambda leaf, one: leaf.masked_fill(one, math.nan))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        _ask_values(again, marks, bit, unfollowed, error)
        return
    for mark, result in zip(marks, found, strict=True):
        if result.is_complex():
            mark.bitwise_or_(torch.view_as_real(result).isnan().any(-1).to(torch.uint8) << bit)
        elif result.is_floating_point():
            mark.bitwise_or_(result.isnan().to(torch.uint8) << bit)
        else:
            _into_integers(chosen, leaves, mark, bit)


def _own(call: Call, leaf: Any) -> Any:
    """Return a copy of what a kernel may write to."""
    return leaf.clone() if isinstance(leaf, Tensor) and call.func._schema.is_mutable else leaf


def _ask_values(
    again: Callable[[Callable[[Tensor, Tensor], Tensor]], list[Tensor]],
    marks: list[Tensor],
    bit: int,
    unfollowed: Callable[[str], None],
    error: Exception,
) -> None:
    try:
        plain = again(lambda leaf, _: leaf)
        found = again(lambda leaf, one: torch.where(one, torch.rand_like(leaf) + leaf, leaf))
    except (RuntimeError, ValueError, NotImplementedError):
        unfollowed(str(error).split("\n")[0][:80])
        for mark in marks:
            mark.bitwise_or_(1 << bit)
        return
    for mark, one, other in zip(marks, plain, found, strict=True):
        mark.bitwise_or_((one != other).to(torch.uint8) << bit)


def _into_integers(chosen: list[Tensor | None], leaves: list[Any], mark: Tensor, bit: int) -> None:
    """Take integers that come of floats to stay in their row, where there is one."""
    for leaf, one in zip(leaves, chosen, strict=True):
        if one is not None and leaf.dim() and mark.dim() and leaf.shape[0] == mark.shape[0]:
            rows = fold(one.to(torch.uint8), range(1, leaf.dim()), keep=False)
            mark.bitwise_or_((rows << bit).reshape([-1] + [1] * (mark.dim() - 1)))
            return
    mark.bitwise_or_(1 << bit)


def _by_row(leaf: Tensor, one: Tensor, marks: list[Tensor], bit: int) -> None:
    for mark in marks:
        if leaf.dim() and mark.dim() and leaf.shape[0] == mark.shape[0]:
            rows = fold(one.to(torch.uint8), range(1, leaf.dim()), keep=False)
            mark.bitwise_or_((rows << bit).reshape([-1] + [1] * (mark.dim() - 1)))
        else:
            mark.bitwise_or_(1 << bit)
