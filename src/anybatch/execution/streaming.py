"""Micro-Batch Streaming with the gradient of the full batch (MBS, Algorithm 1), and its retry.

The paper divides each micro-batch's loss by the number of micro-batches. Here line 11 divides each
numerator by the denominator of the full batch, which is counted before the first backward; if it is
known only at the end (samples loaded during the step), an estimate replaces it and the sum is
multiplied by estimate / truth when it is delivered.

    mu_0: forward, backward(numerator_0 / D) │ mu_1: ... │ mu_2: ... │ add to .grad
    memory: one micro-batch, one set of gradients
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import attrgetter, methodcaller, mul
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from anybatch.core import accelerator, modules, pytree
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.core.hooks import refuse_on_nodes, refuse_registered
from anybatch.core.oom import out_of_memory
from anybatch.core.retry import Retry
from anybatch.core.rng import RNGState
from anybatch.core.transaction import Before
from anybatch.distributed.local_batch import LocalBatch
from anybatch.execution.composite import SCALE, Encoders
from anybatch.execution.gradients import HALF
from anybatch.execution.step import Step, check_trains
from anybatch.loss.base import Number, Part, Total
from anybatch.memory.fakes import is_fake

NUMERATOR, DETACHED, DTYPE = attrgetter("numerator"), methodcaller("detach"), attrgetter("dtype")
WEIGHT, DENOMINATOR = attrgetter("weight"), attrgetter("denominator")
"""Mapped over few values, where a comprehension would enter a frame of its own."""


def stream(step: Step) -> Tensor:
    """Run the step, one micro-batch after the other.

    Args:
        step: the mini-batch and the model; see `anybatch.execution.step`.

    Returns:
        The loss of the full batch, a detached 0-dim tensor.

    Raises:
        Retry: the loss couples samples, or memory ran out.

    Source: MBS, Algorithm 1; its lines are numbered on the right.
    """
    streaming = Streaming(step)
    if step.global_batch.several:
        step.offer()
    if step.loss.couples and step.batch.size:
        of_parts(step, None)
    bare = step.chunked is None and step.discover is None
    train = step.under(streaming.train if bare else streaming.train_first)
    for micro in step.feed():  # 8
        in_pieces(step, micro, train)
    normalize = streaming.normalize or of_parts(step, [])
    if step.gradients is not None and step.batch.size:
        check_trains(streaming.trained)
    step.finish(normalize.correction())
    return normalize.loss()


class Streaming:
    """Lines 9 to 12, with the state that is stored for the next micro-batch."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.trained = 0
        self.normalize: Normalization | None = None

    def train_first(self, micro: MicroBatch) -> None:
        """Train in chunks, and let go of leaves that were found, when their memory is free."""
        step = self.step
        with step.in_chunks():
            self.train(micro)
        if step.discover is not None and step.gradients is not None:
            step.gradients.let_go()

    def train(self, micro: MicroBatch) -> None:
        """Train on a micro-batch; when it returns or fails, its memory is free."""
        step = self.step
        if self.normalize is None and step.discover is not None:
            self._refuse_coupled(micro)
        outputs = step.forward(micro)  # 9
        if self.normalize is None:
            self.normalize = of_parts(step, step.totals(outputs, micro))
        normalize = self.normalize
        parts = step.parts(outputs, micro, normalize.totals)  # 10
        weights = normalize(parts, micro.size)  # 11
        losses = [*map(NUMERATOR, parts)]
        trained = step.backward(losses, weights, micro, normalize.correction)  # 12
        normalize.count()
        self.trained += trained
        step.show(outputs, micro)

    def _refuse_coupled(self, micro: MicroBatch) -> None:
        """Find out without a graph where only one part of it fits, if the loss couples samples."""
        step = self.step
        if len(Parts(step, micro.inputs)) == 1:
            return
        rng = RNGState.now()
        with torch.no_grad():
            coupled = step.totals(step.forward(micro), micro) is None
        step.forget_casts()
        rng.put_back()
        if coupled:
            of_parts(step, None)


