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
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.jit import ScriptModule

from anybatch.core import modules, pytree
from anybatch.core.barrier import Unseen, looking
from anybatch.core.batch import MicroBatch
from anybatch.core.hooks import refuse_registered
from anybatch.core.modules import walk
from anybatch.core.oom import out_of_memory
from anybatch.core.rng import RNGState
from anybatch.distributed.local_batch import Layout
from anybatch.errors import AnybatchError
from anybatch.execution import few_rows, full_size
from anybatch.execution.few_rows import ENOUGH, ODD, ROW_ERRORS, quietly, two_sizes
from anybatch.execution.guard import Guard
from anybatch.execution.outside import Named, every_number, first_moved
from anybatch.execution.proof import rows as proof_rows
from anybatch.execution.proof import stored_samples
from anybatch.execution.proof import verdict as conclusion
from anybatch.execution.proof.declared import mixed_outputs
from anybatch.execution.proof.follow import Follow
from anybatch.execution.proof.inspected import ComparedSizes
from anybatch.execution.proof.masks import Masks
from anybatch.execution.proof.places import Lengths, counted_in, sized
from anybatch.execution.proof.stored_samples import HeldTensor, Left
from anybatch.execution.proof.verdict import UNDIVIDED, Forward, Verdict, first_difference
from anybatch.execution.step import Step
from anybatch.loss.traced_model import TracedOutputs

AGAIN = (10, 100, 1000)
"""Steps of a signature in which samples are traced again: a model may change."""

SOMEWHERE = "a tensor that no attribute of the model names"

OWN = "a backward that is not torch's own"
OTHER_IN_HALVES = (
    "the gradient of a row must not depend on the other rows when the batch is split, and it "
    "differs between some rows at once and their halves: a hook or an autograd.Function computes "
    f"with the number or the place of rows. Let it treat each row by itself, or {UNDIVIDED}"
)


RETURNS = (
    "return the loss that it differentiates, as one value a sample, and add it to the loss; or "
    f"{UNDIVIDED}"
)


def inspect_model(step: Step, norms: Any = None) -> None:
    """Run forward on a few rows and on half of them, and set the fields of `step` for a split.

    Random states and buffers are left as they were.

    Args:
        step: a step that has not begun; its `layout`, `copies` and `doubts` are set.
        norms: a `LaneInspection` that observes the calls of batch normalisation. Default None.

    Raises:
        NotExactError: samples meet inside the model, or forward writes to a parameter.
        BatchError: an output that is no tensor depends on the number of rows.
        LossError: the outputs hold no tensor.
    """
    one = _Inspection(step, norms)
    with quietly(), looking():
        full, part, fewer, drawn = one.forwards()
    step.forget_casts()
    step.buffers.restart()
    outputs = one.outputs
    step.traits.copies |= few_rows.written(full) or few_rows.written(
        part
    )  # a later look gets copies already
    layout = few_rows.note_layouts(step, outputs, fewer, full.size, part.size)
    with quietly(), looking():
        one.in_halves(step.traits.layout if step.loss.takes_outputs else None)
    one.restart()
    if few_rows.lists_rows(full.inputs):
        one.doubt("inputs of forward have rows that are no tensors, which cannot be followed")
    if step.familiar is not None and step.familiar.reads_grad:
        one.doubt("code of the model reads .grad, to which micro-batches add")
    if one.guard.own_rng:
        one.doubt("forward draws from a generator of its own")
    if step.calls is not None and step.calls.iterators:
        one.doubt(f"each micro-batch draws from what the loss iterates ({step.calls.iterators[0]})")
    verdict = one.verdict(layout or step.traits.axes)
    verdict.refuse()
    step.traits.doubts, step.traits.looked = verdict.doubts, step.traits.steps
    step.traits.mixed = one.mixed(step.traits.axes)
    mismatch = None  # where rows are not the same, or need not come out the same
    if not (drawn or step.local or one.local or step.traits.copies or one.guard.own_rng):
        last, fewer = [fewer], None
        part, fewer, mismatch = one.compared(full, part, last, layout)
    rows = full_size.rows_of_loss(step, outputs, full.size)
    one.outputs = outputs = None
    fewer = fewer if mismatch else None
    step.traits.sizes = one.sizes(full.inputs).after(step.traits.sizes)
    with quietly():
        found = full_size.compare_sizes(step, full)
    one.before.put_back()
    found.refuse()
    step.traits.doubt(*found.doubts)
    full_size.note_compared(step)
    if mismatch is not None:
        few_rows.refuse_meeting(step, part, fewer, layout, mismatch)
    if rows is not None:
        with quietly():
            doubts = full_size.refuse_declared(step, rows, part.size, lanes=norms is not None)
        step.traits.doubt(*doubts)
        one.before.put_back()


