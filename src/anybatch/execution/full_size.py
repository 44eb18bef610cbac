"""Comparison of the full batch's forward with its micro-batches', and of a loss with its parts."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor, nn

from anybatch.core import pytree
from anybatch.core.barrier import ForwardOf
from anybatch.core.batch import LazyBatch, MicroBatch, TensorBatch, row_shapes
from anybatch.core.modules import call_model, unheard
from anybatch.core.oom import out_of_memory
from anybatch.core.rng import RNGState
from anybatch.errors import AnybatchError, NotExactError
from anybatch.execution.few_rows import ENOUGH, ODD, turned
from anybatch.execution.proof.congruent import Comparison, sizes_of
from anybatch.execution.proof.declared import DECLARED, Declared, LossRows, refuse_declared_use
from anybatch.execution.proof.inspected import Pair
from anybatch.execution.proof.verdict import Verdict
from anybatch.execution.signature import shapes_of
from anybatch.execution.step import Step

KEEPS = "forward builds anew what it keeps where the number of samples is another"
BEYOND = "a batch or a micro-batch is larger or smaller than those that were compared"
CHANGES = "the declared loss changes state of its own"

ROOMY = 3
"""A micro-batch of so many times the compared rows has room for a declared loss under masks."""


def compare_sizes(step: Step, some: MicroBatch) -> Verdict:
    """Compare the forward of the full batch with those of its micro-batches, without data.

    A difference for a micro-batch of one sample leaves a doubt: its kernels may be others.

    Raises:
        Retry: rows of these shapes call other kernels than those that were inspected.
    """
    samples, record = step.global_batch.size, step.traits.sizes
    if record is None or not record.counts or step.micro_batch >= samples:
        return Verdict()
    sizes, shapes = sizes_of(samples, step.micro_batch), row_shapes(some.inputs)

    compare = Comparison(
        *(step.model, (some.inputs, some.size), _call),
        trains=step.gradients is not None,
        values=record.values,
        backward=record.backward,
        traces=record.traces_of(shapes),
    )
    found = _with_followed(compare, sizes, record.followed_of(shapes))
    if found.meets:
        return found
    if step.familiar is not None:
        step.recognise(found=step.familiar.has_kernels(compare.kernels, looked=step.just_inspected))
    if 1 not in _parts(step):
        return found
    single = _compared(compare, [samples, 1])
    _, _, why = single.meets.partition(" split, and ")
    others = (f"one sample may be computed otherwise: {why.split('. ')[0]}",) if why else ()
    return Verdict("", tuple(dict.fromkeys((*found.doubts, *single.doubts, *others))))


def _call(model: nn.Module, inputs: Any, size: int) -> Any:
    with ForwardOf(size, standalone=False):
        return call_model(model, inputs)


def _with_followed(compare: Comparison, sizes: list[int], followed: int) -> Verdict:
    """Compare the sizes of a step, and the number of rows in which samples were followed.

    The result for these rows holds for more if they are computed in the same way. The inspection
    may have filled a cache for each number of rows, so the last comparison is of calls that find
    it.
    """
    every = sizes if followed in (0, 1, *sizes) or followed > sizes[0] else [*sizes, followed]
    found = compare(every) if len(every) > 1 else Verdict()
    if every is sizes:
        return _compared(compare, sizes, found)
    if not (found.meets or found.doubts):
        return found
    found = _compared(compare, sizes) if len(sizes) > 1 else Verdict()
    if found.meets:
        return found
    few = compare([sizes[0], followed])
    if few.meets or few.doubts:
        few = compare([sizes[0], followed], earlier=0)
    return Verdict(few.meets, tuple(dict.fromkeys((*found.doubts, *few.doubts))))


def _compared(compare: Comparison, sizes: list[int], found: Verdict | None = None) -> Verdict:
    """Compare forwards; where they differ, compare calls that find state stored by an earlier one.

    A grid that is cached for the last number of rows is built for some sizes and found for others.
    """
    found = compare(sizes) if found is None else found
    if not found.meets:
        return found
    anew = compare(sizes, earlier=sizes[0] + 1)
    if not (anew.meets or anew.doubts):  # each size has built its own
        return anew
    later = compare(sizes, earlier=0)
    return found if later.meets else Verdict("", (KEEPS, *later.doubts))


def refuse_few_rows(step: Step, error: Exception) -> None:
    """Refuse a model that takes the full batch and not so few samples, where `error` says so.

    Raises:
        NotExactError: forward ends in an error of the same class for fewer samples alone.
    """
    if isinstance(error, AnybatchError) or out_of_memory(error):
        return
    try:
        some = next(iter(step.feed()))
    except type(error):  # it is that of samples that are loaded
        return
    samples, trains = step.global_batch.size, step.gradients is not None
    run = partial(Comparison, step.model, (some.inputs, some.size), _call, trains)
    sizes, words = dict.fromkeys((*_parts(step), ENOUGH, ODD, 2)), f"{type(error).__name__}: "
    failed = next((n for n in sizes if 0 < n < samples and run().error(n).startswith(words)), 0)
    if failed and not run().error(samples):
        raise NotExactError(
            "forward must take any number of samples when the batch is split, and it takes "
            f"{samples} and not {failed} ({words}{error}): give micro_batch >= the batch size"
        ) from error
    name = _indices(step, samples) if "out of bounds" in str(error) else ""
    if name:
        raise NotExactError(
            f"a row must not name other rows when the batch is split, and {name} has places of "
            f"samples in the batch ({error}): pass the rows that it names, or compute with it in "
            "the loss, or give micro_batch >= the batch size"
        ) from error


def _indices(step: Step, samples: int) -> str:
    """Return the integer input that may hold places of samples in the full batch, or ""."""
    if not isinstance(step.batch, TensorBatch):
        return ""
    for path, leaf in pytree.tensors(step.batch.inputs, "inputs"):
        integer = leaf.dim() and not (leaf.is_floating_point() or leaf.is_complex())
        if integer and int(leaf.min()) >= 0 and step.micro_batch <= int(leaf.max()) < samples:
            return path
    return ""


def compare_new_sizes(step: Step) -> None:
    """Compare sizes that no earlier step of the signature has had, before anything is computed.

    Raises:
        NotExactError: forward or a declared loss depends on how many samples there are.
        Retry: rows of these shapes call other kernels than those that were inspected.
    """
    before = RNGState.now()
    found = compare_sizes(step, next(iter(step.feed())))
    before.put_back()
    step.buffers.restart()
    found.refuse()
    declared = _compare_declared(step)
    before.put_back()
    declared.refuse()
    step.traits.doubt(*found.doubts, *declared.doubts)
    assert step.traits.sizes is not None
    note_compared(step)


def sizes_of_step(step: Step) -> list[int]:
    """Return the sizes at which a declared loss is called: of the full batch, and of its parts."""
    samples, record = step.global_batch.size, step.traits.sizes
    followed = 0 if record is None else record.followed
    sizes = sizes_of(samples, step.micro_batch, followed)
    return [*sizes, *({1} & _parts(step) - {samples})]


def _compare_declared(step: Step) -> Verdict:
    compare = None if step.traits.sizes is None else step.traits.sizes.declared
    if compare is None or step.micro_batch >= step.global_batch.size:
        return Verdict()
    judge = partial(compare, sizes_of_step(step))
    with unheard():
        found = judge() if step.calls is None else step.calls.watched(judge)
    return Verdict("", (CHANGES,)) if found is None else found


def note_compared(step: Step) -> None:
    """Note that the sizes of a step were compared in it."""
    assert step.traits.sizes is not None
    samples, micro_batch, shapes = pair_of(step)
    step.traits.sizes.add(samples, micro_batch, step.traits.steps, shapes)


def pair_of(step: Step) -> Pair:
    """Return the sizes of a step, and the shapes of one row where these are there."""
    shapes = shapes_of(step.batch) if isinstance(step.batch, TensorBatch) else ()
    return step.global_batch.size, step.micro_batch, shapes


def doubt_beyond(step: Step) -> None:
    """Doubt a step that is larger or smaller than all that were compared, if it is not compared."""
    record = step.traits.sizes
    if record is not None and record.beyond(*pair_of(step)):
        step.traits.doubt(BEYOND)


def _parts(step: Step) -> set[int]:
    size = step.micro_batch
    return {size, step.batch.size % size, step.global_batch.size % size}


def rows_of_loss(step: Step, outputs: Any, size: int) -> LossRows | None:
    """Return outputs and targets of a few rows, for a loss that is declared; None for another."""
    if not step.loss.declares:
        return None
    count = -(-size // step.micro_batch)
    tight = step.budgeted and step.micro_batch < ROOMY * size
    few = [] if tight else list(islice(step.feed(), count))
    each = size // count
    if len(few) < count or min(micro.size for micro in few) < each or each * count < size:
        step.traits.doubt(DECLARED)  # what it holds was not foreseen, or there are too few rows
        return None
    some = [pytree.rows(micro.targets, 0, each, micro.size) for micro in few]
    targets = some[0] if count == 1 else pytree.join(some, sizes=[each] * count, name="targets")
    return LossRows(outputs, targets, size)


def refuse_declared(step: Step, full: LossRows, count: int, *, lanes: bool) -> tuple[str, ...]:
    """Refuse a declaration that is not true; return why it could not be shown to be.

    Losses of `count` rows are compared with those of all.
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
    batch = step.batch if isinstance(step.batch, TensorBatch) else None
    if step.budgeted or step.retries:
        batch = None

    def judge() -> Verdict:
        refuse_declared_use(step.loss.own, full, layout, step.traits.mixed)
        found = one.judge(sizes_of_step(step))
        if found.meets:
            return found
        counts = one.sizes is not None and not found.doubts
        other = one.judge_entries(batch, step.micro_batch, counts=counts)
        return Verdict(other.meets, (*found.doubts, *other.doubts))

    with unheard():
        found = judge() if step.calls is None else step.calls.watched(judge)
    assert step.traits.sizes is not None
    step.traits.sizes.reads |= one.reads
    if found is None:
        return (CHANGES,)
    found.refuse()
    step.traits.sizes.declared = one.sizes
    late = isinstance(step.batch, LazyBatch) or step.global_batch.several
    counts = late and step.loss.counts
    return (*found.doubts, *([DECLARED] if counts else []))
