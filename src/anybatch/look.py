"""The first look at a model: twice, at two numbers of rows, before its outputs are trusted.

Splitting a batch rests on things that no shape of one forward pass can tell: along which dimension
an output holds the samples (``[T, n, C]`` with T equal to n?), whether the outputs of some rows
depend on the others (a BatchNorm written by hand), whether forward writes to parameters. So the
first step of every kind of batch runs the model on the first micro-batch and on half of it (on two
samples, where a micro-batch is one), and compares. What cannot be split is refused before anything
has been computed with it.

    forward(n rows)   -> outputs [n, C], [T, n, C], [K, D]
    forward(m rows)   -> outputs [m, C], [T, m, C], [K, D]     layout: 0, 1, none
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch import tree
from anybatch.batch import MicroBatch
from anybatch.batchnorm import refuse
from anybatch.errors import BatchError, LossError, NotExactError
from anybatch.rng import Dice
from anybatch.step import Layout, Step

TRAINING_FLAG = {
    "aten::native_batch_norm": 5,
    "aten::_native_batch_norm_legit": 5,
    "aten::_native_batch_norm_legit.no_stats": 3,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
}
"""Where batch normalisation kernels take their training flag."""

UPDATES = "aten::_batch_norm_with_update"


def look(step: Step) -> Layout:
    """Run forward at two sizes, compare, and leave dice and buffers as they were.

    Args:
        step: a step that has not begun.

    Returns:
        Where each output tensor holds the samples.

    Raises:
        NotExactError: samples meet inside the model, or forward writes to a parameter.
        BatchError: an output that is no tensor depends on the number of rows.
        LossError: the outputs hold no tensor.
    """
    dice = Dice.now()
    micro, other = _two_sizes(step)
    dice.put_back()
    with torch.set_grad_enabled(step.gradients is not None), Guard(step):
        outputs = step.forward(micro)
        drawn = not Dice.now().same_as(dice)
        dice.put_back()
        fewer = step.forward(other)
    dice.put_back()
    step.forget_casts()
    step.buffers.restart()
    if not step.loss.takes_outputs:
        return ()
    layout = _layout(outputs, fewer, micro.size, other.size)
    apart = None
    if not drawn and not step.local:
        apart = _difference(outputs, fewer, layout, min(micro.size, other.size))
    if apart is not None and _repeats(step, other, fewer, layout):
        raise NotExactError(
            f"samples must not meet inside the model when the batch is split, and {apart} when "
            "other rows come with them (anybatch.check names the module). Give micro_batch >= the "
            "batch size"
        )
    return layout


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse, before it happens, what splits cannot do: batch statistics, writes to parameters."""

    def __init__(self, step: Step) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._local = step.batchnorm == "local"
        self._names = {
            p.untyped_storage().data_ptr(): name
            for name, p in step.model.named_parameters()
            if not is_lazy(p) and p.numel()
        }

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at one kernel call, and let it."""
        if not self._local and _normalises_the_batch(func, args):
            refuse([f"{func._schema.name} called in forward"])
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._refuse_write(value)
        return func(*args, **(kwargs or {}))

    def _refuse_write(self, value: Any) -> None:
        for _, tensor in tree.tensors(value):
            if tensor.layout != torch.strided or not tensor.numel():
                continue
            name = self._names.get(tensor.untyped_storage().data_ptr())
            if name is not None:
                raise NotExactError(
                    f"parameters must not change before the whole batch is done, and forward "
                    f"writes to {name}: do it before or after the step, or give micro_batch >= "
                    "the batch size"
                )


def _normalises_the_batch(func: Any, args: tuple[Any, ...]) -> bool:
    name, overload = func._schema.name, func._schema.overload_name
    if name == UPDATES:
        return bool(args[0].shape[0] != 1)
    flag = TRAINING_FLAG.get(f"{name}.{overload}" if overload == "no_stats" else name)
    # instance_norm is this kernel on one row of n * C channels
    return flag is not None and bool(args[flag]) and args[0].shape[0] != 1


def _two_sizes(step: Step) -> tuple[MicroBatch, MicroBatch]:
    """Return the first rows of the batch twice: more of them, and fewer."""
    first, *others = islice(step.feed(), 1 if step.micro_batch > 1 else 2)
    if others:
        both = [first.inputs, others[0].inputs]
        return MicroBatch(tree.join(both, sizes=[1, 1], name="inputs"), None, 2), first
    half = first.size // 2
    return first, MicroBatch(tree.rows(first.inputs, 0, half, first.size), None, half)


def _layout(outputs: Any, fewer: Any, n: int, m: int) -> Layout:
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
            f"{grown}: compute what compares samples in the loss"
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
    return [found for key, child in tree._children(values) for found in _numbers(child, path + key)]


def _difference(outputs: Any, fewer: Any, layout: Layout, rows: int) -> str | None:
    """Say which output differs for the rows that both runs have, if one does."""
    for (path, a), (_, b), axis in zip(
        tree.tensors(outputs, "outputs"), tree.tensors(fewer), layout, strict=True
    ):
        if axis is None or not a.is_floating_point():
            continue
        gap, size = _gap(a.narrow(axis, 0, rows), b.narrow(axis, 0, rows))
        if gap > torch.finfo(a.dtype).eps ** 0.25 * size:
            return f"{path} of the same {rows} rows differs by {gap:.2g}"
    return None


def _repeats(step: Step, micro: MicroBatch, outputs: Any, layout: Layout) -> bool:
    """Say whether forward gives the same again; a model may draw from a generator of its own."""
    dice = Dice.now()
    with torch.no_grad():
        again = step.forward(micro)
    dice.put_back()
    step.forget_casts()
    step.buffers.restart()
    return _difference(outputs, again, layout, micro.size) is None


def _gap(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest entry, infinities and NaN aside."""
    finite = a.isfinite() & b.isfinite()
    a, b = a[finite].detach(), b[finite].detach()
    return (float((a - b).abs().max()), float(a.abs().max())) if len(a) else (0.0, 0.0)