def of_parts(step: Step, totals: list[Total] | None) -> Normalization:
    """Return the denominators of a loss that must be a sum over samples."""
    found = normalization(step, totals)
    if found is None:
        raise Retry("coupled")
    return found


def normalization(step: Step, totals: list[Total] | None) -> Normalization | None:
    """Return the denominators of the loss over all ranks; None where it couples samples somewhere.

    Args:
        step: the step.
        totals: of this rank's samples; None if the loss couples them, empty without samples.
    """
    found = step.global_batch.totals(totals)
    if found is None:
        return None
    step.found = step.loss.describe(found)
    return Normalization(found, step.batch.size, step.global_batch, step.nothing, rounds=step.bends)


class Normalization:
    """Line 11: the weight of each numerator, and the factor that the sum lacks at the end.

    The multiplication is left to backward, which starts from the weight instead of 1. Where the
    terms come in half precision the weights are powers of two, which rounds nothing; 1/D itself,
    rounded to half, would bend every gradient the same way.

    Args:
        totals: the terms of the full batch's loss; at most one denominator is still unknown.
        size: N_B, samples in the mini-batch of this rank.
        global_batch: the batch over all ranks; None (default) is one process.
        nothing: returns 0, as the loss of no samples. Default a float32 on the CPU.
        rounds: weights of half precision are rounded, as backward does more than multiply them.
            Default False.
    """

    def __init__(
        self,
        totals: list[Total],
        size: int,
        global_batch: LocalBatch | None = None,
        nothing: Callable[[], Tensor] | None = None,
        *,
        rounds: bool = False,
    ) -> None:
        self.totals = totals
        self._rounds = rounds
        self._size = size
        self._global_batch = global_batch or LocalBatch(size)
        self._nothing = nothing or partial(torch.zeros, ())
        self._all: Number | None = None
        self._late = totals[0].denominator is None
        self._counted: Number = 0
        self._estimate: Number = 1.0
        self._lacks: Number = 1.0
        self._scales: list[Number] = []
        self._weights: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._values: list[Tensor] = []
        self._denominator: Number = 0

    def __call__(self, parts: list[Part], n: int) -> list[Tensor]:
        """Return the weight of each numerator; the numerators' values are stored until `count`."""
        values = [*map(DETACHED, map(NUMERATOR, parts))]
        if not self._weights:
            self._scales = self._first_scales(parts, n)
            sums, weights = list[Tensor](), list[Tensor]()
            for scale, value in zip(self._scales, values, strict=True):
                wide = value.float() if value.dtype in HALF else value
                sums.append(torch.zeros_like(wide))
                weights.append(torch.as_tensor(scale, dtype=value.dtype, device=value.device))
            # Last: where memory runs out before, the next micro-batch is the first one
            # (test_at_every_allocation).
            self._sums, self._weights = sums, weights
        if self._late:
            self._denominator = parts[0].denominator()
        self._values = values
        return self._weights

    def count(self) -> None:
        """Count the micro-batch of the last requested weights: it is done."""
        counted = self._counted + self._denominator
        for total, value in zip(self._sums, self._values, strict=True):
            total.add_(value)
        self._counted = counted

    def correction(self) -> float | Tensor:
        """Return the factor that the delivered sum lacks; 1.0 in the plain case."""
        if not self._late:
            return self._lacks
        if self._all is None:
            self._all = self._global_batch.sum_of("the denominator", _number(self._counted))
        return self._lacks * _ratio(self._estimate, self._all)

    def loss(self) -> Tensor:
        """Return the loss of the full batch."""
        correction = self.correction()
        if not self._sums:  # a rank without samples
            nothing = self._nothing()
            return self._global_batch.loss(nothing, nothing.dtype)
        shares = [*map(mul, self._sums, self._scales)]
        full = shares[0] if len(shares) == 1 else torch.stack(shares).sum()
        dtype = reduce(torch.promote_types, map(DTYPE, self._weights))
        corrected = full if type(correction) is float and correction == 1.0 else full * correction
        return self._global_batch.loss(corrected, dtype)

    def _first_scales(self, parts: list[Part], n: int) -> list[Number]:
        divisors = [] if self._late else [*map(_number, map(DENOMINATOR, self.totals))]
        if self._late:
            first = _number(parts[0].denominator())
            single_rank = self._global_batch.size == self._size
            # All ranks need one estimate: BatchNorm adds up what their backwards begin with
            # (test_a_denominator_computed_at_the_end_is_one_for_all_ranks).
            self._estimate, other = first * (self._size / n), float(self._global_batch.size)
            if not single_rank:
                self._estimate = other
            elif isinstance(first, Tensor):  # nobody waits for its device
                self._estimate = torch.where(first > 0, self._estimate, other)
            # The first micro-batch may count no target, and a weight of 1 / 0 is infinite
            # (test_it_is_exact_where_the_batch_is_loaded_on_the_way).
            elif first <= 0:
                self._estimate = other
            divisors = [self._estimate]
        scales = [*map(_ratio, map(WEIGHT, self.totals), divisors)]
        # 1 / D, rounded to half precision, changes every gradient in the same way
        # (test_2048_micro_batches_are_summed_to_5e_4_where_bfloat16_loses_percents).
        halves = not {*map(DTYPE, map(NUMERATOR, parts))}.isdisjoint(HALF)
        if halves and not self._rounds and not any(map(is_fake, scales)):
            scales = self._powers_of_two([float(scale) for scale in scales])
        return scales

    def _powers_of_two(self, scales: list[float]) -> list[Number]:
        first = abs(scales[0])
        if first == 0.0 or not math.isfinite(first):
            return list(scales)
        power = 2.0 ** round(math.log2(first))
        self._lacks = first / power
        return [scale * power / first for scale in scales]


