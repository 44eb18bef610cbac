"""Verdict from the masks of a few rows: samples are separate, they meet, or it is undecided.

A model runs on a few rows, and on the last of them alone. Samples meet where an output row depends
on another sample; where the second run reads state of the first; where a call of batch
normalisation holds other rows than those of micro-batches; and in backward where a gradient that is
a sum over samples is not used linearly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import pytree
from anybatch.core.batch import MicroBatch
from anybatch.core.python_state import difference
from anybatch.errors import NotExactError
from anybatch.execution.proof import masks as sets
from anybatch.execution.proof.follow import Follow
from anybatch.execution.proof.kernel_call import REGROUPS
from anybatch.execution.proof.masks import CUT, EARLIER, LOOSE, PLACE, ROWS, SAMPLES
from anybatch.execution.proof.notes import COLLISION, COUNTED, FIXED, OF_ANY_ROWS, NormCall, Notes
from anybatch.loss.traced_model import WEIGHTS

UNDIVIDED = "give micro_batch >= the batch size"


@dataclass(frozen=True)
class Verdict:
    """Conclusion from masks: where samples meet, or why it is undecided.

    Attributes:
        meets: where samples meet and the remedy, as a sentence; "" where they do not.
        doubts: why that is not shown where they do not; nothing where it is.
    """

    meets: str = ""
    doubts: tuple[str, ...] = ()

    def refuse(self) -> None:
        """Refuse to divide a batch in which samples meet."""
        if self.meets:
            raise NotExactError(self.meets)


KernelNumbers = tuple[str, str, tuple[Any, ...]]
"""Module, kernel, and the numbers that Python gives to it."""


class Difference(NamedTuple):
    """The beginning of a sentence on two forwards, and the numbers with which each computes."""

    where: str
    mine: str
    its: str


class Output(NamedTuple):
    """An output of a forward under masks.

    Attributes:
        mask: which samples have had a part in it; None where none has.
        origin: where these met; "" where they have not.
        trains: it has a gradient.
        alike: it was made without samples, and is equal for all rows. Default False.
    """

    path: str
    mask: Tensor | None
    origin: str
    trains: bool
    alike: bool = False


@dataclass(frozen=True)
class Forward:
    """One forward under masks: its records, the samples of its rows in order, its outputs."""

    notes: Notes
    samples: Sequence[int]
    outputs: Sequence[Output]


def ended(follow: Follow, samples: Sequence[int], outputs: Any) -> Forward:
    """Return a forward that has just ended."""
    masks = follow.masks
    found = [
        Output(path, masks.of(one), masks.origin(one), one.requires_grad, follow.alike(one))
        for path, one in pytree.tensors(outputs, "outputs")
    ]
    return Forward(follow.notes, samples, found)


def judge(full: Forward, part: Forward | None, axes: Sequence[int | None]) -> Verdict:
    """Return the verdict on forwards of a few rows, and of the last of these, if it takes fewer.

    `axes` are where each output holds the samples; None where it holds none.
    """
    part = None if part is None else _without_refuted(full, part)
    runs = [full] if part is None else [full, part]
    mixed = any(bits.bit_count() > 1 for norm in full.notes.norms for bits in norm.rows)
    # What mixed them before is the cause
    # (test_samples_that_meet_before_a_batchnorm_are_named_where_they_meet).
    meets = (in_outputs(full, axes) if mixed else "") or _in_norms(full, part)
    for run in runs:
        meets = meets or in_outputs(run, axes) or _in_backward(run)
    if part is not None:
        meets = meets or _in_shuffles(full, part)
    doubts = dict.fromkeys(doubt for run in runs for doubt in doubts_of(run))
    doubts.update(dict.fromkeys(unfollowed(runs, axes)))
    for place in full.notes.few[:1]:  # of fewer rows fewer are chosen
        doubts[
            f"rows that are chosen by their values are brought together in {place}, and of the "
            "rows looked at fewer than two were"
        ] = None
    doubts |= dict.fromkeys(_in_order(full, axes))  # without an arange, places are none in `part`
    doubts |= dict.fromkeys(_noted(full, (FIXED, COUNTED)))
    for place in _grown(full, part)[:1]:
        doubts[f"a dimension as long as the samples is made of others in {place}"] = None
    return Verdict(meets, tuple(doubts))


def _without_refuted(full: Forward, part: Forward) -> Forward:
    """Return the forward of fewer rows without findings that the forward of all rows refutes.

    An ``arange`` of the rows has no marks before its length is known. So in the first forwards an
    order that is undone with it (pack_padded_sequence) remains, and entries that are written to at
    it may collide. The forward of all rows is traced again with these marks, and decides; the one
    of fewer rows still finds samples of an earlier call.
    """
    outputs, notes = part.outputs, part.notes
    if notes.mixes_orders and not full.notes.mixes_orders:
        masks = [None if one.mask is None else one.mask & EARLIER for one in outputs]
        outputs = [one._replace(mask=mask) for one, mask in zip(outputs, masks, strict=True)]
    if COLLISION in notes.where and COLLISION not in full.notes.where:
        where = {words: at for words, at in notes.where.items() if words != COLLISION}
        notes = replace(notes, where=where)
    return replace(part, outputs=outputs, notes=notes)


def in_outputs(run: Forward, axes: Sequence[int | None]) -> str:
    """Return an error where outputs mix samples, or hold those of an earlier call; "" for none."""
    for (path, mask, place, trains, _), axis in zip(run.outputs, axes, strict=False):
        if mask is not None and WEIGHTS in path and bool((mask & SAMPLES).any()):
            return (
                "weights of a loss inside the model, and terms added to it, must be the same for "
                "every part of a batch that is split (class weights, a factor, a penalty), and "
                f"{place or 'forward'} computes it from the samples: mark the function that does "
                "so with anybatch.coupled, compute it before the step and store it in the model "
                f"as a buffer, move the loss out of the model, or {UNDIVIDED}"
            )
        if mask is None or axis is None:
            continue
        if trains and bool((mask & PLACE).any()):
            return (
                "samples must be computed alike wherever they are in a batch that is split, and "
                f"{place or path} computes with the place of a row among the samples (arange, eye, "
                f"an order): give it with the inputs, or {UNDIVIDED}"
            )
        strange = sets.strange_row(mask, axis, run.samples)
        if strange is None:
            continue
        row, others = strange
        if ROWS in others:
            return (
                "forward must not read values that another call has stored when the batch is "
                f"split, and row {row} of {path} depends on samples of the call before: it keeps "
                f"state outside of its inputs. Register it as a buffer, or {UNDIVIDED}"
            )
        if not place:
            return _out_of_place(f"row {row} of {path} belongs to sample {others[0]}")
        return (
            "samples must not meet inside the model when the batch is split, and samples "
            f"{_and(sorted({row, *others})[:2])} meet in {place} (seen in {path}). Compare samples "
            "in the loss, declare the function that compares them with anybatch.coupled, or "
            f"{UNDIVIDED}"
        )
    if run.notes.lost:
        return (
            "samples must not meet inside the model when the batch is split, and they meet in "
            f"{run.notes.lost}, before the loss that the model computes. Declare the function in "
            f"which they meet with anybatch.coupled, or {UNDIVIDED}"
        )
    return ""


def _in_backward(run: Forward) -> str:
    notes = run.notes
    if notes.frequencies:
        return (
            "samples must not meet inside the model when the batch is split, and they meet in "
            f"{notes.frequencies[0]}: scale_grad_by_freq divides the gradient by how often the "
            f"full batch has an entry. Set scale_grad_by_freq=False, or {UNDIVIDED}"
        )
    if notes.backward:
        return (
            "samples must not meet in backward when the batch is split, and they meet in "
            f"{notes.backward[0]}: a hook or an autograd.Function computes with the gradient of "
            f"several samples at once. Let it treat each row by itself, or {UNDIVIDED}"
        )
    return ""


def _in_norms(all_rows: Forward, part: Forward | None) -> str:
    """Compare the calls of batch normalisation with those of fewer rows.

    Call k of the undivided batch must hold, of the rows that a micro-batch has, just those that
    call k of the micro-batch holds: together the micro-batches then bring all of its rows.
    """
    full = all_rows.notes.norms
    for one in full if part is None else ():
        held = _held(one)
        if one.cut or (held and held != sorted(set(all_rows.samples))):
            return other_rows(one.path, f"it holds samples {_and(held)} alone")
    if part is None:
        return ""
    some = part.notes.norms
    if len(full) != len(some):
        first = (full or some)[0]
        return other_rows(
            first.path, f"{len(full)} calls hold all rows and {len(some)} those of a part"
        )
    mine = 0
    for sample in part.samples:
        mine |= 1 << sample
    for one, other in zip(full, some, strict=True):
        if not one.rows and one.values == other.values > 0:
            return (
                "BatchNorm must normalise samples where micro-batches wait for each other, and a "
                f"call of {one.path} normalises as many values for any number of samples: every "
                f"micro-batch would count them again. Give {UNDIVIDED.removeprefix('give ')}"
            )
        wanted = {bits: n for bits, n in one.rows.items() if bits & mine}
        found = {bits: n for bits, n in other.rows.items() if bits}
        of_all = _held(one) == sorted(set(all_rows.samples))
        as_many = one.values * len(part.samples) == other.values * len(all_rows.samples)
        if not other.rows and of_all and as_many and one.path == other.path:
            continue  # noise as long as there are rows, which tells its samples when that is known
        if one.path != other.path or wanted != found:
            held = _held(one)
            described = f"the call that holds samples {_and(held)} of the batch"
            return other_rows(one.path, f"{described} holds other rows in a micro-batch")
    return ""


def _in_shuffles(full: Forward, part: Forward) -> str:
    """Return an error for a random order as long as the batch: of few rows one may move none."""
    for (path, n), (_, m) in zip(full.notes.shuffles, part.notes.shuffles, strict=False):
        if n != m and n * len(part.samples) == m * len(full.samples):
            return _out_of_place(f"{path} draws an order of all samples")
    return ""


def _grown(full: Forward, part: Forward | None) -> list[str]:
    """Return where a dimension follows the number of samples, and no samples lie along it.

    ``reshape(T, n, C)`` of [n, T, C], where transpose was meant: lines of few rows may each lie in
    one sample by chance. If they do not in one of two forwards, their masks show the samples. And
    ``expand(n, n)`` of [n, 1], whose sum is the number of samples times a row.
    """
    if part is None or full.notes.longest:  # padded rows are tested for themselves
        return []
    found, fewer = [], part.notes.lines
    for at, line in full.notes.lines.items():
        other = fewer.get(at)
        if other is None or len(other.shape) != len(line.shape):
            continue
        if (line.path, line.name) != (other.path, other.name):
            break  # nobody knows which it was
        sizes = enumerate(zip(line.shape, other.shape, strict=True))
        grown = {d for d, (n, m) in sizes if n != m}
        # Rows that are chosen by their values may all be of one sample.
        if grown - (line.lies | other.lies) and (len(grown) > 1 or line.name in REGROUPS):
            found.append(f"{line.path}, in {line.name}")
    return found


def first_difference(
    mine: Sequence[KernelNumbers], its: Sequence[KernelNumbers]
) -> Difference | None:
    """Return the first numbers that two forwards give to the same kernel and that differ.

    None where there are none, or where other kernels come first.
    """
    for (path, kernel, numbers), (other_path, other, also) in zip(mine, its, strict=False):
        if (path, kernel) != (other_path, other):
            return None
        if repr(numbers) != repr(also):  # NaN is NaN
            return Difference(f"{path} computes {kernel} with", _as_text(numbers), _as_text(also))
    return None


def moved_state(found: Difference) -> str:
    """Return the error for numbers that a later call on the same rows passes to a kernel."""
    return (
        f"forward must return the same when it is called again, and {found.where} {found.mine} in "
        f"one call and with {found.its} in a later one: it keeps state in plain attributes, which "
        f"every micro-batch would move. Register it as a buffer, or {UNDIVIDED}"
    )


def fails_again(name: str, error: Exception) -> str:
    """Return the error for a forward that fails after another call on the same rows."""
    return (
        "forward must not read values that another call has stored when the batch is split, and a "
        f"second call fails with the contents of {name} ({type(error).__name__}: "
        f"{str(error)[:80]}). Reset it at the start of forward, or {UNDIVIDED}"
    )


def moved_number(path: str) -> str:
    """Return the error for a number that each call moves, and that a backward computes with."""
    return (
        f"backward must return the same after another call of forward, and each call moves {path}: "
        f"every micro-batch would. Move it once a step, outside of forward, or {UNDIVIDED}"
    )


def _as_text(numbers: Sequence[Any]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers)


def _out_of_place(why: str) -> str:
    return (
        f"samples must keep their place when the batch is split, and {why}: forward permutes, "
        f"rolls or flips the batch. Do so before the step, or {UNDIVIDED}"
    )


def other_rows(path: str, why: str) -> str:
    """Return the error for batch normalisation of a part of the batch."""
    return (
        f"every call of batch normalisation must hold the full batch when it is split, and {path} "
        f"normalises a part of it: {why} (ghost batches, several views, a choice by position). "
        f'Call it on all rows, use batchnorm="local", or {UNDIVIDED}'
    )


def _held(norm: NormCall) -> list[int]:
    return sets.samples_of(reduce(or_, norm.rows, 0))


def doubts_of(run: Forward) -> Iterable[str]:
    """Yield why a forward does not show that samples are separate."""
    notes = run.notes
    for path, sort in notes.read[:1]:
        script = ", or torch.jit.script computes with it" if sort == "tensor" else ""
        yield f"Python reads a {sort} of the samples in {path}{script}"
    for path, kernel, _ in notes.unfollowed[:1]:
        yield f"{kernel} in {path} could not be followed"
    yield from _noted(run, OF_ANY_ROWS)
    if notes.made_by_python:
        yield "Python makes numbers that are as many as the samples, and they cannot be followed"
    marked = (one.mask for one in run.outputs if one.mask is not None)
    if notes.cuts and any(bool((mask & CUT).any()) for mask in marked):
        yield "rows are sliced along the samples, and parts of the batch may be computed otherwise"


def _noted(run: Forward, doubts: Iterable[str]) -> Iterable[str]:
    for words in doubts:
        if words in run.notes.where:
            yield f"{words} {run.notes.where[words]}"


def unfollowed(runs: Sequence[Forward], axes: Sequence[int | None]) -> Iterable[str]:
    """Yield a doubt for each output without samples; outputs of parameters only are exempt."""
    honest = {one.path for run in runs for one in run.outputs if one.alike}
    pairs = [pair for run in runs for pair in zip(run.outputs, axes, strict=False)]
    for (path, mask, _, trains, _), axis in pairs:
        if axis is not None and trains and mask is None and path not in honest:
            yield f"no sample could be followed to {path}"


def _in_order(run: Forward, axes: Sequence[int | None]) -> Iterable[str]:
    """Yield a doubt for outputs that samples put in order: of few rows an order may move none."""
    for (path, mask, _, trains, _), axis in zip(run.outputs, axes, strict=False):
        if axis is not None and trains and mask is not None and bool((mask & LOOSE).any()):
            yield (
                f"the rows of {path} are in an order, or a choice, that the samples make (sort, "
                "topk, nonzero, x[mask]): write them back to their places"
            )


def _and(samples: Sequence[int]) -> str:
    return " and ".join(map(str, samples))


# Comparison of gradients: a few rows in two micro-batches must add up to the same rows in one.
#
# Masks show which samples meet in a backward that is not torch's own. They do not show a number
# that counts rows, nor a row that is treated by its place. Gradients can be added, so here they are
# compared, up to rounding:
#
#     backward(rows 0 1 2 3)  =  backward(rows 0 1) + backward(rows 2 3)

Axes = Sequence[int | None] | None


def add_up(
    run: Callable[[MicroBatch], Any], full: MicroBatch, axes: Axes, leaves: Sequence[Tensor]
) -> bool | None:
    """Say whether the gradients of the rows in one and in two micro-batches are the same.

    None where no output has samples and a gradient (a loss that the model returns is no row), or
    where one of fewer rows is no part of that of all: a covariance of samples. `run` calls the
    model, each time as the first time. `axes` is None where the model returns its loss:
    the first dimension of the other outputs. Gradients of `leaves` are restored.
    """
    half = full.size // 2
    held = [leaf.grad for leaf in leaves]
    seeds: list[Tensor] = []
    try:
        for leaf in leaves:
            leaf.grad = None
        rows = _gradients(run, full, (0, full.size), axes, seeds)
        if rows is None or all(leaf.grad is None for leaf in leaves):
            return None
        largest = [_largest(leaf.grad) for leaf in leaves]
        for leaf in leaves:  # the halves are added to it, so one set of gradients is held
            if leaf.grad is not None:
                leaf.grad.neg_()
        first = _gradients(run, full, (0, half), axes, seeds)
        second = _gradients(run, full, (half, full.size), axes, seeds)
        if first is None or second is None:
            return None
        found = [*zip([leaf.grad for leaf in leaves], largest, strict=True)]
    finally:
        for leaf, gradient in zip(leaves, held, strict=True):
            leaf.grad = gradient
    halves = map(torch.cat, zip(first, second, strict=True))
    found += [(one - other, _largest(one)) for one, other in zip(rows, halves, strict=True)]
    scale = max((size or 0.0 for _, size in found), default=0.0)
    return all(_nothing(left, size, scale) for left, size in found)


def _gradients(
    run: Callable[[MicroBatch], Any],
    full: MicroBatch,
    of: tuple[int, int],
    axes: Axes,
    seeds: list[Tensor],
) -> list[Tensor] | None:
    """Add the gradients of some rows to those of the leaves; return those of rows of the inputs.

    None where an output of fewer rows is no part of that of all.
    """
    begin, end = of
    inputs = pytree.map_tensors(leaf_of, pytree.rows(full.inputs, begin, end, full.size))
    rows = [t for _, t in pytree.tensors(inputs) if t.requires_grad]
    outputs = run(MicroBatch(pytree.map_tensors(moved, inputs), None, end - begin))
    every = [t for _, t in pytree.tensors(outputs)]
    seeds += [_seed(t) for t in every] if not seeds else []
    if axes is None:
        axes = [0 if t.dim() and t.shape[0] == end - begin else None for t in every]
    roots, gradients = [], []
    for one, seed, axis in zip(every, seeds, axes, strict=False):
        if one.requires_grad and axis is not None:
            roots.append(one)
            gradients.append(seed.narrow(axis, begin, end - begin))
            if gradients[-1].shape != one.shape:
                return None
    if roots:
        torch.autograd.backward(roots, gradients)  # reentrant checkpoints refuse grad()
    return [torch.zeros_like(row) if row.grad is None else row.grad for row in rows]


def leaf_of(tensor: Tensor) -> Tensor:
    """Return a leaf that takes a gradient, where a tensor can have one."""
    if not _real(tensor):
        return tensor
    return tensor.detach().clone().requires_grad_()


def moved(tensor: Tensor) -> Tensor:
    """Return a tensor that forward may write to in place of a leaf."""
    return tensor.clone() if tensor.requires_grad else tensor


def _seed(output: Tensor) -> Tensor:
    """Return numbers of its shape that differ from place to place; they are drawn from nothing."""
    if not _real(output):
        return output
    places = torch.arange(1, output.numel() + 1, device=output.device, dtype=torch.float32)
    return places.cos().reshape(output.shape).to(output.dtype)


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _largest(gradient: Tensor | None) -> float | None:
    """Return the largest finite entry; a sparse embedding's gradient names rows more than once."""
    if gradient is None:
        return None
    values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.numel():
        return 0.0
    low, high = map(float, values.aminmax())  # no room is taken
    found = max(-low, high)
    return found if math.isfinite(found) else difference(values, values)[1]


def _nothing(left: Tensor | None, largest: float | None, scale: float) -> bool:
    """Say whether the rest of a gradient, less its halves, is rounding.

    A result that counts rows or places is far from it. A gradient whose true value is 0 is compared
    with the largest of all.
    """
    found = _largest(left)
    if left is None or found is None or largest is None:
        return found is largest
    eps = torch.finfo(left.dtype).eps
    bound: float = eps ** (0.5 if eps == torch.finfo(torch.float64).eps else 0.25)
    return found <= bound * max(largest, 0.01 * scale, eps)
