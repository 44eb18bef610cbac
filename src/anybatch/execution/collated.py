"""Comparison of the rows from ``collate_fn`` for some items together and in separate calls.

The undivided batch would be collated at once. If a function normalises by its items, mixes samples
or counts them, its rows of a micro-batch are no part of that. So a few items are loaded once more,
in the process that loads for the step, and collated together and in two parts; and then the full
batch, and its micro-batches, as far as memory permits:

    collate_fn([a, b, c, d])  ->  rows a b c d  ┐ the same bits, where shapes are the same
    collate_fn([a, b]), collate_fn([c, d])  ->  ┘ else the same numbers in a corner of the larger

The global random generators, and the attributes of an object that is called, are as they were. A
function of torch's own is not tested. Another one is tested again where the sizes of a step, or
the code and the numbers that it names, are new.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from anybatch.core import pytree
from anybatch.core.batch import LazyBatch, bytes_of_leaf, collated
from anybatch.core.python_state import fill
from anybatch.core.rng import RNGState
from anybatch.errors import NotExactError
from anybatch.execution.outside import every_number, parts, plain
from anybatch.execution.proof.inspected import MOST, ComparedSizes
from anybatch.execution.signature import bytes_of
from anybatch.execution.step import Step

FEW = 4
"""Items that are collated, of which half are still more than one."""

COMPARED_BYTES = 2**29
"""Bytes of rows that are collated at once for a comparison; of a larger batch a part is."""

FINE, DRAWS, MEETS, COUNTS, MOVES, UNKNOWN = "", "draws", "meets", "counts", "moves", "unknown"

MEETING = (
    "samples must not meet in collate_fn when the batch is split, and its rows for the same items "
    "differ with the other items: normalise by fixed numbers, and compute what compares or counts "
    "samples in the model or the loss, or give micro_batch >= the batch size"
)
ANOTHER = "collate_fn was replaced in too many steps to compare each"
OTHER_SIZE = "the batch has another number of items than collate_fn was compared on"
DOUBTS = {
    FINE: (),
    DRAWS: ("collate_fn makes other rows of the same items each time",),
    COUNTS: ("collate_fn gives another number with more items than with fewer",),
    MOVES: ("each call of collate_fn moves a number that it may compute with",),
    UNKNOWN: ("the rows of collate_fn could not be compared with those of fewer items",),
}

Cuts = tuple[int, ...]
"""Where the parts of some items begin, and how many items there are."""


class Found(NamedTuple):
    """Finding of a comparison: one of FINE to UNKNOWN, and bytes of a row, 0 if unknown."""

    what: str
    bytes: int = 0


class Collates:
    """Collate functions of the steps of an engine, with the sizes and doubts of each."""

    def __init__(self) -> None:
        self._recorded: list[tuple[Any, ComparedSizes, dict[str, None]]] = []

    def ask(self, step: Step) -> None:
        """Add the doubts of its collate function to a step."""
        batch = step.batch
        if not isinstance(batch, LazyBatch) or _per_item(batch.collate_fn):
            return
        traits = batch.paired, traits_of(batch.collate_fn)
        record = next((one for one in self._recorded if one[0] == traits), None)
        if record is None and len(self._recorded) >= MOST:
            step.traits.doubt(ANOTHER)
            return
        if record is None:
            record = traits, ComparedSizes(counts=True), {}
        _, compared, doubts = record
        samples, micro_batch = max(step.global_batch.size, batch.size), step.micro_batch
        if compared.new(samples, micro_batch):  # else each new size would be loaded twice
            doubts |= dict.fromkeys(doubts_of_collate(batch, micro_batch, samples))
            compared.add(samples, micro_batch, step.traits.steps)
        elif compared.beyond(samples, micro_batch):
            doubts[OTHER_SIZE] = None
        if record not in self._recorded:
            self._recorded.append(record)
        step.traits.doubt(*doubts)


def traits_of(collate_fn: Any) -> tuple[Any, ...]:
    """Return the code of a collate function and the numbers it names, for comparison."""
    holder = nn.Module()
    holder.register_forward_hook(collate_fn)
    named = [("collate_fn", holder)]
    held = getattr(getattr(collate_fn, "__self__", collate_fn), "__dict__", {})
    # Of an installed class, too: any attribute may set what has no gradient
    # (test_another_function_in_a_later_step_is_refused).
    attributes = {name: plain(value) for name, value in held.items()}
    return type(collate_fn), parts(named), every_number(named), attributes


def doubts_of_collate(batch: LazyBatch, micro_batch: int = 0, samples: int = 0) -> tuple[str, ...]:
    """Return why it is not shown that samples pass through loading separately.

    Args:
        batch: the batch.
        micro_batch: samples of a micro-batch; 0 (default) compares only a few items in halves.
        samples: of all ranks; 0 (default) where there is one.
    """
    count = min(batch.size, FEW)
    if _per_item(batch.collate_fn) or batch.size < 2:
        return ()
    few = _compared(batch, count, (0, count // 2, count))
    if few.what in (DRAWS, MOVES) or not (few.bytes and micro_batch):
        return DOUBTS[few.what]
    samples = max(samples, batch.size)
    fitting = COMPARED_BYTES // few.bytes // micro_batch * micro_batch
    if fitting < min(2 * micro_batch, samples):
        return (*DOUBTS[few.what], OTHER_SIZE)
    starts = (*range(0, batch.size, micro_batch), *range(batch.size, samples, micro_batch))
    most = min(fitting, samples)
    cuts = (*(begin for begin in starts if begin < most), most)
    found = _compared(batch, min(batch.size, most), cuts)
    return (*DOUBTS[found.what], *([OTHER_SIZE] if most < samples else []))


def _per_item(collate_fn: Any) -> bool:
    """Say whether a function is torch's own, which collates each item by itself."""
    return collate_fn in (None, default_collate)