def _number(value: Number | None) -> Number:
    """Return a host number; of a value on a device, or of a fake, a tensor."""
    assert value is not None
    if isinstance(value, Tensor):
        here = accelerator.of(value.device).host and not is_fake(value)
        return float(value) if here else accelerator.wide(value.detach())
    return float(value)


def _ratio(above: Number, below: Number) -> Number:
    """Return above / below, with the infinities and NaN of IEEE instead of an exception."""
    if isinstance(below, Tensor) or isinstance(above, Tensor):
        return above / below
    # Python raises for a division by 0
    # (test_a_batch_in_which_nothing_counts_is_nan_as_it_is_undivided).
    if below == 0.0:
        return math.nan if above == 0.0 or math.isnan(above) else math.copysign(math.inf, above)
    return above / below


# The undivided mechanism: the full batch at once, where it is no larger than a micro-batch.
#
# The loss is called as the user wrote it, so the step is bit for bit torch's own.


def undivided(step: Step) -> Tensor:
    """Run forward, loss and backward once.

    Returns:
        The loss, a detached 0-dim tensor.
    """
    step.found = step.loss.name
    (micro,) = step.feed()
    found: list[tuple[Any, Tensor]] = []

    def train(micro: MicroBatch) -> None:
        outputs = step.forward(micro)
        loss = step.loss.full_batch(outputs, micro)
        if step.gradients is not None:
            check_trains(step.pull([loss], step.scaled([torch.ones_like(loss)])))
        step.compare(outputs, micro, once=True)  # when the step's graph has gone
        found.append((outputs, loss.detach()))

    with step.in_chunks():
        step.under(train)(micro)
        step.finish()
        ((outputs, loss),) = found
        step.show(outputs, micro)
    return loss


# The forward of a micro-batch in parts that do not meet, so that one graph is there at a time.
#
# A loss of all outputs has been computed when the second pass begins
# (`anybatch.execution.two_pass`), so a backward needs only its own outputs. In a model of
# `Encoders`, the saved tensors of one are freed before the next one runs; any other model is one
# part.
#
#     at once:  image ─ text ─ backward of both      parts:  image ─ backward │ text ─ backward
#
# Where forward moves no buffer, one encoder runs on all micro-batches before the next one does: in
# laps, which is faster by the weights in the processor's cache.

