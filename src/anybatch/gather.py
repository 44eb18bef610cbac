"""A loss that couples the samples, computed once on the outputs of the whole batch.

Dice, InfoNCE, or any function that is not known to be a sum over samples needs all outputs at once;
outputs are small, what the model saves for backward is not. So the outputs come first, without
graphs; the loss is taken on all of them; and a second pass hands each micro-batch its rows of the
gradient of the loss. It is exact for every loss, and costs one more forward of all micro-batches
but the last, whose graph is still there when the loss has been taken.

    pass 1:  forward mu_0, mu_1, mu_2           outputs kept; a graph of mu_2 only
             loss(all outputs), backward        d loss / d outputs;  backward of mu_2
    pass 2:  forward mu_0, backward(its rows);  mu_1                 the same samples and dice

Encoders that do not meet before the loss are run in parts (`anybatch.parts`): the graph of the last
micro-batch is that of its last part, and pass 2 runs the others.

Source: the chain rule; as gradient caching, Gao et al. 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from anybatch import tree
from anybatch.batch import MicroBatch, TensorBatch, count_micro_batches
from anybatch.errors import NotReproducibleError
from anybatch.parts import Parts
from anybatch.ranks.everyone import Rows
from anybatch.retry import StartOverError, attempt, in_pieces
from anybatch.rng import Dice
from anybatch.step import Step, check_trains
from anybatch.taken import Taken, loss_of_all, value_of_all

COUPLED = "coupled"
"""What such a loss is called in a plan."""


def gather(step: Step) -> Tensor:
    """Run the step in two passes; in one, where there are no gradients to take.

    Args:
        step: the mini-batch and the model; see `anybatch.step`.

    Returns:
        The loss of the whole batch, a detached 0-dim tensor.

    Raises:
        NotReproducibleError: the second pass met other samples or other outputs.
        LossError: the loss uses tensors that it was not given.
    """
    step.found = COUPLED
    start = Dice.now()
    first = FirstPass(step)
    first.run()
    rows = step.everyone.rows(first.outputs, first.targets, step.layout or (), step.batch.size)
    first.leave_to(rows)
    step.agree()  # a rank without samples has drawn nothing, and takes the same loss
    if step.gradients is None or not step.batch.size:
        loss = value_of_all(step, rows)
    else:
        taken = loss_of_all(step, rows)
        loss, end, statistics = taken.loss, Dice.now(), step.buffers.statistics()
        backwards = Backwards(step, first, taken, end)
        del taken
        backwards.last()
        step.buffers.restart()
        if backwards.stop:
            step.put_back(start)
            backwards.second_pass()
        step.buffers.leave()  # the last forward may have been in pass 1, or of some parts only
        check_trains(backwards.trained)
        if step.draws is None:
            step.put_back(end)
        step.buffers.settle(statistics)
    _show_all(step, first)
    step.finish()
    return loss


class FirstPass:
    """The forwards of all micro-batches, without graphs but for the last; `run` runs them.

    Attributes:
        outputs: of the whole batch, without graph.
        targets: of the whole batch.
        sizes: for each micro-batch that was loaded, the sizes it was computed in.
        prints: a fingerprint of each micro-batch of samples that are loaded again.
        parts: into how many parts a forward falls.
        graph: the outputs of the last part of the last micro-batch with their graph, until its
            backward takes them.
    """

    def __init__(self, step: Step) -> None:
        self.outputs: Any = []
        self.targets: Any = []
        self.sizes: list[list[int]] = []
        self.prints: list[int | None] = []
        self.parts = 1
        self.graph: list[Any] = []
        self._step = step
        self._done = 0

    @property
    def flat(self) -> list[int]:
        """The sizes that were computed at once, in order."""
        return [size for loaded in self.sizes for size in loaded]

    def run(self) -> None:
        """Run them, and join what they give."""
        step = self._step
        lazy = not isinstance(step.batch, TensorBatch)
        for loaded in step.feed():
            self.prints.append(loaded.fingerprint() if lazy else None)
            self.sizes.append([])
            in_pieces(step, loaded, self._forward)
        sizes = self.flat
        if not sizes:  # a rank without samples
            return
        self.outputs = tree.join(self.outputs, list(step.layout or ()), sizes=sizes)
        self.targets = tree.join(self.targets, sizes=sizes, name="targets")

    def leave_to(self, rows: Rows) -> None:
        """Hold this rank's part of what is there of all ranks, and no more."""
        step, size = self._step, self._step.batch.size
        if step.everyone.several and size:
            self.outputs = step.rows(rows.outputs, rows.begin, size, rows.size)
            self.targets = tree.rows(rows.targets, rows.begin, rows.begin + size, rows.size)

    def _forward(self, micro: MicroBatch) -> None:
        step = self._step
        last = self._done + micro.size == step.batch.size
        ends = last and step.away is None  # else its graph would wait on the device for the loss
        parts = Parts(step, micro.inputs)
        found = parts.outputs(micro, graph=step.gradients is not None and ends)
        out = parts.joined(found)
        if not self.outputs:
            step.check_structure(out)
        if ends:
            self.graph.append(found[-1])
        self.parts = len(parts)
        self.outputs.append(tree.map_tensors(Tensor.detach, out))
        self.targets.append(micro.targets)
        self.sizes[-1].append(micro.size)
        self._done += micro.size


