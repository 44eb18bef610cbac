"""Two passes for a coupled loss, computed once on the outputs of the full batch.

Dice loss, InfoNCE, or any function not recognised as a sum over samples needs all outputs at once;
outputs are small, saved tensors are not. So the outputs are computed first, without graphs; the
loss is computed on all of them; and a second pass runs the backward of each micro-batch from its
rows of the gradient of the loss. It is exact for every loss, and costs one more forward of all
micro-batches but the last, whose graph still exists when the loss has been computed.

    pass 1:  forward mu_0, mu_1, mu_2           outputs kept; a graph of mu_2 only
             loss(all outputs), backward        d loss / d outputs;  backward of mu_2
    pass 2:  forward mu_0, backward(its rows);  mu_1                 the same samples and draws

Encoders that do not meet before the loss are run in parts (`Parts`): the graph of the last
micro-batch is that of its last part, and pass 2 runs the others.

Source: the chain rule; as gradient caching, Gao et al. 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import modules, pytree
from anybatch.core.batch import MicroBatch, TensorBatch, count_micro_batches
from anybatch.core.python_state import difference, equal, places
from anybatch.core.retry import Retry
from anybatch.core.rng import RNGState
from anybatch.distributed.local_batch import Rows
from anybatch.errors import LossError, NotReproducibleError
from anybatch.execution.proof.declared import refuse_trained
from anybatch.execution.step import Step, check_trains
from anybatch.execution.streaming import Lap, Parts, attempt, feed, in_pieces, joined, laps
from anybatch.loss.contrastive import Contrastive

COUPLED = "coupled"
"""Name of such a loss in a plan."""


def gather(step: Step) -> Tensor:
    """Run the step in two passes; in one, where there are no gradients to take.

    Returns:
        The loss of the full batch, a detached 0-dim tensor.

    Raises:
        NotReproducibleError: the second pass had other samples or other outputs.
        LossError: the loss uses tensors that it was not given.
    """
    step.found = COUPLED
    start = RNGState.now()
    first = FirstPass(step)
    # The second pass moves numbers and logs again, from where the first one did
    # (test_counts_and_logs_have_each_sample_once_in_two_passes).
    counts = step.attributes.counts()
    first.run()
    if first.in_laps and step.buffers.strays():  # they have been set back
        step.begin_again()
        counts.put_back()
        first = FirstPass(step, all_parts=True)
        first.run()
    rows = step.global_batch.rows(first.outputs, first.targets, step.traits.axes, step.batch.size)
    first.keep_own_rows(rows)
    step.agree()  # a rank without samples has drawn nothing, and takes the same loss
    if step.gradients is None or not step.batch.size:
        loss = value_of_all(step, rows)
    else:
        computed = loss_of_all(step, rows)
        loss, end, statistics = computed.loss, RNGState.now(), step.buffers.statistics()
        backwards = Backwards(step, first, computed, end)
        del computed
        backwards.last()
        step.buffers.restart()
        if backwards.left:
            step.put_back(start)
            of_last = first.counts.added()
            in_parts = first.parts > 1 or first.in_laps  # of which all but the last are run twice
            if not in_parts:
                counts.put_back()
            backwards.second_pass()
            if not in_parts:
                of_last()
        if first.in_laps:
            step.buffers.refuse_strays()
        step.buffers.write_final()  # the last forward may be of pass 1, or of some parts only
        check_trains(backwards.trained)
        if step.draws is None:
            step.put_back(end)
        step.buffers.settle(statistics)
    _show_all(step, first)
    step.finish()
    return loss


def _show_all(step: Step, first: FirstPass) -> None:
    if step.observe is None and step.full_outputs is None:
        step.done += len(first.flat)
        return
    begin = 0
    for size in first.flat:
        targets = pytree.rows(first.targets, begin, begin + size, step.batch.size)
        outputs = step.rows(first.outputs, begin, size, step.batch.size)
        step.show(outputs, MicroBatch(None, targets, size, begin))
        begin += size


# The first of two passes: the outputs of the full batch, without graphs except the last one.
#
# Encoders that do not meet are run in laps, one encoder over all micro-batches before the next one:
# its weights in the processor's cache serve all of them.
#
#     at once:  a b │ a b │ a b          laps:  a │ a │ a   b │ b │ b
#
# Source: Gao et al. 2021, section 3.


class LapRun:
    """A lap as it was run.

    Attributes:
        lap: which encoders.
        sizes: for each micro-batch that was loaded, the sizes it was computed in.
        place: of its first output among all.
    """

    def __init__(self, lap: Lap, place: int) -> None:
        self.lap, self.place = lap, place
        self.sizes: list[list[int]] = []

    @property
    def flat(self) -> list[int]:
        """The sizes that were computed at once, in order."""
        return [size for loaded in self.sizes for size in loaded]


class FirstPass:
    """The forwards of all micro-batches; `run` runs them.

    Args:
        step: the mini-batch and the model.
        all_parts: run all parts of a micro-batch before the next one. Default False.

    Attributes:
        outputs: of the full batch, without graph.
        targets: of the full batch.
        runs: the laps.
        prints: a fingerprint of each micro-batch of samples that are loaded again.
        parts: into how many parts the forward of the last lap falls.
        graph: the outputs of the last part of the last micro-batch with their graph, until its
            backward takes them.
        counts: numbers and logs of the model before that forward, or after it without a graph.
    """

    def __init__(self, step: Step, *, all_parts: bool = False) -> None:
        self.outputs: Any = []
        self.targets: Any = []
        self.runs: list[LapRun] = []
        self.prints: list[int | None] = []
        self.parts = 1
        self.graph: list[Any] = []
        self.counts = step.attributes.counts()
        self._step = step
        self._laps = laps(step, all_parts=all_parts)

    @property
    def in_laps(self) -> bool:
        """Whether there are several laps."""
        return len(self._laps) > 1

    @property
    def flat(self) -> list[int]:
        """The sizes that were computed at once in the last lap, in order."""
        return self.runs[-1].flat

    def run(self) -> None:
        """Run all laps, and join their outputs and targets."""
        of_laps: list[Any] = []
        for lap in self._laps:
            run = LapRun(lap, sum(len(pytree.flat(one)) for one in of_laps))
            self.runs.append(run)
            found = self._run(run)
            if not found:  # a rank without samples
                return
            place = run.place
            dims = list(self._step.traits.axes)[place : place + len(pytree.flat(found[0]))]
            of_laps.append(pytree.join(found, dims, sizes=run.flat))
            del found
        self.outputs = joined(of_laps)
        first = self.runs[0].flat
        self.targets = pytree.join(self.targets, sizes=first, name="targets")

    def _run(self, run: LapRun) -> list[Any]:
        """Run a lap, and return the outputs of its forwards."""
        found: list[Any] = []
        lazy = not isinstance(self._step.batch, TensorBatch)
        for loaded in feed(self._step, run.lap):
            if run is self.runs[0]:
                self.prints.append(loaded.fingerprint() if lazy else None)
            run.sizes.append([])
            in_pieces(self._step, loaded, partial(self._forward, run, found))
        return found

    def keep_own_rows(self, rows: Rows) -> None:
        """Store only this rank's rows of the outputs and targets of all ranks."""
        step, size = self._step, self._step.batch.size
        if step.global_batch.several and size:
            self.outputs = step.rows(rows.outputs, rows.begin, size, rows.size)
            self.targets = pytree.rows(rows.targets, rows.begin, rows.begin + size, rows.size)

    def _check(self, run: LapRun, out: Any) -> None:
        """Run the step again where the number of outputs is not the inspected one."""
        layout, there = self._step.traits.layout, run.place + len(pytree.flat(out))
        last = run.lap == self._laps[-1]
        if layout and (there != len(layout) if last else there >= len(layout)):
            raise Retry("inspection")

    def _forward(self, run: LapRun, found: list[Any], micro: MicroBatch) -> None:
        step = self._step
        last = run.lap == self._laps[-1] and micro.begin + micro.size == step.batch.size
        ends = (
            last and step.offloader is None
        )  # else its graph would wait on the device for the loss
        parts = Parts(step, micro.inputs, run.lap)
        if ends:
            self.counts = step.attributes.counts()
        outputs = parts.outputs(micro, graph=step.gradients is not None and ends)
        out = joined(outputs)
        if last and not ends:
            self.counts = step.attributes.counts()
        if not found:
            self._check(run, out)
        if ends:
            self.graph.append(outputs[-1])
        self.parts = len(parts)
        found.append(pytree.map_tensors(Tensor.detach, out))
        if run is self.runs[0]:
            self.targets.append(micro.targets)
        run.sizes[-1].append(micro.size)