Lap = int | None
"""The part that is run on all micro-batches; None runs all parts on each of them."""


class Parts:
    """Parts of the forward of a micro-batch, in order; `len` is their number.

    Args:
        step: the step of the model.
        inputs: of any micro-batch, as `feed` gives them.
        lap: the part to run. Default None: all.
    """

    def __init__(self, step: Step, inputs: Any, lap: Lap = None) -> None:
        self._step, self._names, self._lap = step, _names(step, inputs), lap

    def __len__(self) -> int:
        return max(len(self._names), 1)

    def forward(self, micro: MicroBatch, at: int) -> Any:
        """Run part `at`, the parts before it having been run; return its outputs."""
        if not self._names:
            return self._step.forward(micro)
        name, all_parts = self._names[at], self._lap is None
        micro = MicroBatch({name: micro.inputs[name]}, None, micro.size, micro.begin)
        begins, ends = all_parts and at == 0, all_parts and at == len(self) - 1
        outputs = self._step.forward(micro, begins=begins, ends=ends)
        if at or self._lap:  # a scale comes with the first one
            outputs.pop(SCALE, None)
        return outputs

    def outputs(self, micro: MicroBatch, *, graph: bool) -> list[Any]:
        """Run all parts without graphs, except the last where `graph` is set."""
        found = []
        for at in range(len(self)):
            with torch.set_grad_enabled(graph and at + 1 == len(self)):
                self._step.forget_casts()
                found.append(self.forward(micro, at))
        return found


def joined(outputs: list[Any]) -> Any:
    """Return the model's outputs, joined from those of its parts or laps in order."""
    if len(outputs) == 1:
        return outputs[0]
    return {name: found for part in outputs for name, found in part.items()}


def laps(step: Step, *, all_parts: bool = False) -> list[Lap]:
    """Return the laps of a pass over the batch of a step.

    Args:
        step: the step.
        all_parts: all parts of a micro-batch are run before the next one. Default False.
    """
    batch = step.batch
    if all_parts or not isinstance(batch, TensorBatch) or step.offloader or not step.buffers.still:
        return [None]
    names = _names(step, batch.inputs)
    return [*range(len(names))] if len(names) > 1 else [None]


