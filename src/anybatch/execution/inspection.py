"""The first inspection of a model: a few rows of a batch, before its outputs are trusted.

Splitting a batch requires facts that no shape of one forward pass can show: along which dimension
an output holds the samples (``[T, n, C]`` with T equal to n?), whether samples meet (a BatchNorm
written by hand, an LSTM that takes samples for time steps), whether forward writes to its inputs.
So the first step of every signature runs the model on a few rows of the first micro-batch and on
the last of these, in reverse order. Every number carries the set of samples that contributed to it
(`anybatch.execution.proof`); the outputs at two sizes show which dimension holds the samples. A
batch that cannot be split is refused before anything has been computed with it.

    forward(rows 0 1 2 3)  -> outputs [4, C], [T, 4, C], [K, D]
    forward(rows 3 2)      -> outputs [2, C], [T, 2, C], [K, D]     layout: 0, 1, none
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.jit import ScriptModule

from anybatch.core import modules, pytree
from anybatch.core.barrier import Unseen, looking
from anybatch.core.batch import LazyBatch, MicroBatch, TensorBatch
from anybatch.core.hooks import refuse_registered
from anybatch.core.modules import eager, walk
from anybatch.core.oom import out_of_memory
from anybatch.core.python_state import difference
from anybatch.core.rng import RNGState
from anybatch.distributed.local_batch import Layout
from anybatch.errors import AnybatchError, BatchError, LossError, NotExactError
from anybatch.execution.full_size import (
    CHANGES,
    compare_sizes,
    note_compared,
    sizes_of_step,
    unheard,
)
from anybatch.execution.guard import Guard
from anybatch.execution.outside import Named, every_number, first_moved
from anybatch.execution.proof import rows as longest
from anybatch.execution.proof import rows as proof_rows
from anybatch.execution.proof import stored_samples
from anybatch.execution.proof import verdict as halves
from anybatch.execution.proof.declared import (
    DECLARED,
    Declared,
    Entries,
    LossRows,
    mixed_outputs,
    refuse_declared_use,
)
from anybatch.execution.proof.follow import Follow
from anybatch.execution.proof.inspected import ComparedSizes
from anybatch.execution.proof.masks import Masks
from anybatch.execution.proof.places import Lengths, counted_in, sized
from anybatch.execution.proof.stored_samples import (
    HeldTensor,
    Left,
    grown,
    increases,
    left_behind,
    within,
)
from anybatch.execution.proof.verdict import (
    UNDIVIDED,
    Forward,
    Verdict,
    ended,
    fails_again,
    first_difference,
    in_outputs,
    judge,
    moved_number,
    moved_state,
)
from anybatch.execution.step import Step, copied
from anybatch.loss.traced import TracedOutputs

AGAIN = (10, 100, 1000)
"""Steps of a signature in which samples are traced again: a model may change."""

ENOUGH = 4
"""Rows of which half are still more than one: some layers cannot train on a single row."""

ODD = 3
"""Rows of the second forward: lines of 4 and of 2 in 4 or 8 tokens hold one sample each."""


SOMEWHERE = "a tensor that no attribute of the model names"

OWN = "a backward that is not torch's own"
OTHER_IN_HALVES = (
    "the gradient of a row must not depend on the other rows when the batch is split, and it "
    "differs between some rows at once and their halves: a hook or an autograd.Function computes "
    f"with the number or the place of rows. Let it treat each row by itself, or {UNDIVIDED}"
)


class InspectionNorms(Protocol):
    """Observer of batch normalisation calls, which passes them on.

    Attributes:
        follow: the mode that follows the forward which runs; None where none does.
        forwards: how many the inspection has run.
    """

    follow: Follow | None
    forwards: int


def inspect_model(step: Step, norms: InspectionNorms | None = None) -> None:
    """Run forward on a few rows and on half of them, and set the fields of `step` for a split.

    Random states and buffers are left as they were.

    Args:
        step: a step that has not begun; its `layout`, `copies` and `doubts` are set.
        norms: observes the calls of batch normalisation. Default None: there are none.

    Raises:
        NotExactError: samples meet inside the model, or forward writes to a parameter.
        BatchError: an output that is no tensor depends on the number of rows.
        LossError: the outputs hold no tensor.
    """
    before = RNGState.now()
    one = _Inspection(step, norms)
    with quietly(), looking():
        full, part = one.all_rows(two_sizes(step, most=ENOUGH, odd=True))
        now = RNGState.now()
        drawn = not now.same_as(before)
        before.put_back()
        step.buffers.restart()
        held = one.holds()
        fewer, part = one.fewer(part)
        one.rebinds(held, fewer, part, before)
        one.pads(full, before, draws=drawn)
        one.draws_for_all(outside_torch=not now.others_as(before))
        before.put_back()
        step.buffers.restart()
        one.repeated(full if fewer is None else part)
        before.put_back()
        step.buffers.restart()
        one.warmed(full)
        before.put_back()
        step.buffers.restart()
        one.again(full, part)
        before.put_back()
        one.backward()
        before.put_back()
    step.forget_casts()
    step.buffers.restart()
    outputs = one.outputs
    step.traits.copies |= written(full) or written(part)  # a later look gets copies already
    if not step.loss.takes_outputs:
        step.traits.layout, layout = (), rough_layout(outputs, fewer, full.size, part.size)
    elif fewer is None:
        layout = tuple(_axis_by_size(t, full.size) for _, t in pytree.tensors(outputs))
        step.traits.layout, layout = layout, ()
    else:
        step.traits.layout = layout = layout_of(outputs, fewer, full.size, part.size)
    with quietly(), looking():
        one.in_halves(step.traits.layout if step.loss.takes_outputs else None)
    before.put_back()
    step.buffers.restart()
    if _lists(full.inputs):
        one.doubt("inputs of forward have rows that are no tensors, which cannot be followed")
    if one.guard.own_rng:
        one.doubt("forward draws from a generator of its own")
    if step.calls is not None and step.calls.iterators:
        one.doubt(f"each micro-batch draws from what the loss iterates ({step.calls.iterators[0]})")
    verdict = one.verdict(layout or step.traits.layout)
    verdict.refuse()
    step.traits.doubts, step.traits.looked = verdict.doubts, step.traits.steps
    step.traits.mixed = one.mixed(step.traits.layout)
    mismatch = None  # where rows are not the same, or need not come out the same
    if not (drawn or step.local or one.local or step.traits.copies or one.guard.own_rng):
        mismatch = row_mismatch(outputs, fewer, layout, part.size, _computed(step))
    rows = _rows_of_loss(step, outputs, full.size)
    one.outputs = outputs = None
    fewer = fewer if mismatch else None
    step.traits.sizes = one.sizes(full.inputs)
    with quietly():
        found = compare_sizes(step, full)
    before.put_back()
    found.refuse()
    step.traits.doubts += found.doubts
    note_compared(step)
    if mismatch is not None:
        _refuse_meeting(step, part, fewer, layout, mismatch)
    if rows is not None:
        with quietly():
            step.traits.doubts += _refuse_declared(step, rows, part.size, lanes=norms is not None)
        before.put_back()


def _rows_of_loss(step: Step, outputs: Any, size: int) -> LossRows | None:
    """Return outputs and targets of a few rows, for a loss that is declared; None for another."""
    if not step.loss.declares:
        return None
    count = -(-size // step.micro_batch)
    few = [] if step.budgeted else list(islice(step.feed(), count))
    each = size // count
    if len(few) < count or min(micro.size for micro in few) < each or each * count < size:
        step.traits.doubts += (
            DECLARED,
        )  # what it holds was not foreseen, or there are too few rows
        return None
    some = [pytree.rows(micro.targets, 0, each, micro.size) for micro in few]
    targets = some[0] if count == 1 else pytree.join(some, sizes=[each] * count, name="targets")
    return LossRows(outputs, targets, size)


def _refuse_declared(step: Step, full: LossRows, count: int, *, lanes: bool) -> tuple[str, ...]:
    """Refuse a declaration that is not true; return why it could not be shown to be.

    Args:
        step: an inspected step.
        full: outputs and targets of a few rows.
        count: rows of which losses are compared with those of all.
        lanes: micro-batches wait for each other where samples meet.
    """
    layout, size = step.traits.axes, full.size
    axes = iter(layout)

    def last(tensor: Tensor) -> Tensor:
        axis = next(axes)
        return tensor if axis is None else tensor.narrow(axis, size - count, count).flip(axis)

    outputs = pytree.map_tensors(last, full.outputs)
    targets = turned(pytree.rows(full.targets, size - count, size, size), count)
    some = LossRows(outputs, targets, count)
    one = Declared(step.loss.own, full, some, layout, lanes=lanes)
    entries = Entries(step.loss.own, full, layout)
    batch = step.batch if isinstance(step.batch, TensorBatch) else None
    if step.budgeted or step.retries:
        batch = None

    def judge() -> Verdict:
        refuse_declared_use(step.loss.own, full, layout, step.traits.mixed)
        found = one.judge(sizes_of_step(step))
        if found.meets:
            return found
        counts = one.sizes is not None and not found.doubts
        other = entries.judge(batch, step.micro_batch, counts=counts)
        return Verdict(other.meets, (*found.doubts, *other.doubts))

    with unheard():
        found = judge() if step.calls is None else step.calls.watched(judge)
    assert step.traits.sizes is not None
    step.traits.sizes.reads = one.reads
    if found is None:
        return (CHANGES,)
    found.refuse()
    step.traits.sizes.declared = one.sizes
    late = isinstance(step.batch, LazyBatch) or step.global_batch.several
    counts = late and step.loss.counts
    return (*found.doubts, *([DECLARED] if counts else []))


class _Inspection:
    """Two forwards under masks."""

    def __init__(self, step: Step, norms: InspectionNorms | None) -> None:
        self.guard = Guard(step)
        self.outputs: Any = None
        self._step, self._norms, self._every = step, norms, norms
        self._trains = step.gradients is not None
        self._runs: list[Forward] = []
        self._repeated: Forward | None = None
        self._left: list[Left] = []
        self._retained: list[int] = []
        self._ours: list[weakref.ref[Tensor]] = []
        self._outline = 0
        self._strange, self._most = False, ENOUGH
        self._samples: Sequence[int] = ()
        self._doubts: tuple[str, ...] = ()
        self._masks = Masks()
        self._lengths: Lengths = {}
        self._plain: list[dict[Named, Any]] = []
        self._fewer, self._moved = 0, ""

    def all_rows(self, pair: tuple[MicroBatch, MicroBatch]) -> tuple[MicroBatch, MicroBatch]:
        """Run forward on the larger of two micro-batches; on more rows where it takes no fewer."""
        full, part = pair
        outside = sys.exception()
        try:
            self.outputs = self._forward(full)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            refused = isinstance(error, AnybatchError) or out_of_memory(error, outside=outside)
            if refused or self._step.micro_batch <= ENOUGH:
                raise
            self._most = 0
            full, part = two_sizes(self._step)
            self.outputs = self._forward(full)
            self._doubts = ("samples were followed in groups, for it takes no fewer rows",)
        return full, part

    def fewer(self, part: MicroBatch) -> tuple[Any, MicroBatch]:
        """Return the outputs of `part`, or None where the model cannot take so few rows; and it.

        A model that wants an even number of rows gets one.
        """
        outside = sys.exception()
        try:
            return self._forward(part, reverse=True), part
        except AnybatchError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if out_of_memory(error, outside=outside):
                raise
            if part.size != ODD:
                return None, part  # the step itself will meet it if it must
        self._step.buffers.restart()
        return self.fewer(_first(part, ODD - 1))

    def _forward(self, micro: MicroBatch, *, reverse: bool = False) -> Any:
        if reverse:
            samples = list(reversed(self._samples))[: micro.size]
        else:
            samples = proof_rows.samples_of_rows(micro.size)
        try:
            outputs, _ = self._follow(micro, samples, saved=False)
        except proof_rows.NeededError:
            outputs, _ = self._follow(micro, samples, saved=True)
        outputs, _ = (
            pytree.map_tensors(Tensor.detach, outputs),
            None,
        )  # and what functions keep goes
        if isinstance(outputs, TracedOutputs):  # its terms hold their graph
            outputs.terms = None
        self._count_retained(micro, outputs)
        return outputs

    def _count_retained(self, micro: MicroBatch, outputs: Any) -> None:
        """Count the storages of samples that something without a name holds after a call."""
        self._ours += map(weakref.ref, (*pytree.flat((micro.inputs, outputs)), *within(outputs)))
        ours = [tensor for one in self._ours if (tensor := one()) is not None]
        model = self._step.model
        count = partial(self._masks.count_retained, ours, [*model.parameters(), *model.buffers()])
        with Unseen():  # a mode that hears of a storage brings it in for good
            retained = count()
            if retained and not self._left[-1]:
                gc.collect()  # or what has gone would count, where it holds itself
                retained = count()
        self._retained.append(retained)

    def holds(self) -> list[HeldTensor]:
        """Return the tensors that the model holds, but for samples."""
        with Unseen():  # a mode that hears of a storage brings it in
            return stored_samples.holds(self._step.model, self._masks)

    def rebinds(
        self, before: list[HeldTensor], outputs: Any, part: MicroBatch, rng: RNGState
    ) -> None:
        """Doubt a model that computes with a tensor which each call replaces by another.

        Args:
            before: its contents before the call that returned `outputs`.
            outputs: of `part`; None where that call was not made.
            part: some rows.
            rng: its state before that call.
        """
        others = list(stored_samples.rebound(before, self.holds()))
        if not others or outputs is None:
            return
        name = others[0].name
        if self._step.budgeted:
            self.doubt(f"no memory to test whether a call computes with its own write to {name}")
            return
        step = self._step
        rng.put_back()
        step.buffers.restart()

        def call() -> Any:
            with torch.no_grad():
                return step.forward(part)

        before = self.holds()
        call()
        rng.put_back()
        step.buffers.restart()
        others = list(stored_samples.rebound(before, self.holds()))
        if not others:  # it is built for a number of rows, and kept
            return
        if name := stored_samples.reads(step.model, others, call, outputs):
            self.doubt(f"each call of forward puts another tensor into {name}, and reads it")

    def pads(self, full: MicroBatch, rng: RNGState, *, draws: bool) -> None:
        """Refuse outputs that depend on how long the longest of some rows is.

        Args:
            full: all rows.
            rng: its state before the first call.
            draws: forward draws.
        """
        places = [place for run in self._runs for place in run.notes.longest]
        if not places:
            return
        (path, _), step = places[0], self._step
        doubt = f"rows are padded to the longest of the micro-batch in {path}"
        if step.budgeted or self._every is not None:  # statistics are of the padding, too
            self.doubt(doubt)
            return

        def call() -> Any:
            rng.put_back()
            step.buffers.restart()
            with torch.no_grad():
                return step.forward(full)

        draws |= step.draws is not None
        found = longest.matters(call, self.outputs, draws=draws)
        rng.put_back()
        step.buffers.restart()
        if found and any(several for _, several in places):
            self._moved = self._moved or longest.depends(path)
        elif found is not False:
            self.doubt(doubt)

    def repeated(self, last: MicroBatch) -> None:
        """Run forward once more on the rows of the last call, where the model has stored samples.

        A stored tensor without use changes nothing. One that is used is refused, at any size.
        """
        if not (self._left[-1] or self._retained[-1]):
            return
        name = next((name for name, _ in self._left[-1].values()), SOMEWHERE)
        if self._step.budgeted:
            self.doubt(f"no memory to test whether a call computes with the contents of {name}")
            return
        outside, outline = sys.exception(), self._outline
        try:
            self._forward(last, reverse=len(self._runs) > 1)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, AnybatchError) or out_of_memory(error, outside=outside):
                raise
            self._moved = fails_again(name, error)
            return
        run = self._runs.pop()
        self._plain.pop()
        self._repeated = run
        if differs := first_difference(self._runs[-1].notes.numbers, run.notes.numbers):
            self._moved = moved_state(differs)
        elif outline != self._outline:
            self.doubt(f"a second call on the same rows builds another graph: it may read {name}")
        elif more := grown(self._left) or (increases(self._retained) and SOMEWHERE):
            self.doubt(f"each call of forward puts samples into {more}, and a later one may use it")

    def warmed(self, full: MicroBatch) -> None:
        """Follow all rows again after a forward that has filled caches.

        A mask or a table that is made once is no number of the larger forward. It takes the place
        of the first one where its outputs are the same.
        """
        if len(self._runs) < 2 or self._step.budgeted:
            return
        first, fewer = (run.notes.made for run in self._runs)
        if sized(first, fewer) is not None:
            return
        outputs = self._forward(full)
        later = self._runs.pop()
        self._plain.pop()
        pairs = zip(pytree.flat(self.outputs), pytree.flat(outputs), strict=True)
        if all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs):
            self._runs[0] = later

    def again(self, full: MicroBatch, part: MicroBatch) -> None:
        """Follow all rows again, where forward may distinguish samples by other means than rows.

        It makes numbers that are as long as there are rows; or numbers differ between the forwards,
        which come from how many rows there are, or from state. Lanes have state of their own.
        """
        if len(self._runs) < 2:
            return
        first, fewer = (run.notes for run in self._runs)
        lengths = sized(first.made, fewer.made)
        if lengths is None:
            self.doubt("forward makes other numbers of its own for more rows than for fewer")
        self._lengths = lengths or {}
        counted = first_difference(first.numbers, fewer.numbers)
        moves = self._norms is None and (counted or first_moved(self._plain[0], self._plain[1]))
        if not (moves and counted) and (reduced := counted_in(first.made, fewer.made)):
            self.doubt(f"{reduced} makes other numbers for {full.size} rows than for {part.size}")
        if not (self._lengths or moves):
            return
        if self._step.budgeted:  # three outputs were not foreseen
            self._lengths = {}
            self.doubt("no memory to follow again numbers that are as long as there are samples")
            return
        self._fewer = part.size
        self._runs.pop(0)
        self._forward(full)
        self._runs.reverse()
        if not moves:
            return
        self._doubt_counters()
        state = first_difference(first.numbers, self._runs[0].notes.numbers)
        if state is not None:
            self._moved = moved_state(state)
        elif counted is not None and not first.read:
            rows = f"{counted.mine} for {full.size} rows and with {counted.its} for {part.size}"
            self.doubt(f"{counted.where} {rows}")

    def draws_for_all(self, *, outside_torch: bool) -> None:
        """Doubt draws that belong to no sample, where each micro-batch draws its own.

        A mask of [n, ...] is equal in distribution however the batch is divided. One coin for the
        full batch (a branch, a layer that is left out, a mask of weights) is not.

        Args:
            outside_torch: forward drew from random or numpy.
        """
        if self._step.draws is not None:
            return
        again = 'and each micro-batch draws its own: rng="batch" draws them once'
        if outside_torch:
            self.doubt(f"forward draws numbers from random or numpy, {again}")
        pairs = zip(*(run.notes.draws for run in self._runs[:2]), strict=False)
        alike = (one[:2] for one, *other in pairs if other == [one])
        for path, name in [*alike][:1]:
            self.doubt(f"{name} in {path} draws numbers that belong to no sample, {again}")
        for path in [path for run in self._runs[:2] for path in run.notes.seeded][:1]:
            self.doubt(f"forward seeds a generator before {path} draws, {again}")

    def _doubt_counters(self) -> None:
        """Doubt a model that keeps a number which each call moves: a hook may compute with it."""
        before, _, after = self._plain
        if moved := first_moved(before, after):
            self.doubt(f"each call of forward moves {moved}")

    def _follow(
        self, micro: MicroBatch, samples: Sequence[int], *, saved: bool, reads: bool = True
    ) -> tuple[Any, Follow]:
        self._masks.age()
        self._step.forget_casts()  # or this forward would make fewer than the one before
        lengths = self._lengths if reads else {}  # calls before a backward have other numbers
        follow = Follow(
            self._step.model, self._masks, lengths, samples, self._fewer, guard=self.guard
        )
        if self._every is not None:
            self._every.forwards += 1
        if self._norms is not None:
            self._norms.follow = follow
        try:
            outputs, hooked = proof_rows.forward(
                follow, micro, samples, self._step.forward, graph=self._trains, saved=saved
            )
        finally:
            if self._norms is not None:
                self._norms.follow = None
        self._strange |= hooked or proof_rows.strange_backward(outputs)
        self._samples = self._samples or samples
        if reads:
            self._runs.append(ended(follow, samples, outputs))
            self._plain.append(every_number(self._step.model.named_modules()))
            self._left.append(left_behind(self._step.model, self._masks))
            roots = [t for _, t in pytree.tensors(outputs) if t.requires_grad]
            self._outline = modules.outline(roots)
        return outputs, follow

    def backward(self) -> None:
        """Follow a backward, too, where one of these forwards has another than torch's own."""
        step = self._step
        if not (self._strange and self._trains) or step.batchnorm == "local":
            return
        full, _ = two_sizes(step, most=self._most)
        if step.budgeted and full.size > step.micro_batch:
            self._doubts += ("no memory to follow a backward that is not torch's own",)
            return
        refuse_registered(step.model.parameters())
        inputs = pytree.map_tensors(halves.leaf_of, full.inputs)
        rows = [t for _, t in pytree.tensors(inputs) if t.requires_grad]
        leaves = [p for p in step.model.parameters() if p.requires_grad]
        moved = pytree.map_tensors(halves.moved, inputs)
        self._norms = None  # their calls have been heard
        micro = MicroBatch(moved, None, full.size)
        outputs, follow = self._follow(micro, self._samples, saved=True, reads=False)
        proof_rows.backward(follow, outputs, leaves, rows)
        self._runs[0].notes.backward += follow.notes.backward
        self._runs[0].notes.read += follow.notes.read

    def in_halves(self, layout: Layout | None) -> None:
        """Compare the gradients of some rows with those of their halves, on the same suspicion."""
        step = self._step
        if not (self._strange and self._trains) or step.batchnorm == "local":
            return
        obstacle = "BatchNorm" if self._every is not None else "a budget" if step.budgeted else ""
        if obstacle:
            self.doubt(f"{OWN} cannot be compared beside {obstacle}")
            return
        if len(self._runs) < 2:
            self.doubt(f"{OWN} cannot be compared, for forward takes no fewer rows")
            return
        full, _ = two_sizes(step, most=self._most)
        before, drawn = RNGState.now(), False

        def run(micro: MicroBatch) -> Any:
            nonlocal drawn
            drawn |= not RNGState.now().same_as(before)
            before.put_back()
            step.buffers.restart()
            return step.forward(micro)

        leaves = [p for p in step.model.parameters() if p.requires_grad]
        numbers = every_number(step.model.named_modules())
        with self.guard:  # a checkpoint runs forward in backward
            same = halves.add_up(run, full, layout, leaves)
        if drawn or not RNGState.now().same_as(before):
            self.doubt(f"{OWN} cannot be compared where the model draws")
        elif same is None:
            self.doubt(f"{OWN} cannot be compared where no output holds the samples")
        elif not same:
            moved = first_moved(numbers, every_number(step.model.named_modules()))
            other = moved_number(moved) if moved else OTHER_IN_HALVES
            self._moved = self._moved or other

    def sizes(self, inputs: Any) -> ComparedSizes:
        """Return the record for comparisons of full batches, at first without any comparison.

        Where forward does not know how many samples there are, it computes the same for any number.
        """
        backward = self._strange and self._trains
        counts = any(run.notes.may_count for run in self._runs) or self._hidden(inputs) or backward
        values, rows = self._runs[0].notes.values, len(self._samples)
        return ComparedSizes(counts, values, backward=backward, followed=rows)

    @property
    def local(self) -> bool:
        """Whether any call normalised rows separately."""
        return any(run.notes.local for run in self._runs)

    def _hidden(self, inputs: Any) -> bool:
        """Say whether a number of samples may be read outside of any mode."""
        parts = (module for _, module in walk(self._step.model))
        return _lists(inputs) or any(isinstance(part, ScriptModule) for part in parts)

    def doubt(self, why: str) -> None:
        """Record why it is not shown that samples are separate."""
        self._doubts += (why,)

    def mixed(self, layout: Layout) -> frozenset[int]:
        """Return the outputs without rows that samples have had a part in."""
        return mixed_outputs(self._runs[0].outputs, layout)

    def verdict(self, layout: Layout) -> Verdict:
        """Return the verdict of the forwards."""
        full, *others = self._runs
        found = judge(full, others[0] if others else None, layout)
        left = "" if self._repeated is None else in_outputs(self._repeated, layout)
        return Verdict(found.meets or left or self._moved, self._doubts + found.doubts)