# The second of two passes: each micro-batch gets its rows of the gradient of the loss.
#
# The graph of the last one still exists when the loss has been computed, and its backward runs
# first. All others run forward once more, as in the first pass, and their outputs are compared.
#
# Source: the chain rule; Gao et al. 2021, section 3.


class Backwards:
    """Hands each micro-batch its rows of the gradient: of the last graph first, then pass 2.

    Attributes:
        trained: how many outputs had a gradient to take.
    """

    def __init__(
        self,
        step: Step,
        first: FirstPass,
        computed: LossGradients,
        rng: RNGState,
    ) -> None:
        self.trained = 0
        self._rng = rng
        self._step, self._first, self._gradients = step, first, computed.gradients
        self._before = computed.begin  # rows of ranks before this one
        self._first_outputs = list(zip(pytree.flat(first.outputs), step.traits.axes, strict=True))
        self._early = 0
        self._run, self._begin = first.runs[0], 0
        self._sizes: dict[int, int] = {}

    @property
    def left(self) -> bool:
        """Whether anything is left for pass 2."""
        return any(map(self._stop, self._first.runs))

    def _stop(self, run: LapRun) -> int:
        """Return the row where pass 2 ends in a lap."""
        size = self._step.batch.size
        done = run is self._first.runs[-1] and self._first.parts == 1
        return size - self._early if done else size

    def last(self) -> None:
        """Run the backward of the graph, if one is there and memory does not run out for it.

        The rows of its micro-batch are done then, or lack all parts but the last.
        """
        step, first = self._step, self._first
        if not first.graph:
            return
        moment = step.moment()
        failure = attempt(step, self._pull_last)
        if failure is not None:
            step.go_back(moment, failure)
            return
        self._early = first.flat[-1]

    def second_pass(self) -> None:
        """Run the micro-batches again, except those that are done."""
        for run in self._first.runs:
            self._run, self._begin = run, 0
            self._sizes = dict(zip(accumulate(run.flat, initial=0), run.flat, strict=False))
            self._lap(run, self._stop(run))

    def _lap(self, run: LapRun, stop: int) -> None:
        step, first = self._step, self._first
        loaded = islice(feed(step, run.lap), count_micro_batches(stop, step.micro_batch))
        prints = first.prints if run is first.runs[0] else [None] * len(run.sizes)
        for micro, sizes, fingerprint in zip(loaded, run.sizes, prints, strict=False):
            if fingerprint is not None and micro.fingerprint() != fingerprint:
                raise NotReproducibleError(
                    "both passes over a lazy batch must load the same samples, and the second "
                    "loaded other ones: draw augmentations from torch's, numpy's or random's "
                    "global generator, or declare the loss by Loss.per_sample or Loss.ratio, "
                    "which needs one pass"
                )
            complete = self._begin + micro.size <= stop
            in_pieces(step, micro, step.under(self._again), sizes if complete else sizes[:-1])

    def _pull_last(self) -> None:
        first, step = self._first, self._step
        begin = self._before + step.batch.size - first.flat[-1]
        graph = pytree.flat(first.graph.pop())
        place = len(self._gradients) - len(graph)
        with step.buffers.unmoved():
            self.trained += step.pull(*shares(step, graph, self._gradients, begin, place))

    def _again(self, micro: MicroBatch) -> None:
        step, begin = self._step, self._begin

        def check(found: list[Tensor], place: int) -> None:
            self._compare(found, place, micro)
            if step.draws is not None:  # a backward of the full batch comes after its loss
                step.put_back(self._rng)

        run = self._run
        last = run is self._first.runs[-1] and begin >= step.batch.size - self._early
        self.trained += pull(
            *(step, micro, self._gradients, self._before + begin),
            lap=run.lap,
            place=run.place,
            check=check,
            early=last,
        )
        self._begin += micro.size

    def _compare(self, found: list[Tensor], place: int, micro: MicroBatch) -> None:
        """Require that the outputs of a part are those of the first pass."""
        step, begin = self._step, self._begin
        before = [
            then if axis is None else then.narrow(axis, begin, micro.size)
            for then, axis in self._first_outputs[place : place + len(found)]
        ]
        smaller = self._sizes.get(begin) != micro.size
        other = [at for at, pair in enumerate(zip(found, before, strict=True)) if not _same(*pair)]
        if smaller and (other or (step.draws is None and step.drew())):
            raise Retry("memory")  # these draws, or these statistics, are not those of pass 1
        if other:
            paths = [path for path, _ in pytree.tensors(self._first.outputs, "outputs")]
            raise _not_reproducible(paths[place + other[0]])