class Backwards:
    """Hands each micro-batch its rows of the gradient: of the last graph first, then pass 2.

    Attributes:
        trained: how many outputs had a gradient to take.
        stop: the row where pass 2 ends.
    """

    def __init__(
        self,
        step: Step,
        first: FirstPass,
        taken: Taken,
        dice: Dice,
    ) -> None:
        self.trained = 0
        self.stop = self._whole = step.batch.size
        self._dice = dice
        self._step, self._first, self._gradients = step, first, taken.gradients
        self._before = taken.begin  # rows of ranks before this one
        self._sizes = dict(zip(accumulate(first.flat, initial=0), first.flat, strict=False))
        self._kept = list(zip(tree.flat(first.outputs), step.layout or (), strict=True))
        self._begin = 0

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
        self._whole = step.batch.size - first.flat[-1]
        self.stop = step.batch.size if first.parts > 1 else self._whole

    def second_pass(self) -> None:
        """Run the micro-batches up to row `stop` again."""
        step, first = self._step, self._first
        loaded = islice(step.feed(), count_micro_batches(self.stop, step.micro_batch))
        for micro, sizes, fingerprint in zip(loaded, first.sizes, first.prints, strict=False):
            if fingerprint is not None and micro.fingerprint() != fingerprint:
                raise NotReproducibleError(
                    "both passes over a lazy batch must load the same samples, and the second "
                    "loaded others: draw augmentations from torch's, numpy's or random's global "
                    "generator, or declare the loss by Loss.per_sample or Loss.ratio, which needs "
                    "one pass"
                )
            whole = self._begin + micro.size <= self.stop
            in_pieces(step, micro, step.under(self._again), sizes if whole else sizes[:-1])

    def _pull_last(self) -> None:
        first, step = self._first, self._step
        begin = self._before + step.batch.size - first.flat[-1]
        graph = tree.flat(first.graph.pop())
        place = len(self._gradients) - len(graph)
        self.trained += step.pull(*shares(step, graph, self._gradients, begin, place))

    def _again(self, micro: MicroBatch) -> None:
        step, begin = self._step, self._begin

        def check(found: list[Tensor], place: int) -> None:
            self._compare(found, place, micro)
            if step.draws is not None:  # a backward of the whole batch comes after its loss
                step.put_back(self._dice)

        early = begin >= self._whole
        self.trained += pull(
            step, micro, self._gradients, self._before + begin, check=check, early=early
        )
        self._begin += micro.size

    def _compare(self, found: list[Tensor], place: int, micro: MicroBatch) -> None:
        """Require that the outputs of a part are those of the first pass."""
        step, begin = self._step, self._begin
        before = [
            then if axis is None else then.narrow(axis, begin, micro.size)
            for then, axis in self._kept[place : place + len(found)]
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
    check: Callable[[list[Tensor], int], None] = lambda _out, _place: None,
    early: bool = False,
) -> int:
    """Run a micro-batch of the second pass, part by part; return how many outputs had a gradient.

    Args:
        step: the step.
        micro: its rows.
        gradients: of all outputs of all samples.
        begin: the first row.
        check: told the outputs of a part, and the place of the first, before its backward.
        early: the last part is done already. Default False.
    """
    parts, trained, place = Parts(step, micro.inputs), 0, 0
    for at in range(len(parts) - early):
        tensors = tree.flat(parts.forward(micro, at))
        check(tensors, place)
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

    An output without samples is the same for all micro-batches: the first one hands it back.

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
        if gradient is None or (axis is None and begin > 0):
            continue
        size = 0 if axis is None else tensor.shape[axis]
        roots.append(tensor)
        shares.append(gradient if axis is None else gradient.narrow(axis, begin, size))
    return roots, shares


def _show_all(step: Step, first: FirstPass) -> None:
    if step.observe is None:
        step.done += len(first.flat)
        return
    begin = 0
    for size in first.flat:
        targets = tree.rows(first.targets, begin, begin + size, step.batch.size)
        outputs = step.rows(first.outputs, begin, size, step.batch.size)
        step.show(outputs, MicroBatch(None, targets, size))
        begin += size


def _same(now: Tensor, before: Tensor) -> bool:
    """Compare the outputs of both passes up to rounding: other dice differ by far more."""
    if torch.equal(now, before):
        return True
    if not now.is_floating_point() or now.shape != before.shape:
        return False
    finite = before[before.isfinite()].abs()
    bound = torch.finfo(now.dtype).eps ** 0.5 * (float(finite.max()) if len(finite) else 0.0)
    return torch.allclose(now.detach(), before, rtol=0.0, atol=bound, equal_nan=True)


def _not_reproducible(path: str) -> NotReproducibleError:
    return NotReproducibleError(
        f"both passes must give the same outputs, and {path} differs: the model draws from a "
        "generator of its own, or changes from call to call. Use the global generators, or "
        "declare the loss by Loss.per_sample or Loss.ratio, which needs one pass"
    )