def _bare(leaf: Any) -> Any:
    """Return an output without a graph: None for an object with tensors, such as a cache of keys.

    Their graphs would count as held samples
    (test_a_cache_of_keys_among_the_outputs_holds_no_samples).
    """
    if isinstance(leaf, Tensor):
        return leaf.detach()
    return None if any(True for _ in stored_samples.within(leaf)) else leaf


class _Inspection:
    def __init__(self, step: Step, norms: Any) -> None:
        self.before, self.guard = RNGState.now(), Guard(step)
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

    def compared(
        self, full: MicroBatch, part: MicroBatch, last: list[Any], layout: Layout
    ) -> few_rows.Compared:
        """Compare the outputs of a few rows with those of `part`, which `last` holds."""
        step, fewer = self._step, last.pop()
        dtypes = few_rows.computed(step)
        mismatch = few_rows.row_mismatch(self.outputs, fewer, layout, part.size, dtypes)
        if mismatch is None and any(run.notes.read for run in self._runs):
            fewer = None  # or a half would hold more than these rows did
            found = few_rows.half_mismatch(step, full, self.outputs, layout)
            self.restart()
            return found
        return part, fewer, mismatch

    def restart(self) -> None:
        """Put random states and buffers back as they were before the inspection."""
        self.before.put_back()
        self._step.buffers.restart()

    def forwards(self) -> tuple[MicroBatch, MicroBatch, Any, bool]:
        """Run forward on a few rows and on the last of them, and again where these call for it.

        Return both rows, the outputs of the fewer ones, and whether forward draws.
        """
        gradients = self._step.gradients
        marks = [] if gradients is None else gradients.marks()
        full, part = self.all_rows(two_sizes(self._step, most=ENOUGH, odd=True))
        now = RNGState.now()
        drawn = not now.same_as(self.before)
        self.restart()
        held = self.holds()
        fewer, part = self.fewer(part)
        self.rebinds(held, fewer, part)
        self.pads(full, draws=drawn)
        self.draws_for_all(outside_torch=not now.others_as(self.before))
        self.restart()
        self.repeated(full if fewer is None else part)
        self.restart()
        self.warmed(full)
        self.restart()
        self.again(full, part)
        self.before.put_back()
        self.backward()
        self.before.put_back()
        if gradients is not None:
            gradients.refuse_moved(marks, "forward", RETURNS)
        return full, part, fewer, drawn

    def all_rows(self, pair: tuple[MicroBatch, MicroBatch]) -> tuple[MicroBatch, MicroBatch]:
        """Run forward on the larger of two micro-batches; on more rows where it takes no fewer."""
        full, part = pair
        outside = sys.exception()
        try:
            self.outputs = self._forward(full)
        except ROW_ERRORS as error:
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
        except ROW_ERRORS as error:
            if out_of_memory(error, outside=outside):
                raise
            if part.size != ODD:
                return None, part  # the step itself will meet it if it must
        self._step.buffers.restart()
        return self.fewer(few_rows.first_of(part, ODD - 1))

    def _forward(self, micro: MicroBatch, *, reverse: bool = False) -> Any:
        if reverse:
            samples = list(reversed(self._samples))[: micro.size]
        else:
            samples = proof_rows.samples_of_rows(micro.size)
        try:
            outputs = self._follow(micro, samples, saved=False)[0]  # what functions keep goes
        except proof_rows.NeededError:
            outputs = self._follow(micro, samples, saved=True)[0]
        outputs = pytree.map_leaves(_bare, outputs)
        if isinstance(outputs, TracedOutputs):  # its terms hold their graph
            outputs.terms = None
        self._count_retained(micro, outputs)
        return outputs

    def _count_retained(self, micro: MicroBatch, outputs: Any) -> None:
        """Count the storages of samples that something without a name holds after a call."""
        self._ours += map(
            weakref.ref, (*pytree.flat((micro.inputs, outputs)), *stored_samples.within(outputs))
        )
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

    def rebinds(self, before: list[HeldTensor], outputs: Any, part: MicroBatch) -> None:
        """Doubt a model that computes with a tensor which each call replaces by another.

        It held `before` before the call that returned `outputs`, None where that call was not made.
        """
        others = list(stored_samples.rebound(before, self.holds()))
        if not others or outputs is None:
            return
        name = others[0].name
        if self._step.tight:
            self.doubt(f"no memory to test whether a call computes with its own write to {name}")
            return
        self.restart()

        def call() -> Any:
            with torch.no_grad():
                return self._step.inspected(part)

        before = self.holds()
        call()
        self.restart()
        others = list(stored_samples.rebound(before, self.holds()))
        if not others:  # it is built for a number of rows, and kept
            return
        if name := stored_samples.reads(self._step.model, others, call, outputs):
            self.doubt(f"each call of forward puts another tensor into {name}, and reads it")

    def pads(self, full: MicroBatch, *, draws: bool) -> None:
        """Refuse outputs that depend on how long the longest of some rows is."""
        places = [place for run in self._runs for place in run.notes.longest]
        if not places:
            return
        (path, _), step = places[0], self._step
        doubt = f"rows are padded to the longest of the micro-batch in {path}"
        if step.budgeted or self._every is not None:  # statistics are of the padding, too
            self.doubt(doubt)
            return

        def call() -> Any:
            self.restart()
            with torch.no_grad():
                return step.inspected(full)

        draws |= step.draws is not None
        found = proof_rows.matters(call, self.outputs, draws=draws)
        self.restart()
        if found and any(several for _, several in places):
            self._moved = self._moved or proof_rows.depends(path)
        elif found is not False:
            self.doubt(doubt)

    def repeated(self, last: MicroBatch) -> None:
        """Run forward once more on the rows of the last call, where the model has stored samples.

        A stored tensor without use changes nothing. One that is used is refused, at any size.
        """
        if not (self._left[-1] or self._retained[-1]):
            return
        name = next((name for name, _ in self._left[-1].values()), SOMEWHERE)
        if self._step.tight:
            self.doubt(f"no memory to test whether a call computes with the contents of {name}")
            return
        outside, outline = sys.exception(), self._outline
        try:
            self._forward(last, reverse=len(self._runs) > 1)
        except ROW_ERRORS as error:
            if isinstance(error, AnybatchError) or out_of_memory(error, outside=outside):
                raise
            self._moved = conclusion.fails_again(name, error)
            return
        run = self._runs.pop()
        self._plain.pop()
        self._repeated = run
        if differs := first_difference(self._runs[-1].notes.numbers, run.notes.numbers):
            self._moved = conclusion.moved_state(differs)
        elif outline != self._outline:
            self.doubt(f"a second call on the same rows builds another graph: it may read {name}")
        elif more := stored_samples.grown(self._left) or (
            stored_samples.increases(self._retained) and SOMEWHERE
        ):
            self.doubt(f"each call of forward puts samples into {more}, and a later one may use it")

    def warmed(self, full: MicroBatch) -> None:
        """Follow all rows again after a forward that has filled caches.

        A mask or a table that is made once is no number of the larger forward. It takes the place
        of the first one where its outputs are the same.
        """
        if len(self._runs) < 2 or self._step.tight:
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
        if self._step.tight:
            self._lengths = {}
            self.doubt("no memory to follow again numbers that are as long as there are samples")
            return
        self._fewer = part.size
        self._runs.pop(0)
        self._forward(full)
        self._runs.reverse()
        if not moves:
            return
        before, _, after = self._plain
        if moved := first_moved(before, after):  # a hook may compute with it
            self.doubt(f"each call of forward moves {moved}")
        state = first_difference(first.numbers, self._runs[0].notes.numbers)
        if state is not None:
            self._moved = conclusion.moved_state(state)
        elif counted is not None and not first.read:
            rows = f"{counted.mine} for {full.size} rows and with {counted.its} for {part.size}"
            self.doubt(f"{counted.where} {rows}")

    def draws_for_all(self, *, outside_torch: bool) -> None:
        """Doubt draws that belong to no sample, where each micro-batch draws its own.

        A mask of [n, ...] is equal in distribution however the batch is divided. One coin for the
        full batch (a branch, a layer that is left out, a mask of weights) is not.
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
                follow, micro, samples, self._step.inspected, graph=self._trains, saved=saved
            )
        finally:
            if self._norms is not None:
                self._norms.follow = None
        self._strange |= hooked or proof_rows.strange_backward(outputs)
        self._samples = self._samples or samples
        if reads:
            self._runs.append(conclusion.ended(follow, samples, outputs))
            self._plain.append(every_number(self._step.model.named_modules()))
            self._left.append(stored_samples.left_behind(self._step.model, self._masks))
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
        inputs = pytree.map_tensors(conclusion.leaf_of, full.inputs)
        rows = [t for _, t in pytree.tensors(inputs) if t.requires_grad]
        leaves = [p for p in step.model.parameters() if p.requires_grad]
        moved = pytree.map_tensors(conclusion.moved, inputs)
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
        full, _ = two_sizes(step, most=self._most)
        tight = step.budgeted and 3 * full.size > 2 * step.micro_batch
        obstacle = "BatchNorm" if self._every is not None else "a tight budget" if tight else ""
        if obstacle:
            self.doubt(f"{OWN} cannot be compared beside {obstacle}")
            return
        if len(self._runs) < 2:
            self.doubt(f"{OWN} cannot be compared, for forward takes no fewer rows")
            return
        drawn = False
        self.restart()  # samples that are loaded draw the seed of their loader

        def run(micro: MicroBatch) -> Any:
            nonlocal drawn
            drawn |= not RNGState.now().same_as(self.before)
            self.restart()
            return step.inspected(micro)

        leaves = [p for p in step.model.parameters() if p.requires_grad]
        numbers = every_number(step.model.named_modules())
        with self.guard:  # a checkpoint runs forward in backward
            same = conclusion.add_up(run, full, layout, leaves)
        if drawn or not RNGState.now().same_as(self.before):
            self.doubt(f"{OWN} cannot be compared where the model draws")
        elif same is None:
            self.doubt(f"{OWN} cannot be compared where no output holds the samples")
        elif not same:
            moved = first_moved(numbers, every_number(step.model.named_modules()))
            other = conclusion.moved_number(moved) if moved else OTHER_IN_HALVES
            self._moved = self._moved or other

    def sizes(self, inputs: Any) -> ComparedSizes:
        """Return the record for comparisons of full batches, at first without any comparison.

        Where forward does not know how many samples there are, it computes the same for any number.
        """
        backward = self._strange and self._trains
        counts = any(run.notes.may_count for run in self._runs) or self._hidden(inputs) or backward
        values, rows = self._runs[0].notes.values, len(self._samples)
        lists = any(run.notes.lists for run in self._runs)
        return ComparedSizes(counts, values, backward=backward, reads=lists, followed=rows)

    @property
    def local(self) -> bool:
        """Whether any call normalised rows separately."""
        return any(run.notes.local for run in self._runs)

    def _hidden(self, inputs: Any) -> bool:
        """Say whether a number of samples may be read outside of any mode."""
        parts = (module for _, module in walk(self._step.model))
        return few_rows.lists_rows(inputs) or any(isinstance(part, ScriptModule) for part in parts)

    def doubt(self, why: str) -> None:
        """Record why it is not shown that samples are separate."""
        self._doubts += (why,)

    def mixed(self, layout: Layout) -> frozenset[int]:
        """Return the outputs without rows that samples have had a part in."""
        return mixed_outputs(self._runs[0].outputs, layout)

    def verdict(self, layout: Layout) -> Verdict:
        """Return the verdict of the forwards."""
        full, *others = self._runs
        found = conclusion.judge(full, others[0] if others else None, layout)
        left = "" if self._repeated is None else conclusion.in_outputs(self._repeated, layout)
        return Verdict(found.meets or left or self._moved, self._doubts + found.doubts)