def _lists(inputs: Any) -> bool:
    """Say whether inputs hold rows that are no tensors."""
    plain = (Tensor, str, int, float, type(None))
    return any(not isinstance(leaf, plain) for _, leaf in pytree.leaves(inputs))


def two_sizes(step: Step, most: int = 0, *, odd: bool = False) -> tuple[MicroBatch, MicroBatch]:
    """Return the first rows of the batch, and the last of these in reverse; both are copies.

    Args:
        step: it has not begun.
        most: of a micro-batch so many rows; 0 (default) is all of them.
        odd: an odd number of rows in place of a half, where their bytes need no forecast.
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
        few = [_first(micro, max(most // len(few), 1)) for micro in few]
    try:
        full, last = _joined(few), _joined(few[len(few) // 2 :])
        if odd and roomy and full.size == ENOUGH:
            last = _last(full, ODD)
    except AnybatchError:  # samples of different shapes, one at a time
        few = few[:1] * 2
        full, last = _joined(few), few[0]
    made_of = [micro.inputs for micro in few]
    part = _own_tensors(turned(last.inputs, last.size), last.size, made_of)
    return _own_tensors(full.inputs, full.size, made_of), part


def _joined(few: Sequence[MicroBatch]) -> MicroBatch:
    """Return the rows of some micro-batches as those of one.

    Raises:
        AnybatchError: they cannot be.
    """
    if len(few) == 1:
        return few[0]
    sizes = [micro.size for micro in few]
    inputs = pytree.join([micro.inputs for micro in few], sizes=sizes, name="inputs")
    return MicroBatch(inputs, None, sum(sizes))


def _first(micro: MicroBatch, most: int) -> MicroBatch:
    """Return the first rows of a micro-batch, at most so many."""
    size = min(micro.size, most)
    return MicroBatch(pytree.rows(micro.inputs, 0, size, micro.size), None, size)


def _last(micro: MicroBatch, count: int) -> MicroBatch:
    """Return the last rows of a micro-batch."""
    rows = pytree.rows(micro.inputs, micro.size - count, micro.size, micro.size)
    return MicroBatch(rows, None, count)


def _parted(micro: MicroBatch, most: int, *, odd: bool) -> tuple[MicroBatch, MicroBatch]:
    """Return rows of a micro-batch, and the last of these in reverse: a half, or an odd number."""
    few = _first(micro, most or micro.size)
    last = _last(few, ODD if odd and few.size == ENOUGH else few.size // 2)
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
        return leaf[::-1] if strings else leaf

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


def _axis_by_size(tensor: Tensor, n: int) -> int | None:
    return 0 if tensor.dim() and tensor.shape[0] == n else None


def _computed(step: Step) -> set[torch.dtype]:
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

    Args:
        outputs: of some rows.
        fewer: outputs of the last of these.
        layout: where both hold the samples.
        rows: how many are in `fewer`.
        computed: dtypes of the model. Default: those of its outputs.
        turned: `fewer` are in reverse order. Default True.
    """
    for path, a, b, axis in comparable(outputs, fewer, layout, rows):
        gap, size = difference(a, b, axis if turned else None)
        eps = max(torch.finfo(dtype).eps for dtype in {a.dtype, *computed})
        if gap > eps ** (0.5 if eps == torch.finfo(torch.float64).eps else 0.25) * size:
            return f"{path} of the same {rows} rows differs by {gap:.2g}"
    return None


def comparable(
    outputs: Any, fewer: Any, layout: Layout, rows: int
) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """Yield each output that can be compared: name, last rows, those of fewer, dimension of rows.

    Args:
        outputs: of some rows.
        fewer: outputs of the last of these.
        layout: where both hold the samples.
        rows: how many are in `fewer`.
    """
    for (path, a), (_, b), axis in zip(
        pytree.tensors(outputs, "outputs"), pytree.tensors(fewer), layout, strict=False
    ):
        numeric = a.is_floating_point() or a.is_complex()
        if axis is not None and numeric and a.itemsize > 1 and a.layout == torch.strided:
            yield path, a.narrow(axis, a.shape[axis] - rows, rows), b, axis


def _refuse_meeting(
    step: Step, part: MicroBatch, fewer: Any, layout: Layout, mismatch: str
) -> None:
    """Refuse the difference, and name its cause: other rows, or another call."""
    rng = RNGState.now()
    with quietly(), torch.no_grad(), Guard(step):
        again = step.forward(part)
    rng.put_back()
    last = row_mismatch(fewer, again, layout, part.size, _computed(step), turned=False)
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
