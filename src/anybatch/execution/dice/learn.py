"""The laws of the draws of a model, learnt from forwards of few rows.

No shape tells which of its dimensions are samples: a micro-batch of 8 with 8 features draws [8, 8].
So the model is called at several numbers of rows with the same dice, and the same draws are
compared: the dimension that has grown holds the samples. Where it holds several entries a sample,
one sample's are made NaN, and must show in that sample's outputs and in no other's. At last the
smaller batch is drawn as a part of the larger one, and its outputs must be those rows of it.

    8 rows   [8, 8, 5]    [16, 5]       dimension 0 of both grows, two entries a sample in one
    4 rows   [4, 8, 5]    [8, 5]        drawn as 4 of the 8, they give the outputs of these
    7 rows   [7, 8, 5]    [14, 5]       an odd number, where there is one

Draws that are known are made for the whole batch, so a path that is chosen by a coin is the one
that the step will take; after one that is not known the dice go on alike at every size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from anybatch.core import graph, tree
from anybatch.core.batch import MicroBatch, made_up
from anybatch.core.kept import Kept
from anybatch.core.memory_errors import out_of_memory
from anybatch.core.modules import call_model
from anybatch.core.rng import Dice
from anybatch.errors import AnybatchError, NotExactError
from anybatch.execution.dice.kernels import fault_of
from anybatch.execution.dice.law import Law, Rows, candidates, fitted
from anybatch.execution.dice.learning import Learning, Mark, Met
from anybatch.execution.dice.refuse import WAY_OUT
from anybatch.execution.dice.trial import Trial
from anybatch.execution.look import apart_rows, layout_of, quietly, rough_layout, turned, two_sizes
from anybatch.execution.step import NO_GRAPH, Layout, Step, copied

FEW = 8
"""Rows from which laws are learnt, or as few as there are; more where the model wants them."""


class Run(NamedTuple):
    """One forward: its draws, its outputs, and the RNG state after it."""

    met: list[Met]
    outputs: Any
    dice: Dice


def learn(step: Step) -> None:
    """Learn the laws of the draws that the step will make and that have none yet.

    Dice, buffers and attributes are left as they were.

    Args:
        step: a step that has not begun; its `draws` take in the laws.

    Raises:
        NotExactError: a draw cannot be made for the whole batch.
    """
    assert step.draws is not None
    dice = Dice.now()
    try:
        with attributes_of(step), quietly(), torch.no_grad():
            whole, part = two_sizes(step) if step.batch.size else _made_up(step)
            start, few = Dice.now(), _fewer(whole)
            pairs = ([few] if whole.size > FEW else []) + [(whole, part)]
            if not any(Lesson(step, start, *pair).run() for pair in pairs):
                raise NotExactError(
                    "draws of the whole batch are known from forwards of several sizes, and the "
                    f"model cannot be called with {part.size} rows: give larger micro-batches. "
                    f"{WAY_OUT}"
                )
    except BaseException:
        step.draws.shared.laws.asked.clear()  # nothing has been learnt
        raise
    finally:
        step.buffers.restart()
        step.forget_casts()
        dice.put_back()


@contextmanager
def attributes_of(step: Step) -> Iterator[None]:
    """Restore attributes that forward sets on modules in the body, as it is only an inspection."""
    kept = Kept()
    kept.modules(step.model.modules(), attributes=True)
    try:
        yield
    finally:
        kept.put_back()


def _fewer(whole: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """Return a few rows, and the last half of these in reverse."""
    few, half = tree.rows(whole.inputs, 0, FEW, whole.size), FEW // 2
    last = turned(tree.rows(few, FEW - half, FEW, FEW), half)
    return MicroBatch(few, None, FEW), MicroBatch(last, None, half)


def _made_up(step: Step) -> tuple[MicroBatch, MicroBatch]:
    """Return rows of a rank that has none, and the last half of these in reverse."""
    whole = made_up(step.batch, max(2, min(FEW, step.everyone.size)))
    half = whole.size // 2
    rows = tree.rows(whole.inputs, whole.size - half, whole.size, whole.size)
    return whole, MicroBatch(turned(rows, half), None, half)


class Lesson:
    """The forwards from which laws are learnt; `run` runs them.

    Args:
        step: the step.
        dice: with which the forward of the whole batch begins.
        whole: the first rows of the batch.
        part: the last of these, in reverse.
    """

    def __init__(self, step: Step, dice: Dice, whole: MicroBatch, part: MicroBatch) -> None:
        assert step.draws is not None
        self._step, self._shared = step, step.draws.shared
        self._whole, self._part = whole, part
        self._start = dice
        self._fitted: dict[int, Law] = {}

    def run(self) -> bool:
        """Call the model, and learn from its draws; return whether it could be called."""
        whole, part = self._whole, self._part
        first = self._call_of_fewer(whole)
        second = None if first is None else self._call_of_fewer(part)
        if first is None or second is None:
            return False
        runs = [(whole.size, first), (part.size, second), *self._odd()]
        self._fit(runs)
        layout = self._layout(first, second)
        self._settle(second if part.size > 1 else first, part if part.size > 1 else whole, layout)
        if not all(run.dice.others_as(first.dice) for _, run in runs):
            raise NotExactError(
                "forward must draw as often for any number of samples, and it draws from random "
                f"or numpy once a sample: draw with torch, for all of them. {WAY_OUT}"
            )
        self._compare(first, layout)
        for index, law in self._fitted.items():
            met = first.met[index]
            self._shared.laws.add(met.place, met.turn, law)
        self._shared.laws.steady = True
        return True

    def _odd(self) -> list[tuple[int, Run]]:
        """Return a forward of one row less, where the model can take that."""
        whole, n = self._whole, self._whole.size - 1
        if n in (0, self._part.size):
            return []
        run = self._call_of_fewer(MicroBatch(tree.rows(whole.inputs, 0, n, n + 1), None, n))
        return [] if run is None else [(n, run._replace(outputs=None))]

    def _compare(self, first: Run, layout: Layout) -> None:
        """Check that rows drawn as a part of more give the same outputs as among these."""
        n, m = self._whole.size, self._part.size
        again = self._call(self._part, Rows(n - m, m, n, turned=True))
        apart = apart_rows(first.outputs, again.outputs, layout, m)
        if apart is not None and not self._step.local:
            raise NotExactError(
                f"rows drawn as a part of a larger batch must give what they give in it, and "
                f"{apart}: forward draws from a generator of its own, or samples meet by what is "
                f"drawn (a permutation of them). {WAY_OUT}"
            )

    def _call(self, micro: MicroBatch, among: Rows | None = None, mark: Mark | None = None) -> Run:
        """Call the model from the RNG state of the start."""
        step, n = self._step, micro.size
        reverse = micro is self._part
        begin = self._whole.size - n if reverse else 0
        rows = self._shared.rows(begin, n, turned=reverse)
        mode = Learning(self._shared, rows, among or Rows(0, n, n), dict(self._fitted), mark)
        self._start.put_back()
        try:
            with mode:
                inputs = (copied(micro) if step.copies else micro).inputs
                outputs = step.loss.run(partial(call_model, step.model, inputs), inputs)
            return Run(mode.met, outputs, Dice.now())
        finally:
            step.buffers.restart()

    def _call_of_fewer(self, micro: MicroBatch, mark: Mark | None = None) -> Run | None:
        """Return None where the model cannot take these rows, or NaN."""
        outside = sys.exception()
        try:
            return self._call(micro, None, mark)
        except AnybatchError:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and graph.NONE in str(error):
                raise NotExactError(NO_GRAPH) from error
            taken = mark is not None or isinstance(error, RuntimeError | ValueError | IndexError)
            if not taken or out_of_memory(error, outside=outside):
                raise
            return None

    def _fit(self, runs: list[tuple[int, Run]]) -> None:
        """Find the laws of the draws; all runs must have made the same draws."""
        counts = [n for n, _ in runs]
        for same in zip_longest(*(run.met for _, run in runs)):
            there = [met for met in same if met is not None]
            if len(there) < len(runs) or len({_key(met) for met in there}) > 1:
                raise _refused(there[0], "how often forward draws depends on the samples")
        for index, same in enumerate(zip(*(run.met for _, run in runs), strict=True)):
            law = fitted([met.pattern for met in same], counts)
            if law is None:
                shapes = ", ".join(
                    f"{met.pattern.sizes} for {n}" for met, n in zip(same, counts, strict=True)
                )
                raise _refused(same[0], f"its shape does not grow with the samples: {shapes}")
            fault = fault_of(same[0].name, law, len(same[0].pattern.sizes))
            if fault is not None:
                raise _refused(same[0], fault)
            self._fitted[index] = law

    def _layout(self, first: Run, second: Run) -> Layout:
        step = self._step
        if step.layout:
            return step.layout
        n, m = self._whole.size, self._part.size
        if step.loss.takes_outputs:
            return layout_of(first.outputs, second.outputs, n, m)
        return rough_layout(first.outputs, second.outputs, n, m)

    def _settle(self, base: Run, micro: MicroBatch, layout: Layout) -> None:
        """Find how the entries of a sample lie, where a draw has several along its dimension."""

        def call(mark: Mark) -> Any:
            run = self._call_of_fewer(micro, mark)
            return None if run is None else run.outputs

        for index, law in self._fitted.items():
            met, n = base.met[index], micro.size
            if law.dim is None or met.pattern.sizes[law.dim] == n:
                continue
            trial = Trial(index, call, base.outputs, layout, n)
            choices = candidates(law, met.pattern.sizes[law.dim], n)
            found = next((one for one in choices if trial.holds(one)), None)
            if found is None:
                raise _refused(met, "no sample's outputs show which of its entries are theirs")
            self._fitted[index] = found


def _key(met: Met) -> tuple[Any, ...]:
    return met.place.chain, met.turn, met.func


def _refused(met: Met, why: str) -> NotExactError:
    return NotExactError(
        f"random draws must be those of the whole batch, and {met.name} at {met.place.words} "
        f"cannot be: {why}. {WAY_OUT}"
    )