def pull(
    step: Step,
    micro: MicroBatch,
    gradients: list[Tensor | None],
    begin: int,
    *,
    lap: Lap = None,
    place: int = 0,
    check: Callable[[list[Tensor], int], None] = lambda _out, _place: None,
    early: bool = False,
) -> int:
    """Run a micro-batch of the second pass, part by part; return how many outputs had a gradient.

    Args:
        step: the step.
        micro: its rows.
        gradients: of all outputs of all samples.
        begin: the first row.
        lap: the part to run. Default None: all parts.
        place: of its first output among all. Default 0.
        check: gets the outputs of a part, and the place of the first, before its backward.
        early: the last part is done already. Default False.
    """
    parts, trained = Parts(step, micro.inputs, lap), 0
    for at in range(len(parts) - early):
        tensors = pytree.flat(parts.forward(micro, at))
        check(tensors, place)
        with step.buffers.unmoved():
            trained += step.pull(*shares(step, tensors, gradients, begin, place), ends=False)
        place += len(tensors)
        del tensors
    if trained:
        step.collect()
    return trained


def shares(
    step: Step,
    tensors: list[Tensor],
    gradients: list[Tensor | None],
    begin: int,
    place: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output tensors that the loss depends on, and their rows of its gradient.

    An output without samples is the same for all micro-batches: the first one hands it back. Others
    that wait for each other hand zeros back, for it may be a value in whose backward all meet.
    """
    roots, shares = [], []
    here = slice(place, place + len(tensors))
    for tensor, gradient, axis in zip(
        tensors, gradients[here], step.traits.axes[here], strict=True
    ):
        later = axis is None and begin > 0
        if gradient is None or (later and not step.lanes):
            continue
        size = 0 if axis is None else tensor.shape[axis]
        own = gradient if axis is None else gradient.narrow(axis, begin, size)
        roots.append(tensor)
        shares.append(torch.zeros_like(own) if later else own)
    return roots, shares


def _same(now: Tensor, before: Tensor) -> bool:
    """Compare the outputs of both passes up to rounding; other draws differ by far more."""
    if now.shape != before.shape:
        return False
    now = now.detach()
    if equal(now, before):
        return True
    if not now.is_floating_point():
        return False
    gap, size = difference(before, now)
    return gap <= torch.finfo(now.dtype).eps ** 0.5 * size and _same_limits(now, before)


def _same_limits(now: Tensor, before: Tensor) -> bool:
    """Say whether two tensors hold infinities and NaN in the same places."""
    other = torch.zeros((), dtype=torch.bool, device=now.device)
    for place in places(now.shape):
        a, b = now[place], before[place]
        finite, nan = a.isfinite() & b.isfinite(), a.isnan() & b.isnan()
        other = other | ~(finite | nan | (a == b)).all()
    return not bool(other)


def _not_reproducible(path: str) -> NotReproducibleError:
    return NotReproducibleError(
        f"both passes must give the same outputs, and {path} differs: the model draws from a "
        "generator of its own, or changes from call to call. Use the global generators, or "
        "declare the loss by Loss.per_sample or Loss.ratio, which needs one pass"
    )


# The loss of all outputs at once, and the gradient of each of them.
#
# Both ways to gather the outputs of a batch (two passes, or lockstep) end here. Any loss is called
# on copies of all of them, on every rank. A contrastive loss computes only the rows of this rank:
# no rank computes a gradient for another one.


class LossGradients(NamedTuple):
    """Loss of all outputs at once, with the gradients of these outputs.

    Attributes:
        loss: of the full batch, detached.
        gradients: of each output tensor, in order, or None.
        begin: the first row of this rank among those of `gradients`.
    """

    loss: Tensor
    gradients: list[Tensor | None]
    begin: int


def value_of_all(step: Step, rows: Rows) -> Tensor:
    """Return the loss of the full batch without a gradient; a rank without samples joins in."""
    if isinstance(step.loss, Contrastive):
        return _of_rows(step, step.loss, rows, _here(step, rows)).detach()
    return step.full_loss(rows.outputs, _full_targets(rows)).detach()


def loss_of_all(step: Step, rows: Rows) -> LossGradients:
    """Return the loss of the full batch, and the gradients of the outputs.

    Args:
        step: the step.
        rows: outputs and targets of all ranks. Parameters of the loss itself get their gradient on
            the rank that leads.
    """
    own = isinstance(step.loss, Contrastive)
    outputs = _here(step, rows) if own else rows.outputs
    leaves = [tensor.detach() for _, tensor in pytree.tensors(outputs)]
    for leaf in leaves:
        if leaf.is_floating_point() or leaf.is_complex():
            leaf.requires_grad_()
    step.own.update(map(id, leaves))
    moment, remaining = modules.now(), iter(leaves)
    if isinstance(step.loss, Contrastive):
        loss = _of_rows(
            step, step.loss, rows, pytree.map_tensors(lambda _: next(remaining), outputs)
        )
    else:  # the loss gets copies, for it may write to them; nobody else keeps them
        loss = _of_copies(
            step,
            pytree.map_tensors(lambda _: next(remaining).clone(), outputs),
            _full_targets(rows),
        )
    if modules.reaches_before(loss, moment):
        trained = [path for path, t in pytree.tensors(rows.targets, "targets") if t.requires_grad]
        if trained:
            raise LossError(
                "targets of a loss in which samples meet must not be trained, because they are "
                f"joined over all micro-batches, and {trained[0]} requires a gradient: give it to "
                "the model as an input and return it among the outputs, or detach() it"
            )
        raise LossError(
            "a loss must compute from its outputs and targets, and it uses a tensor that forward "
            "stored elsewhere, which belongs to one micro-batch only (an attribute of a module, a "
            "variable of a hook): return it from the model, as one value a sample"
        )
    into = None if rows.leads or own else [leaf for leaf in leaves if leaf.requires_grad]
    check_trains(step.pull([loss], step.scaled([torch.ones_like(loss)]), into))
    if step.traits.mixed and len(leaves) == len(step.traits.axes):
        paths = [path for path, _ in pytree.tensors(outputs, "outputs")]
        refuse_trained(paths, [leaf.grad is not None for leaf in leaves], step.traits.mixed)
    return LossGradients(loss.detach(), [leaf.grad for leaf in leaves], 0 if own else rows.begin)


def _of_copies(step: Step, outputs: Any, micro: MicroBatch) -> Tensor:
    """Return the loss of copies of the outputs, without the graphs that made them."""
    try:
        return step.full_loss(outputs, micro)
    except RuntimeError as error:
        if modules.UNUSED not in str(error):
            raise
        raise LossError(
            "a loss in which samples meet must not differentiate what the model returns, because "
            "it gets outputs of all micro-batches without their graphs, and torch.autograd.grad "
            "found none: differentiate in forward, inside `with torch.enable_grad():`, and return "
            "the derivative; or declare anybatch.Loss.per_sample where the loss is a mean over "
            "samples, and let forward return the tensor it is differentiated by, too"
        ) from error


def _full_targets(rows: Rows) -> MicroBatch:
    return MicroBatch(None, rows.targets, rows.size)


def _here(step: Step, rows: Rows) -> Any:
    """Return the outputs for the samples of this rank."""
    if not step.global_batch.several:
        return rows.outputs
    return step.rows(rows.outputs, rows.begin, rows.here, rows.size)


def _of_rows(step: Step, loss: Contrastive, rows: Rows, own: Any) -> Tensor:
    """Return a contrastive loss that is differentiable in `own`, the rows of this rank."""
    global_batch = step.global_batch
    if not global_batch.several:
        return loss.full_batch(own, _full_targets(rows))

    def gather(part: Tensor) -> Tensor:
        return global_batch.gather("the contrastive loss", part.contiguous())[0]

    return loss.of_rows(own, rows.outputs, rows.begin, _full_targets(rows), gather)
