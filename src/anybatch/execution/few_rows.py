"""A few rows of a batch at two sizes, and where their outputs hold the samples."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybatch.core import pytree
from anybatch.core.batch import MicroBatch, copied
from anybatch.core.modules import eager
from anybatch.core.python_state import difference
from anybatch.core.rng import RNGState
from anybatch.distributed.local_batch import Layout
from anybatch.errors import AnybatchError, BatchError, LossError, NotExactError
from anybatch.execution.guard import Guard
from anybatch.execution.step import Step

ENOUGH = 4
"""Rows of which half are still more than one: some layers cannot train on a single row."""

ODD = 3
"""Rows of the second forward: lines of 4 and of 2 in 4 or 8 tokens hold one sample each."""

ROW_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AssertionError, ArithmeticError)
"""Errors of a model that does not take so few rows, or an odd number of them."""


def two_sizes(step: Step, most: int = 0, *, odd: bool = False) -> tuple[MicroBatch, MicroBatch]:
    """Return the first rows of the batch, and the last of these in reverse; both are copies.

    Of a micro-batch `most` rows are taken, 0 (default) is all. `odd` is an odd number of rows in
    place of a half, where their bytes need no forecast.
    """
    count = 1 if step.micro_batch >= ENOUGH else 2
    roomy = not (step.budgeted or step.retries)
    if step.micro_batch == 1 and most and roomy:  # two rows have halves of one
        count = most
    few = list(islice(step.feed(), count))
    if len(few) == 1 and few[0].size < 2:
        few *= 2  # a rank with one sample
    if len(few) == 1:
        return _parted(few[0], most, odd=odd and roomy)
    if most:
        few = [first_of(micro, max(most // len(few), 1)) for micro in few]
    try:
        full, last = _joined(few), _joined(few[len(few) // 2 :])
        if odd and roomy and full.size == ENOUGH:
            last = _part(full, ENOUGH - ODD, ENOUGH)
    except AnybatchError:  # samples of different shapes, one at a time
        few = few[:1] * 2
        full, last = _joined(few), few[0]
    made_of = [micro.inputs for micro in few]
    part = _own_tensors(turned(last.inputs, last.size), last.size, made_of)
    return _own_tensors(full.inputs, full.size, made_of), part


def _joined(few: Sequence[MicroBatch]) -> MicroBatch:
    if len(few) == 1:
        return few[0]
    sizes = [micro.size for micro in few]
    inputs = pytree.join([micro.inputs for micro in few], sizes=sizes, name="inputs")
    return MicroBatch(inputs, None, sum(sizes))


def first_of(micro: MicroBatch, most: int) -> MicroBatch:
    """Return the first rows of a micro-batch, at most so many."""
    return _part(micro, 0, min(micro.size, most))


def _part(micro: MicroBatch, begin: int, end: int) -> MicroBatch:
    return MicroBatch(pytree.rows(micro.inputs, begin, end, micro.size), None, end - begin)


def _parted(micro: MicroBatch, most: int, *, odd: bool) -> tuple[MicroBatch, MicroBatch]:
    """Return rows of a micro-batch, and the last of these in reverse: a half, or an odd number."""
    few = first_of(micro, most or micro.size)
    count = ODD if odd and few.size == ENOUGH else few.size // 2
    last = _part(few, few.size - count, few.size)
    return copied(few), _own_tensors(turned(last.inputs, last.size), last.size, micro.inputs)


def _own_tensors(inputs: Any, size: int, made_of: Any) -> MicroBatch:
    """Return a micro-batch without tensors of `made_of`, except those that require gradients.

    Rows that were joined or turned are copies already: copied again they would be there twice.
    """
    shared_ids = {id(tensor) for _, tensor in pytree.tensors(made_of)}

    def separated(tensor: Tensor) -> Tensor:
        shared = id(tensor) in shared_ids and not tensor.requires_grad
        return tensor.detach().clone() if shared else tensor

    return MicroBatch(pytree.map_tensors(separated, inputs), None, size)


def turned(inputs: Any, size: int) -> Any:
    """Return rows in reverse order."""

    def reversed_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.flip(0) if leaf.dim() else leaf
        if isinstance(leaf, np.ndarray):
            return leaf[::-1].copy() if leaf.ndim else leaf
        strings = isinstance(leaf, list | tuple) and len(leaf) == size
        return type(leaf)(leaf[::-1]) if strings else leaf

    return pytree.map_leaves(reversed_leaf, inputs)


def written(micro: MicroBatch) -> bool:
    """Return whether forward wrote to its inputs, which are its own copies."""
    tensors = [tensor for _, tensor in pytree.tensors(micro.inputs)]
    return any(not tensor.is_inference() and tensor._version > 0 for tensor in tensors)


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings (the step gives them again), and no compiled code."""
    with warnings.catch_warnings(), eager():
        warnings.simplefilter("ignore")
        yield


