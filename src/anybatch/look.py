"""The first look at a model: twice, at two numbers of rows, before its outputs are trusted.

Splitting a batch rests on things that no shape of one forward pass can tell: along which dimension
an output holds the samples (``[T, n, C]`` with T equal to n?), whether the outputs of some rows
depend on the others (a BatchNorm written by hand, an LSTM that takes samples for time steps),
whether forward writes to its inputs. So the first step of every kind of batch runs the model,
without gradients, on the first micro-batch and on the last of its rows, in reverse order, and
compares. What cannot be split is refused before anything has been computed with it.

    forward(rows 0 1 2 3)  -> outputs [4, C], [T, 4, C], [K, D]
    forward(rows 3 2)      -> outputs [2, C], [T, 2, C], [K, D]     layout: 0, 1, none
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybatch import tree
from anybatch.batch import MicroBatch
from anybatch.errors import AnybatchError, BatchError, LossError, NotExactError
from anybatch.guard import Guard
from anybatch.memory_errors import out_of_memory
from anybatch.rng import Dice
from anybatch.step import Layout, Step, copied

ENOUGH = 4
"""Rows of which half are still more than one: some layers cannot train on a single row."""


def look(step: Step) -> None:
    """Run forward at two sizes, compare, and tell `step` where the outputs hold the samples.

    Dice and buffers are left as they were.

    Args:
        step: a step that has not begun; its `layout` and `copies` are set.

    Raises:
        NotExactError: samples meet inside the model, or forward writes to a parameter.
        BatchError: an output that is no tensor depends on the number of rows.
        LossError: the outputs hold no tensor.
    """
    dice, guard = Dice.now(), Guard(step)
    whole, part = two_sizes(step)
    dice.put_back()
    with quietly(), torch.no_grad(), guard:
        outputs = step.forward(whole)
        drawn = not Dice.now().same_as(dice)
        dice.put_back()
        fewer = _forward_of_fewer(step, part)
        dice.put_back()
    step.forget_casts()
    step.buffers.restart()
    step.copies = written(whole) or written(part)
    if not step.loss.takes_outputs:
        step.layout, layout = (), rough_layout(outputs, fewer, whole.size, part.size)
    elif fewer is None:
        layout = tuple(_axis_by_size(t, whole.size) for _, t in tree.tensors(outputs))
        step.layout, layout = layout, ()
    else:
        step.layout = layout = layout_of(outputs, fewer, whole.size, part.size)
    if drawn or step.local or step.copies or guard.own_dice:
        return  # the rows are not the same, or need not come out the same
    apart = apart_rows(outputs, fewer, layout, part.size, _computed(step))
    if apart is not None:
        _refuse_meeting(step, part, fewer, layout, apart)


def two_sizes(step: Step) -> tuple[MicroBatch, MicroBatch]:
    """Return the first rows of the batch, and the last of these in reverse; both are copies."""
    first, *others = islice(step.feed(), 1 if step.micro_batch >= ENOUGH else 2)
    if not others and first.size < 2:
        others = [first]  # a rank with one sample
    if not others:
        half = first.size // 2
        rows = tree.rows(first.inputs, first.size - half, first.size, first.size)
        whole = copied(MicroBatch(first.inputs, None, first.size))
        return whole, _alone(turned(rows, half), half, first.inputs)
    second = others[0]
    try:
        both = tree.join(
            [first.inputs, second.inputs], sizes=[first.size, second.size], name="inputs"
        )
    except AnybatchError:  # samples of different shapes, one at a time
        second = first
        both = tree.join([first.inputs] * 2, sizes=[first.size] * 2, name="inputs")
    part = _alone(turned(second.inputs, second.size), second.size, second.inputs)
    return _alone(both, first.size + second.size, [first.inputs, second.inputs]), part


def _alone(inputs: Any, size: int, made_of: Any) -> MicroBatch:
    """Return a micro-batch that shares no tensor with what it was `made_of`, without rows at least.

    Rows that were joined or turned are copies already: copied again they would be there twice.
    """
    given = {id(tensor) for _, tensor in tree.tensors(made_of)}

    def apart(tensor: Tensor) -> Tensor:
        shared = id(tensor) in given and not tensor.requires_grad
        return tensor.detach().clone() if shared else tensor

    return MicroBatch(tree.map_tensors(apart, inputs), None, size)


def turned(inputs: Any, size: int) -> Any:
    """Return rows in reverse order."""

    def turn(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.flip(0) if leaf.dim() else leaf
        if isinstance(leaf, np.ndarray):
            return leaf[::-1].copy() if leaf.ndim else leaf
        strings = isinstance(leaf, list | tuple) and len(leaf) == size
        return leaf[::-1] if strings else leaf

    return tree.map_leaves(turn, inputs)


def written(micro: MicroBatch) -> bool:
    """Say whether forward wrote to its inputs: they are copies that nobody else has."""
    tensors = [tensor for _, tensor in tree.tensors(micro.inputs)]
    return any(not tensor.is_inference() and tensor._version > 0 for tensor in tensors)


def _forward_of_fewer(step: Step, part: MicroBatch) -> Any:
    """Return the outputs of `part`, or None where the model cannot take so few rows."""
    outside = sys.exception()
    try:
        return step.forward(part)
    except AnybatchError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if out_of_memory(error, outside=outside):
            raise
        return None  # the step itself will meet it if it must


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings (the step gives them again), and no compiled code."""
    with warnings.catch_warnings(), eager():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled models as they were written: dispatch modes break what was compiled."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def layout_of(outputs: Any, fewer: Any, n: int, m: int) -> Layout:
    """Return where outputs of `n` and of `m` rows hold the samples."""
    all_rows, some_rows = list(tree.tensors(outputs, "outputs")), list(tree.tensors(fewer))
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
            f"{grown}: compute what compares samples in the loss, and pad what is as long as the "
            "longest row to a length that all micro-batches have (pad_packed_sequence(..., "
            "total_length=x.shape[1]))"
        )
    raise BatchError(
        f"an output must hold each sample once along one dimension, and {path} has shape {grown}: "
        "return [samples, ...] and reshape in the loss"
    )


