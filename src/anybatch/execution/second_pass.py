"""The second of two passes: each micro-batch gets its rows of the gradient of the loss.

The graph of the last one still exists when the loss has been computed, and its backward runs first.
All others run forward once more, as in the first pass, and their outputs are compared.

Source: the chain rule; Gao et al. 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, islice

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import MicroBatch, count_micro_batches
from anybatch.core.pieces import difference, equal, places
from anybatch.core.rng import RNGState
from anybatch.errors import NotReproducibleError
from anybatch.execution.first_pass import FirstPass, LapRun
from anybatch.execution.loss_gradients import LossGradients
from anybatch.execution.parts import Lap, Parts, feed
from anybatch.execution.retry import StartOverError, attempt, in_pieces
from anybatch.execution.step import Step


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
        self._first_outputs = list(zip(tree.flat(first.outputs), step.layout or (), strict=True))
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
        graph = tree.flat(first.graph.pop())
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
            raise StartOverError  # these draws, or these statistics, are not those of pass 1
        if other:
            paths = [path for path, _ in tree.tensors(self._first.outputs, "outputs")]
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
        tensors = tree.flat(parts.forward(micro, at))
        check(tensors, place)
        with step.buffers.unmoved():
            trained += step.flow(*shares(step, tensors, gradients, begin, place))
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

    Args:
        step: the step.
        tensors: the outputs of a micro-batch, or a part of them.
        gradients: of all outputs of all samples.
        begin: the first row.
        place: of the first of them among all. Default 0.
    """
    roots, shares = [], []
    here = slice(place, place + len(tensors))
    for tensor, gradient, axis in zip(
        tensors, gradients[here], (step.layout or ())[here], strict=True
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