def layout_of(outputs: Any, fewer: Any, n: int, m: int) -> Layout:
    """Return where outputs of `n` and of `m` rows hold the samples."""
    all_rows, some_rows = list(pytree.tensors(outputs, "outputs")), list(pytree.tensors(fewer))
    if len(all_rows) != len(some_rows):
        raise BatchError(
            f"a model must return the same number of tensors for any number of samples, and it "
            f"returned {len(all_rows)} for {n} and {len(some_rows)} for {m}: stack one tensor a "
            "sample along a first dimension"
        )
    if not all_rows:
        raise LossError(
            f"a model must return tensors, in tuples, mappings or dataclasses, and it returned "
            f"{type(outputs).__name__}: return the tensors that the loss needs"
        )
    _check_numbers(outputs, fewer)
    pairs = zip(all_rows, some_rows, strict=True)
    return tuple(_axis(path, a, b, n, m) for (path, a), (_, b) in pairs)


def _axis(path: str, a: Tensor, b: Tensor, n: int, m: int) -> int | None:
    if a.shape == b.shape:
        return None
    changed = [d for d in range(a.dim()) if a.dim() == b.dim() and a.shape[d] != b.shape[d]]
    if len(changed) == 1 and (a.shape[changed[0]], b.shape[changed[0]]) == (n, m):
        return changed[0]
    grown = f"{tuple(a.shape)} for {n} samples and {tuple(b.shape)} for {m}"
    if len(changed) > 1:
        raise NotExactError(
            f"samples must not meet inside the model when the batch is split, and {path} has shape "
            f"{grown}: compare samples in the loss, and pad tensors as long as the longest row to "
            "a length that all micro-batches have (pad_packed_sequence(..., "
            "total_length=x.shape[1]))"
        )
    raise BatchError(
        f"an output must hold each sample once along one dimension, and {path} has shape {grown}: "
        "return [samples, ...] and reshape in the loss"
    )


def _check_numbers(outputs: Any, fewer: Any) -> None:
    """Refuse numbers that follow the number of rows: the full batch has another."""
    for (path, a), (_, b) in zip(_numbers(outputs), _numbers(fewer), strict=False):
        if a != b:
            raise BatchError(
                f"an output that is no tensor must not depend on the number of samples, and "
                f"{path} is {a} for some and {b} for fewer: compute it in the loss"
            )


def _numbers(values: Any, path: str = "outputs") -> list[tuple[str, Any]]:
    if isinstance(values, int | float) and not isinstance(values, bool):
        return [(path, values)]
    return [
        found for key, child in pytree.children(values) for found in _numbers(child, path + key)
    ]


def rough_layout(outputs: Any, fewer: Any, n: int, m: int) -> Layout:
    """Return where outputs next to a loss hold samples, without requirements on them."""
    a, b = ([t for _, t in pytree.tensors(values)] for values in (outputs, fewer))
    if len(a) != len(b):
        return ()
    return tuple(
        0 if x.dim() and y.dim() and x.shape == (n, *y.shape[1:]) and y.shape[0] == m else None
        for x, y in zip(a, b, strict=True)
    )


def note_layouts(step: Step, outputs: Any, fewer: Any, n: int, m: int) -> Layout:
    """Record where outputs hold the samples; return the layout by which fewer rows are compared."""
    loss, traits = step.loss, step.traits
    if not loss.takes_outputs:
        traits.layout = ()
        traits.extra_layout = rough_layout(loss.outputs(outputs), loss.outputs(fewer), n, m)
        return rough_layout(outputs, fewer, n, m)
    if fewer is None:
        shapes = (tensor.shape for _, tensor in pytree.tensors(outputs))
        traits.layout = tuple(0 if shape[:1] == (n,) else None for shape in shapes)
        return ()
    traits.layout = layout_of(outputs, fewer, n, m)
    return traits.layout


