"""Comparison of the rows that ``collate_fn`` makes of some items together and of the same apart.

The undivided batch would be collated at once. Where a function normalises by what it is given,
mixes samples or counts them, what it makes of a micro-batch is no part of that. So a few items are
loaded once, in the process that loads for the step, and collated together and in two parts:

    collate_fn([a, b, c, d])  ->  rows a b c d  ┐ the same bits, where shapes are the same
    collate_fn([a, b]), collate_fn([c, d])  ->  ┘ else the same numbers in a corner of the larger

The global random generators, and the attributes of an object that is called, are as they were. A
function of torch's own is known, and not asked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from anybatch import tree
from anybatch.batch import LazyBatch, bytes_of_leaf, collated
from anybatch.errors import NotExactError
from anybatch.rng import Dice

FEW = 4
"""Items that are collated, of which half are still more than one."""

FINE, DRAWS, MEETS, COUNTS, UNKNOWN = "", "draws", "meets", "counts", "unknown"

MET = (
    "samples must not meet in collate_fn when the batch is split, and it makes other rows of the "
    "same items when others come with them: normalise by fixed numbers, and compute what compares "
    "or counts samples in the model or the loss, or give micro_batch >= the batch size"
)
DOUBTS = {
    FINE: (),
    DRAWS: ("collate_fn makes other rows of the same items each time",),
    COUNTS: ("collate_fn gives another number with more items than with fewer",),
    UNKNOWN: ("what collate_fn makes of some items could not be compared with fewer of them",),
}


def doubts_of_collate(batch: LazyBatch) -> tuple[str, ...]:
    """Return why it is not shown that samples stay apart as a batch is loaded.

    Raises:
        NotExactError: they do not.
    """
    count = min(batch.size, FEW)
    if batch.collate_fn in (None, default_collate) or count < 2:
        return ()
    assert batch.collate_fn is not None
    dice = Dice.now()
    loader = DataLoader(
        batch.dataset,
        batch_sampler=[list(batch.indices[:count])],
        num_workers=min(batch.workers, 1),
        collate_fn=Compared(batch.collate_fn, paired=batch.paired),
        generator=torch.Generator(),
    )
    try:
        (found,) = loader
    finally:
        dice.put_back()
    if found == MEETS:
        raise NotExactError(MET)
    return DOUBTS[found]


class Compared:
    """What stands in for ``collate_fn``, and says what that does; another process may call it."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], *, paired: bool) -> None:
        self._collate, self._paired = collate_fn, paired

    def __call__(self, items: list[Any]) -> str:
        """Return one of FINE, DRAWS, MEETS, COUNTS and UNKNOWN."""
        half, dice, attributes = len(items) // 2, Dice.now(), _Attributes(self._collate)
        try:
            first, again, parts = (copy.deepcopy(items) for _ in range(3))
            whole = self._made(first)
            drawn = not Dice.now().same_as(dice)
            dice.put_back()
            if drawn or _differ(whole, self._made(again)):
                return DRAWS
            made = self._made(parts[:half]), self._made(parts[half:])
        except Exception:  # the step itself meets what is no question of few items
            return UNKNOWN
        finally:
            dice.put_back()
            attributes.put_back()
        n = len(items)
        cut = tree.rows(whole, 0, half, n), tree.rows(whole, half, n, n)
        found = {_differ(rows, part) for rows, part in zip(cut, made, strict=True)}
        return next((one for one in (UNKNOWN, MEETS, COUNTS) if one in found), FINE)

    def _made(self, items: list[Any]) -> Any:
        count = len(items)  # the function may take its list apart
        return collated(self._collate(items), count, {}, paired=self._paired)


class _Attributes:
    """Attributes of an object that is called, to be put back: a counter must not see more calls."""

    def __init__(self, called: Any) -> None:
        own = getattr(called, "__self__", called)
        self._now = getattr(own, "__dict__", {})
        self._before = dict(self._now)

    def put_back(self) -> None:
        """Let them be as they were."""
        moved = self._now.keys() - self._before.keys()
        for name in moved:
            del self._now[name]
        self._now.update(self._before)


def _differ(rows: Any, part: Any) -> str:
    """Return FINE where two trees of as many rows are alike; else MEETS, COUNTS or UNKNOWN.

    Rows that are padded to another length are alike where they are the same up to that, from either
    end; what else differs beside them may come from the length.
    """
    pairs = list(zip(_leaves(rows), _leaves(part), strict=False))
    if len(pairs) != len(list(_leaves(rows))) or len(pairs) != len(list(_leaves(part))):
        return UNKNOWN
    padded = [pair for pair in pairs if _shape(pair[0]) != _shape(pair[1])]
    if any(len(_shape(a)) != len(_shape(b)) for a, b in padded):
        return UNKNOWN
    if not all(_ends(a, b) for a, b in padded):
        return UNKNOWN
    others = [pair for pair in pairs if _shape(pair[0]) == _shape(pair[1])]
    others = [(a, b) for a, b in others if bytes_of_leaf(a) != bytes_of_leaf(b)]
    if not others:
        return FINE
    if padded or all(_rounded(a, b) for a, b in others):
        return UNKNOWN
    return COUNTS if all(_is_number(a) and _is_number(b) for a, b in others) else MEETS


def _is_number(leaf: Any) -> bool:
    """Say whether a leaf is a number that belongs to no sample; a loss may not use it."""
    return isinstance(leaf, Number) or (isinstance(leaf, tree.ARRAYS) and not leaf.ndim)


def _rounded(a: Any, b: Any) -> bool:
    """Say whether two leaves differ as kernels on more rows and on fewer may round otherwise."""
    if not (isinstance(a, tree.ARRAYS) and isinstance(b, tree.ARRAYS)):
        return False
    one, other = torch.as_tensor(a), torch.as_tensor(b)
    if not one.is_floating_point() or one.dtype != other.dtype:
        return False
    eps = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=eps, atol=0.0, equal_nan=True)


def _leaves(values: Any) -> Iterator[Any]:
    for _, leaf in tree.leaves(values):
        if isinstance(leaf, tree.ENTRIES):
            yield from _leaves(list(leaf))
        else:
            yield leaf


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if isinstance(leaf, tree.ARRAYS) else ()


def _ends(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> bool:
    """Say whether two arrays are the same as far as both go, from the beginning or from the end."""
    common = [min(n, m) for n, m in zip(a.shape, b.shape, strict=True)]
    first = tuple(slice(n) for n in common)

    def last(x: Any) -> tuple[slice, ...]:
        return tuple(slice(m - n, m) for n, m in zip(common, x.shape, strict=True))

    return any(
        bytes_of_leaf(a[one]) == bytes_of_leaf(b[other])
        for one, other in ((first, first), (last(a), last(b)))
    )