def _check_numbers(outputs: Any, fewer: Any) -> None:
    """Refuse numbers that came from the number of rows: the whole batch has another."""
    for (path, a), (_, b) in zip(_numbers(outputs), _numbers(fewer), strict=False):
        if a != b:
            raise BatchError(
                f"an output that is no tensor must not depend on the number of samples, and "
                f"{path} is {a} for some and {b} for fewer: compute it in the loss"
            )


def _numbers(values: Any, path: str = "outputs") -> list[tuple[str, Any]]:
    if isinstance(values, int | float) and not isinstance(values, bool):
        return [(path, values)]
    return [found for key, child in tree.children(values) for found in _numbers(child, path + key)]


def rough_layout(outputs: Any, fewer: Any, n: int, m: int) -> Layout:
    """Return where outputs beside a loss hold samples, asking nothing of them."""
    a, b = ([t for _, t in tree.tensors(values)] for values in (outputs, fewer))
    if len(a) != len(b):
        return ()
    return tuple(
        0 if x.dim() and y.dim() and x.shape == (n, *y.shape[1:]) and y.shape[0] == m else None
        for x, y in zip(a, b, strict=True)
    )


def _axis_by_size(tensor: Tensor, n: int) -> int | None:
    return 0 if tensor.dim() and tensor.shape[0] == n else None


def _computed(step: Step) -> set[torch.dtype]:
    """Return the dtypes of a model; its outputs may have been cast to a finer one."""
    return {p.dtype for p in step.model.parameters() if p.is_floating_point()}


def apart_rows(
    outputs: Any,
    fewer: Any,
    layout: Layout,
    rows: int,
    computed: Iterable[torch.dtype] = (),
) -> str | None:
    """Say which output differs for the rows that both runs have, if one does."""
    for (path, a), (_, b), axis in zip(
        tree.tensors(outputs, "outputs"), tree.tensors(fewer), layout, strict=False
    ):
        known = a.is_floating_point() or a.is_complex()
        if axis is None or not known or a.itemsize == 1 or a.layout != torch.strided:
            continue
        last = a.narrow(axis, a.shape[axis] - rows, rows).flip(axis)
        gap, size = _gap(last, b)
        eps = max(torch.finfo(dtype).eps for dtype in {a.dtype, *computed})
        if gap > eps ** (0.5 if eps == torch.finfo(torch.float64).eps else 0.25) * size:
            return f"{path} of the same {rows} rows differs by {gap:.2g}"
    return None


def _refuse_meeting(step: Step, part: MicroBatch, fewer: Any, layout: Layout, apart: str) -> None:
    """Say what the difference comes from: other rows, or another call."""
    dice = Dice.now()
    with quietly(), torch.no_grad(), Guard(step):
        again = step.forward(part)
    dice.put_back()
    last = apart_rows(fewer, _flipped(again, layout), layout, part.size, _computed(step))
    if last is None:
        raise NotExactError(
            f"samples must not meet inside the model when the batch is split, and {apart} when "
            "other rows come with them (anybatch.check names the module). Give micro_batch >= the "
            "batch size"
        )
    raise NotExactError(
        f"forward must give the same when it is called again, and {apart} from call to call: it "
        "keeps state in plain attributes, which every micro-batch would move. Register it as a "
        "buffer, or give micro_batch >= the batch size"
    )


def _flipped(outputs: Any, layout: Layout) -> Any:
    axes = iter(layout)

    def turn(tensor: Tensor) -> Tensor:
        axis = next(axes, None)
        return tensor if axis is None else tensor.flip(axis)

    return tree.map_tensors(turn, outputs)


def _gap(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest entry, infinities and NaN aside."""
    finite = a.isfinite() & b.isfinite()
    a, b = a[finite].detach(), b[finite].detach()
    return (float((a - b).abs().max()), float(a.abs().max())) if len(a) else (0.0, 0.0)