def computed(step: Step) -> set[torch.dtype]:
    """Return the dtypes of a model; its outputs may have been cast to a finer one."""
    return {p.dtype for p in step.model.parameters() if p.is_floating_point()}


def row_mismatch(
    outputs: Any,
    fewer: Any,
    layout: Layout,
    rows: int,
    computed: Iterable[torch.dtype] = (),
    *,
    turned: bool = True,
) -> str | None:
    """Say which output differs for the rows that both runs have, if one does.

    The outputs of `rows` rows are those of the last of some, in reverse order if `turned`.
    `computed` are the dtypes of the model. Default: those of its outputs.
    """
    for path, a, b, axis in comparable(outputs, fewer, layout, rows):
        gap, size = difference(a, b, axis if turned else None)
        if gap > kernel_tolerance(a.dtype, computed) * size:
            return f"{path} of the same {rows} rows differs by {gap:.2g}"
    return None


Compared = tuple[MicroBatch, Any, str | None]
"""Rows, their outputs, and which of these differ among others; None where none does."""


def half_mismatch(step: Step, full: MicroBatch, outputs: Any, layout: Layout) -> Compared:
    """Compare some rows with each half of them, of which one lacks the row that decides.

    The largest number of 4 rows is that of 3 of them, too, unless the fourth has it.
    """
    half = max(1, full.size // 2)
    for begin in (0, full.size - half):
        part, found = _part(full, begin, begin + half), None
        with torch.no_grad(), Guard(step):
            found = step.inspected(part)
        rows = _first(outputs, layout, begin + half)
        mismatch = row_mismatch(rows, found, layout, half, computed(step), turned=False)
        if mismatch is not None:
            break
    return part, found, mismatch


def _first(outputs: Any, layout: Layout, rows: int) -> Any:
    """Return the outputs of the first rows."""
    axes = iter(layout)

    def cut(tensor: Tensor) -> Tensor:
        axis = next(axes, None)
        return tensor if axis is None else tensor.narrow(axis, 0, rows)

    return pytree.map_tensors(cut, outputs)


def kernel_tolerance(dtype: torch.dtype, computed: Iterable[torch.dtype]) -> float:
    """Return the relative difference that kernels may make of the same rows."""
    eps = max(torch.finfo(one).eps for one in {dtype, *computed})
    return float(eps ** (0.5 if eps == torch.finfo(torch.float64).eps else 0.25))


def comparable(
    outputs: Any, fewer: Any, layout: Layout, rows: int
) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """Yield each output that can be compared: name, last rows, those of fewer, axis of rows."""
    for (path, a), (_, b), axis in zip(
        pytree.tensors(outputs, "outputs"), pytree.tensors(fewer), layout, strict=False
    ):
        numeric = a.is_floating_point() or a.is_complex()
        if axis is not None and numeric and a.itemsize > 1 and a.layout == torch.strided:
            yield path, a.narrow(axis, a.shape[axis] - rows, rows), b, axis


def refuse_meeting(step: Step, part: MicroBatch, fewer: Any, layout: Layout, mismatch: str) -> None:
    """Refuse the difference, and name its cause: other rows, or another call."""
    rng = RNGState.now()
    with quietly(), torch.no_grad(), Guard(step):
        again = step.inspected(part)
    rng.put_back()
    last = row_mismatch(fewer, again, layout, part.size, computed(step), turned=False)
    if last is None:
        raise NotExactError(
            f"samples must not meet inside the model when the batch is split, and {mismatch} with "
            "other rows in the batch (anybatch.check names the module). Give micro_batch >= the "
            "batch size"
        )
    raise NotExactError(
        f"forward must return the same when it is called again, and {mismatch} from call to call: "
        "it keeps state in plain attributes, which every micro-batch would move. Register it as a "
        "buffer, or give micro_batch >= the batch size"
    )


def lists_rows(inputs: Any) -> bool:
    """Say whether inputs hold rows that are no tensors."""
    plain = (Tensor, str, int, float, type(None))
    return any(not isinstance(leaf, plain) for _, leaf in pytree.leaves(inputs))
