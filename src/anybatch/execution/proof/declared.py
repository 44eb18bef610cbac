"""A declared loss, followed: each sample's part of it is its own, and the parts add up.

A user declares that a loss is a mean over samples, or a sum divided by a count. It is, if the
gradient of an output row depends only on its own sample, and neither the losses nor that gradient
change with the number of rows.

    4 rows    sum of losses a + b + c + d    gradient of rows  a b c d
    3 rows    sum of losses     b + c + d    gradient of rows    b c d
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.core import pytree
from anybatch.core.barrier import ForwardOf
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.core.norm import GatherError
from anybatch.core.oom import out_of_memory
from anybatch.core.rng import RNGState
from anybatch.errors import NotExactError
from anybatch.execution.proof import rows as proof_rows
from anybatch.execution.proof import verdict
from anybatch.execution.proof.congruent import Comparison
from anybatch.execution.proof.follow import Follow
from anybatch.execution.proof.masks import PLACE, SAMPLES, Masks, strange_row
from anybatch.execution.proof.notes import FIXED
from anybatch.execution.proof.places import Lengths, sized
from anybatch.execution.proof.verdict import UNDIVIDED, Forward, Output, Verdict
from anybatch.loss.callable_loss import holds, unread

COUNTING = "a declared loss must compute the same for any number of samples, and it does otherwise"

Own = Callable[[Any, MicroBatch], Tensor]
"""Returns the declared losses of single samples: of shape [n], or their sum."""

DECLARED = "the declaration of the loss is trusted"
INSTEAD = "Give the loss without a declaration: it is exact then, in two passes where it must be"


READS = "the declared loss: it reads rows that are no tensors, which cannot be followed"

FAILS = "the declared loss: it fails on the rows of the full batch"
LISTS = "a list, a text or an array of all rows"
PLACES = "the place of a row in the batch, or with how many rows there are"

MOST = 1 << 20
"""Numbers of outputs and targets that are compared: no more memory than a step."""

ERRORS = (RuntimeError, ValueError, IndexError, TypeError, KeyError)
"""Errors of a loss that takes no few rows."""


@dataclass(frozen=True)
class LossRows:
    """Outputs of some rows, detached, their targets, and how many rows these are."""

    outputs: Any
    targets: Any
    size: int


class RowLoss(nn.Module):
    """Calls the loss on output rows that have the samples along their first dimension."""

    def __init__(self, own: Own, outputs: Any, layout: Sequence[int | None]) -> None:
        super().__init__()
        axes = iter(layout)
        self._own, self._layout = own, layout
        # A view of no rows would hold all of them in memory while sizes are compared
        # (test_a_loss_that_is_remembered_holds_no_outputs).
        self._others = pytree.map_tensors(
            lambda t: t if next(axes) is None else t[:0].clone(), outputs
        )

    def forward(self, rows: list[Tensor], targets: Any) -> Tensor:
        """Return the losses, or their sum."""
        axes, remaining = iter(self._layout), iter(rows)

        def put(tensor: Tensor) -> Tensor:
            axis = next(axes)
            return tensor if axis is None else next(remaining).movedim(0, axis)

        outputs, size = pytree.map_tensors(put, self._others), rows[0].shape[0]
        with ForwardOf(size, standalone=True):
            return self._own(outputs, MicroBatch(None, targets, size))


@dataclass(frozen=True)
class _LossCall:
    """Result of a call under masks; `found` holds the losses or their sum."""

    forward: Forward
    found: Tensor
    gradients: list[Tensor]


class DeclaredSizes:
    """Comparison of the calls of a declared loss for numbers of samples, without data.

    It outlives the rows that it was made of: it stores their shapes, and values without tensors.

    Args:
        values: Python's reads of tensors in a call, in order.
        shown: nothing else about the loss is in doubt, so a difference is refused.
    """

    def __init__(
        self,
        loss: RowLoss,
        rows: list[Tensor],
        loss_rows: LossRows,
        values: Sequence[Any],
        *,
        shown: bool,
    ) -> None:
        self._loss, self._values, self._shown = loss, values, shown
        mode = FakeTensorMode()

        def bare(tensor: Tensor) -> Tensor:
            return mode.from_tensor(tensor) if tensor.dim() else tensor

        self._rows = [bare(row) for row in rows], pytree.map_tensors(bare, loss_rows.targets)
        self._size = loss_rows.size

    def __call__(self, sizes: Sequence[int]) -> Verdict:
        """Compare the calls for the full batch with those for its micro-batches.

        A difference for a single sample leaves a doubt: its kernels may be others.
        """
        many = [size for size in sizes if size > 1]
        found = self._compare(many) if len(many) > 1 else Verdict()
        if found.meets:
            meets = f"{COUNTING} of {many[0]} than of {many[1]}"
            return Verdict(f"{meets}. {INSTEAD}") if self._shown else _doubted(meets)
        if 1 not in sizes[1:]:
            return _doubted(*found.doubts)
        single = self._compare([sizes[0], 1])
        others = ("it may compute otherwise for one sample",) if single.meets else single.doubts
        return _doubted(*found.doubts, *others)

    def _compare(self, sizes: Sequence[int]) -> Verdict:
        return Comparison(
            *(self._loss, (self._rows, self._size), lambda loss, inputs, _: loss(*inputs)),
            trains=True,
            values=self._values,
            singles=True,
        )(sizes)


class Declared:
    """Two calls of a declared loss under masks: of a few rows, and of the last of these in reverse.

    Attributes:
        sizes: compares its calls for other numbers of samples; None (default) where these cannot
            count, or nothing could be followed.
        reads: Python reads numbers of tensors in it.
    """

    def __init__(
        self,
        own: Own,
        all_rows: LossRows,
        part: LossRows,
        layout: Sequence[int | None],
        *,
        lanes: bool = False,
    ) -> None:
        self._own, self._lanes = own, lanes
        self.sizes: DeclaredSizes | None = None
        self._loss = RowLoss(own, all_rows.outputs, layout)
        self._layout, self._all_rows, self._part = layout, all_rows, part
        self._masks = Masks()
        self._samples = proof_rows.samples_of_rows(all_rows.size)
        self.reads = False

    def judge(self, sizes: Sequence[int]) -> Verdict:
        """Return the verdict of the calls under masks, and of calls without data.

        `sizes` are numbers of samples, the first of which is the full batch.
        """
        if all(axis is None for axis in self._layout):
            return Verdict("", ("the outputs hold no samples that a declared loss could be of",))
        outside = sys.exception()
        try:
            return self._judge(sizes)
        except GatherError:
            if not self._lanes:
                raise  # micro-batches will wait for each other
            why = "it combines samples by anybatch.coupled"
        except ERRORS as error:
            if out_of_memory(error, outside=outside):
                raise
            why = f"it fails on a few rows, {type(error).__name__}: {error}".split("\n")[0][:100]
        return Verdict("", (f"the declared loss: {why}",))

    def _judge(self, sizes: Sequence[int]) -> Verdict:
        before = RNGState.now()
        all_rows, part = self._run(self._all_rows), self._run(self._part)
        self.reads = bool(all_rows.forward.notes.values)
        if all_rows.forward.notes.local:
            return Verdict("", ("the declared loss: it normalises the batch",))
        lengths = sized(all_rows.forward.notes.made, part.forward.notes.made)
        if lengths:
            all_rows = self._run(self._all_rows, lengths)
        drawn = not RNGState.now().same_as(before)
        before.put_back()
        meets = "" if drawn else self._adds(all_rows, part)
        meeting = _meets(all_rows) or _meets(part)
        counts = "in nll_loss" in meeting and not drawn  # of targets, which a factor may make good
        if meets or (meeting and not counts):
            return Verdict(f"{meeting or meets}. {INSTEAD}")
        doubts = list(dict.fromkeys(_doubts(all_rows.forward, part.forward)))
        if counts:
            doubts.append("it takes a mean over the targets that count, and makes it a sum again")
        if drawn:
            doubts.append("it draws random numbers, and its denominators cannot be compared")
        if lengths is None:
            doubts.append("it makes other numbers of its own for more rows than for fewer")
        found = _doubted(*doubts)
        notes = all_rows.forward.notes
        if not notes.may_count:
            return found
        rows = self._rows(self._all_rows)
        # A few rows have no factor that counts them, so what differs is refused
        # (test_what_cannot_be_decided_is_not_shown).
        self.sizes = DeclaredSizes(
            self._loss, rows, self._all_rows, notes.values, shown=not found.doubts
        )
        full = self.sizes(sizes) if len(sizes) > 1 else Verdict()
        return full if full.meets else Verdict("", (*found.doubts, *full.doubts))

    def _rows(self, loss_rows: LossRows, count: int | None = None) -> list[Tensor]:
        """Return the first `count` output rows as leaves, or all rows without a count."""
        pairs = zip(pytree.flat(loss_rows.outputs), self._layout, strict=True)
        rows = [t.movedim(axis, 0)[:count] for t, axis in pairs if axis is not None]
        return [verdict.leaf_of(row.clone()) for row in rows]

    def _called(self, micro: MicroBatch, *, within: AbstractContextManager[None]) -> Any:
        with within:
            return self._loss(*micro.inputs)

    def _run(self, loss_rows: LossRows, lengths: Lengths | None = None) -> _LossCall:
        self._masks.age()
        samples = self._samples
        if loss_rows is self._part:
            samples = samples[::-1][: loss_rows.size]
        rows = self._rows(loss_rows)
        follow = Follow(self._loss, self._masks, lengths, samples, self._part.size)
        follow.singles, follow.paths.outside = True, "the loss"
        micro = MicroBatch((rows, loss_rows.targets), None, loss_rows.size)
        found, _ = proof_rows.forward(
            *(follow, micro, samples, self._called), graph=True, saved=True
        )
        origin, mask = self._masks.origin(found), self._masks.of(found)
        losses = [Output("", mask, origin, found.requires_grad)] if found.dim() else []
        leaves = [row for row in rows if row.requires_grad]
        gradients: list[Tensor] = []
        if found.requires_grad and leaves:
            follow.backward = True
            with follow:
                each = torch.autograd.grad(
                    *(found, leaves, torch.ones_like(found)), allow_unused=True
                )
            gradients = [g for g in each if g is not None]
        outputs = [
            Output("", self._masks.of(g), self._masks.origin(g), trains=True) for g in gradients
        ]
        forward = Forward(follow.notes, samples, [*losses, *outputs])
        return _LossCall(forward, found.detach(), [g.detach() for g in gradients])

    def _adds(self, all_rows: _LossCall, part: _LossCall) -> str:
        """Return why losses of more rows do not add up from those of fewer; "" where they do."""
        rest = self._all_rows.size - self._part.size
        pairs = list(zip(all_rows.gradients, part.gradients, strict=True))
        if all_rows.found.dim():
            pairs.append((all_rows.found, part.found))
        agree = all(alike(more[rest:].flip(0), fewer) for more, fewer in pairs)
        if agree and not all_rows.found.dim():
            with torch.no_grad():
                targets = pytree.rows(self._all_rows.targets, 0, rest, self._all_rows.size)
                others = self._loss(self._rows(self._all_rows, rest), targets)
            agree = alike(all_rows.found, part.found + others)
        if agree and all_rows.forward.notes.read:
            agree = self._halves_add(all_rows.found, part.found)
        if agree:
            return ""
        return (
            "a declared loss must give each sample the same loss with any other samples, and it "
            f"gives other numbers for {self._all_rows.size} rows than for {self._part.size}: it "
            "takes a mean over the rows, or divides by how many there are"
        )

    def _halves_add(self, found: Tensor, last: Tensor) -> bool:
        """Say whether each half of the rows has the same losses by itself.

        Of 4 rows a half lacks the largest number, which Python reads; 3 of them mostly have it.
        """
        half, few = self._all_rows.size // 2, (self._all_rows, self._part)
        if 2 * half != self._all_rows.size or self._part.size < half:
            return True
        with torch.no_grad():
            first, second = (
                self._loss(self._rows(one, half), pytree.rows(one.targets, 0, half, one.size))
                for one in few
            )
        if not found.dim():
            return alike(found, first + second)
        return alike(found[:half], first) and alike(last[:half], second)

    # Check of a declared loss that reads non-tensor rows: the full batch against its micro-batches.
    #
    # Python's computations on a list (the largest entry, whether a word is among them) leave no
    # trace in the tensors. So the loss is computed on the full batch and on every micro-batch, with
    # the outputs of a few rows in place of all, and each row must have the same loss and the same
    # gradient in both.

    def judge_entries(
        self, batch: TensorBatch | None, micro_batch: int, *, counts: bool
    ) -> Verdict:
        """Return the verdict on a loss that reads non-tensor rows, or the number of rows.

        A constant that is cut to the rows, whose first entries are alike, is another one for later
        rows of the full batch only. The batch is None if it is unavailable, or memory does not
        permit to compare.
        """
        read = self._reads_entries()
        if not (read or counts) or all(axis is None for axis in self._layout):
            return Verdict()
        doubts = (READS,) if read else ()
        if batch is None or self._numbers(batch) > MOST:
            return Verdict("", doubts)
        words = LISTS if read else PLACES
        outside = sys.exception()
        try:
            return Verdict(self._differs(batch, micro_batch, words), doubts)
        except ERRORS as error:
            if out_of_memory(error, outside=outside):
                raise
        return Verdict("", (READS,) if read else (FAILS,))

    def _reads_entries(self) -> bool:
        """Return whether the loss asks for any list, text or array of a batch."""
        few = self._all_rows
        if not (holds(few.targets) or holds(few.outputs)):
            return False
        reads: list[type] = []
        micro = MicroBatch(None, unread(few.targets, reads), few.size)
        try:
            with torch.no_grad():
                self._own(unread(few.outputs, reads), micro)
        except Exception:  # that of a stand-in, or what was made of it
            return True
        return bool(reads)

    def _numbers(self, batch: TensorBatch) -> int:
        outputs = sum(t.numel() for t in pytree.flat(self._all_rows.outputs)) // self._all_rows.size
        return outputs * batch.size + sum(t.numel() for t in pytree.flat(batch.targets))

    def _differs(self, batch: TensorBatch, micro_batch: int, words: str) -> str:
        """Return how losses of the full batch differ from those of its parts; "" where equal."""
        places = torch.arange(batch.size) % self._all_rows.size
        pairs = zip(pytree.flat(self._all_rows.outputs), self._layout, strict=True)
        rows = [
            t.movedim(axis, 0).index_select(0, places.to(t.device))
            for t, axis in pairs
            if axis is not None
        ]
        device = rows[0].device
        targets = pytree.map_tensors(lambda t: t.to(device), batch.targets)
        full, again = (self._losses(rows, targets) for _ in range(2))
        if not all(map(alike, full, again)):
            return ""  # it draws
        found = []
        for begin in range(0, batch.size, micro_batch):
            end = min(begin + micro_batch, batch.size)
            some = pytree.rows(targets, begin, end, batch.size)
            found.append(self._losses([row[begin:end] for row in rows], some))
        losses, *gradients = zip(*found, strict=True)
        joined = torch.cat(losses) if full[0].dim() else torch.stack(losses).sum()
        parts = [joined, *map(torch.cat, gradients)]
        if all(map(alike, full, parts)):
            return ""
        return (
            "a declared loss must give each sample the same loss with any other samples, and it "
            f"gives other numbers for {batch.size} rows than for {micro_batch} of them: it "
            f"computes with {words}. {INSTEAD}"
        )

    def _losses(self, rows: list[Tensor], targets: Any) -> list[Tensor]:
        leaves = [verdict.leaf_of(row.clone()) for row in rows]
        with torch.enable_grad():
            found = self._loss(leaves, targets)
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            each: Sequence[Tensor | None] = [None] * len(trained)
            if found.requires_grad and trained:
                each = torch.autograd.grad(found.sum(), trained, allow_unused=True)
        pairs = zip(each, trained, strict=True)
        return [found.detach(), *(torch.zeros_like(t) if g is None else g for g, t in pairs)]


def _doubted(*doubts: str) -> Verdict:
    return Verdict("", tuple(f"the declared loss: {doubt}" for doubt in doubts))


def _meets(run: _LossCall) -> str:
    for output in run.forward.outputs:
        if output.mask is None:
            continue
        if bool((output.mask & PLACE).any()):
            return (
                "a declared loss must give each sample the same loss wherever it is in a batch, "
                f"and {output.origin or 'the loss'} computes with the place of a row among the "
                "samples (arange, eye, an order)"
            )
        strange = strange_row(output.mask, 0, run.forward.samples)
        if strange is not None:
            row, others = strange
            pair = " and ".join(map(str, sorted({row, *others})[:2]))
            return (
                "samples must not meet in a loss that is declared to be a sum over them, and "
                f"samples {pair} meet in {output.origin or 'the loss'}"
            )
    return ""


def _doubts(all_rows: Forward, part: Forward) -> Iterator[str]:
    if FIXED in all_rows.notes.where:
        yield f"{FIXED} {all_rows.notes.where[FIXED]}"
    for run in (all_rows, part):
        yield from verdict.doubts_of(run)
        yield from verdict.unfollowed([run], [0] * len(run.outputs))
        for place in run.notes.backward[:1]:
            yield f"samples may meet in {place}"
    other = verdict.first_difference(all_rows.notes.numbers, part.notes.numbers)
    if other is not None:
        yield f"{other.where} {other.mine} for some rows and with {other.its} for fewer"


def alike(one: Tensor, other: Tensor) -> bool:
    """Compare numbers up to rounding: a factor that counts rows is far more."""
    if one.shape != other.shape:
        return False
    bound = float(torch.finfo(one.dtype).eps ** 0.5)
    finite = torch.cat((one[one.isfinite()], other[other.isfinite()])).abs()
    largest = float(finite.max()) if len(finite) else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=bound * largest, equal_nan=True)


# Outputs without rows that samples have had a part in: none of these may be trained.
#
# An output without rows counts as a constant, the same for every micro-batch. By its value it may
# be one (a gate that is 0) while its gradient is of the samples: `gate * h.mean(0)`. A loss that
# does not use it is accepted.


def mixed_outputs(outputs: Iterable[Output], layout: Sequence[int | None]) -> frozenset[int]:
    """Return which outputs have a gradient and no rows, and samples have had a part in them."""
    pairs = enumerate(zip(outputs, layout, strict=False))
    return frozenset(
        at
        for at, (one, axis) in pairs
        if axis is None
        and one.trains
        and one.mask is not None
        and bool((one.mask & (SAMPLES | PLACE)).any())
    )


def refuse_trained(paths: Sequence[str], trained: Iterable[bool], mixed: frozenset[int]) -> None:
    """Refuse a loss that trains an output of `mixed`."""
    for at, (path, trains) in enumerate(zip(paths, trained, strict=True)):
        if trains and at in mixed:
            raise NotExactError(
                "outputs without rows must be the same for every micro-batch when the batch is "
                f"split, and the loss trains {path}, which depends on samples of one micro-batch: "
                "return one value a sample, in a tensor of shape [n], and combine these in the "
                f"loss, or {UNDIVIDED}"
            )


def refuse_declared_use(
    own: Own, rows: LossRows, layout: Sequence[int | None], mixed: frozenset[int]
) -> None:
    """Refuse a declared loss that trains an output of `mixed`."""
    if not mixed:
        return
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        leaves.append(verdict.leaf_of(tensor))
        return leaves[-1] * 1 if leaves[-1].requires_grad else leaves[-1]

    outside = sys.exception()
    try:
        with torch.enable_grad(), ForwardOf(rows.size, standalone=True):
            micro = MicroBatch(None, rows.targets, rows.size)
            loss = own(pytree.map_tensors(leaf, rows.outputs), micro)
            some = [one for one in leaves if one.requires_grad]
            if not loss.requires_grad or len(leaves) != len(layout):
                return
            found = iter(torch.autograd.grad(loss.sum(), some, allow_unused=True))
    except ERRORS as error:
        if out_of_memory(error, outside=outside):
            raise
        return  # as a doubt says
    trained = [one.requires_grad and next(found) is not None for one in leaves]
    refuse_trained([path for path, _ in pytree.tensors(rows.outputs, "outputs")], trained, mixed)