def feed(step: Step, lap: Lap) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step on the device, with the inputs of a lap; targets once."""
    batch = step.batch
    if lap is None or not isinstance(batch, TensorBatch):
        return step.feed()
    name = _names(step, batch.inputs)[lap]
    targets = batch.targets if lap == 0 else None
    return step.feed(replace(batch, inputs={name: batch.inputs[name]}, targets=targets))


def _names(step: Step, inputs: Any) -> list[str]:
    """Return the names of the encoders that are run, in order; none where the model is one part.

    It is one part if a hook or a caller may need all outputs at once, or if full-batch draws are
    made in the order of its forward.
    """
    model = step.model
    if not isinstance(model, Encoders) or not isinstance(inputs, Mapping):
        return []
    hooks = model._forward_hooks or model._forward_pre_hooks or model._backward_hooks
    if step.draws is not None or hooks or type(model).forward is not Encoders.forward:
        return []
    return [name for name in model.encoders if name in inputs]


# Memory that runs out inside a step: smaller micro-batches, and only work that can be repeated.
#
# Finders of a batch size catch the error around a whole training and start that over; a loop that
# catches it around one micro-batch has half a gradient in ``.grad``, moved buffers and RNG, and the
# exception that it is handling still holds the memory. Here an attempt begins at a recorded state,
# and the retry outside of the ``except`` block, after the frames of the failed one have been
# emptied.
#
#     forward of mu_k failed            mu_k again in halves, the rest of the step in halves too
#     backward, sums in an accumulator  the same: what grew of .grad is thrown away
#     backward, sums in place           the step from its start, at half the size
#     the observer failed               out: it has seen what it must not see twice
#
# Source: MBS, section 3.2 (the micro-batch must fit); the ways back are ours.


def in_pieces(
    step: Step,
    micro: MicroBatch,
    work: Callable[[MicroBatch], None],
    sizes: Sequence[int] | None = None,
) -> None:
    """Do `work` on a micro-batch, and where memory runs out, on its parts.

    Args:
        step: its `limit` is the most samples of a part; it is halved at every failure.
        micro: a micro-batch as it was loaded.
        work: changes its counters only when it can no longer fail.
        sizes: rows of the parts to begin with; None (default) begins with all of it.

    Raises:
        Exception: `work` failed, and it is not for memory, or cannot be undone here, or a single
            sample was too much.
    """
    todo = [micro] if sizes is None else [*cut(micro, sizes)][::-1]
    while todo:
        piece = todo.pop()
        if piece.size > step.limit:
            todo += [*_at_most(step.limit, piece)][::-1]
            continue
        moment = step.moment()
        failure = attempt(step, work, piece)
        if failure is None:
            continue
        try:
            step.go_back(moment, failure)
        finally:
            failure = None  # whose traceback holds this frame
        todo += [*_at_most(min(step.limit, _half(piece.size)), piece)][::-1]


def attempt(step: Step, work: Callable[..., None], *piece: MicroBatch) -> Exception | None:
    """Do `work` on a piece; return the out-of-memory error that ended it, None if it is done."""
    outside = sys.exception()
    step.phase = "forward"
    try:
        if step.draws is None:
            work(*piece)
        else:
            with step.draws:
                work(*piece)
    except Exception as error:
        if not out_of_memory(error, outside=outside):
            raise
        return error
    return None


def memory_is_too_small(step: Step, error: Exception, outside: BaseException | None) -> bool:
    """Return whether a step failed for memory, and may be run again at half the size.

    Not where a single sample was too much, or where the observer or a hook has run.

    Args:
        step: the attempt that failed.
        error: its error.
        outside: the exception that was being handled when it began; None where there was none.

    Raises:
        RankError: the gradients have been summed over the ranks.
    """
    if not out_of_memory(error, outside=outside) or not step.can_shrink():
        return False
    step.global_batch.refuse_smaller()
    return True


def cut(micro: MicroBatch, sizes: Sequence[int]) -> Iterator[MicroBatch]:
    """Yield the next `sizes` rows of a micro-batch, as views."""
    start = 0
    for size in sizes:
        stop = start + size
        inputs = pytree.rows(micro.inputs, start, stop, micro.size)
        targets = pytree.rows(micro.targets, start, stop, micro.size)
        yield MicroBatch(inputs, targets, size, micro.begin + start)
        start = stop


def _at_most(limit: int, micro: MicroBatch) -> Iterator[MicroBatch]:
    full, rest = divmod(micro.size, limit)
    return cut(micro, [limit] * full + [rest] * (rest > 0))


def _half(size: int) -> int:
    return (size + 1) // 2


# Leaves that no module lists, such as the parameters that a loss closes over: the graph has them.
#
# They are found before the first backward of a signature, and from then on are treated as the
# model's own: recorded, set aside, summed and delivered.


def discoverer(
    step: Step, before: Before, also: list[TensorWeakRef] | None = None
) -> Callable[[list[Tensor]], None]:
    """Return a function that adds the leaves behind a backward's roots, or refuses their hooks.

    Args:
        step: its gradients take them in.
        before: records their gradients.
        also: a list that they are added to; None (default) for none.
    """
    held = weakref.ref(step)  # which holds this function: in a circle its gradients would stay

    def discover(roots: list[Tensor]) -> None:
        step = held()
        if step is None or step.gradients is None:
            return
        step.gradients.let_go()
        listed = {id(leaf) for leaf in step.gradients.parameters} | step.own
        found = [leaf for leaf in modules.leaves(roots) if id(leaf) not in listed]
        before.add(found)
        step.gradients.add(found)
        # Hooks that forward registers, or that are on nodes, would fire with every micro-batch
        # (test_a_hook_on_the_node_of_a_gradient_is_refused).
        refuse_registered(step.gradients.parameters)
        refuse_on_nodes(modules.ends(roots))
        if also is not None:
            also.extend(map(TensorWeakRef, found))

    return discover