def _compared(batch: LazyBatch, count: int, cuts: Cuts) -> Found:
    """Load the first items of a batch, and compare them collated at once and in parts."""
    assert batch.collate_fn is not None
    rng = RNGState.now()
    loader = DataLoader(
        batch.dataset,
        batch_sampler=[list(batch.indices[:count])],
        num_workers=min(batch.workers, 1),
        collate_fn=Compared(batch.collate_fn, cuts, paired=batch.paired),
        generator=torch.Generator(),
    )
    try:
        (found,) = loader
    finally:
        rng.put_back()
    if found.what == MEETS:
        raise NotExactError(MEETING)
    assert isinstance(found, Found)
    return found


class Compared:
    """Stand-in for ``collate_fn`` that compares its results; another process may call it.

    Parts begin at `cuts`; items are taken again where they are fewer.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], cuts: Cuts, *, paired: bool) -> None:
        self._collate, self._cuts, self._paired = collate_fn, cuts, paired

    def __call__(self, items: list[Any]) -> Found:
        """Return the finding."""
        rng, size = RNGState.now(), 0
        held = getattr(getattr(self._collate, "__self__", self._collate), "__dict__", {})
        attributes = held if isinstance(held, dict) else {}  # that of a class is no dict
        was = dict(attributes)
        try:
            before, n = traits_of(self._collate)[2:], self._cuts[-1]
            full = self._made(items, range(n))
            size = max(1, _bytes(full) // n)
            drawn = not RNGState.now().same_as(rng)
            rng.put_back()
            again = None if drawn or n > FEW else self._made(items, range(n))
            if drawn or (again is not None and _differ(full, again)):
                return Found(DRAWS, size)
            found = set()
            for begin, end in zip(self._cuts, self._cuts[1:], strict=False):
                part = self._made(items, range(begin, end))
                found.add(_differ(pytree.rows(full, begin, end, n), part))
            if before != traits_of(self._collate)[2:]:
                found.add(MOVES)
        except Exception:  # the step itself meets what is no question of few items
            return Found(UNKNOWN, size)
        finally:
            rng.put_back()
            fill(attributes, was)  # a counter must not count more calls
        order = (UNKNOWN, MEETS, MOVES, COUNTS)
        return Found(next((one for one in order if one in found), FINE), size)

    def _made(self, items: Sequence[Any], at: range) -> Any:
        """Collate copies of some items; the function may modify its list and the items."""
        copies = [copy.deepcopy(items[index % len(items)]) for index in at]
        return collated(self._collate(copies), len(at), {}, paired=self._paired)


def _bytes(values: Any) -> int:
    """Return the bytes of rows, texts aside."""
    arrays = [leaf for leaf in _leaves(values) if isinstance(leaf, pytree.ARRAYS)]
    return sum(bytes_of(one) if isinstance(one, Tensor) else one.nbytes for one in arrays)


def _differ(rows: Any, part: Any) -> str:
    """Return FINE where two trees of as many rows are alike; else MEETS, COUNTS or UNKNOWN.

    Rows that are padded to another length are equal if they agree up to that, from either end;
    other differences may come from the length.
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
    return isinstance(leaf, Number) or (isinstance(leaf, pytree.ARRAYS) and not leaf.ndim)


def _rounded(a: Any, b: Any) -> bool:
    """Say whether two leaves differ as kernels on more rows and on fewer may round otherwise."""
    if not (isinstance(a, pytree.ARRAYS) and isinstance(b, pytree.ARRAYS)):
        return False
    one, other = torch.as_tensor(a), torch.as_tensor(b)
    if not one.is_floating_point() or one.dtype != other.dtype:
        return False
    eps = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=eps, atol=0.0, equal_nan=True)


def _leaves(values: Any) -> Iterator[Any]:
    for _, leaf in pytree.leaves(values):
        if isinstance(leaf, pytree.ENTRIES):
            yield from _leaves(list(leaf))
        else:
            yield leaf


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if isinstance(leaf, pytree.ARRAYS) else ()


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
