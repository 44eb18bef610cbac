"""The first of two passes: the outputs of the full batch, without graphs except the last one.

Encoders that do not meet are run in laps, one encoder over all micro-batches before the next one:
its weights in the processor's cache serve all of them.

    at once:  a b │ a b │ a b          laps:  a │ a │ a   b │ b │ b

Source: Gao et al. 2021, section 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.distributed.local_batch import Rows
from anybatch.execution.parts import Lap, Parts, feed, joined, laps
from anybatch.execution.repeatable import OutputsChangedError
from anybatch.execution.retry import in_pieces
from anybatch.execution.step import Step


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
    """

    def __init__(self, step: Step, *, all_parts: bool = False) -> None:
        self.outputs: Any = []
        self.targets: Any = []
        self.runs: list[LapRun] = []
        self.prints: list[int | None] = []
        self.parts = 1
        self.graph: list[Any] = []
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
            run = LapRun(lap, sum(len(tree.flat(one)) for one in of_laps))
            self.runs.append(run)
            found = self._run(run)
            if not found:  # a rank without samples
                return
            place = run.place
            dims = list(self._step.layout or ())[place : place + len(tree.flat(found[0]))]
            of_laps.append(tree.join(found, dims, sizes=run.flat))
            del found
        self.outputs = joined(of_laps)
        first = self.runs[0].flat
        self.targets = tree.join(self.targets, sizes=first, name="targets")

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
            self.targets = tree.rows(rows.targets, rows.begin, rows.begin + size, rows.size)

    def _check(self, run: LapRun, out: Any) -> None:
        """Raise `OutputsChangedError` where the number of outputs is not the inspected one."""
        layout, there = self._step.layout, run.place + len(tree.flat(out))
        last = run.lap == self._laps[-1]
        if layout and (there != len(layout) if last else there >= len(layout)):
            raise OutputsChangedError

    def _forward(self, run: LapRun, found: list[Any], micro: MicroBatch) -> None:
        step = self._step
        last = run.lap == self._laps[-1] and micro.begin + micro.size == step.batch.size
        ends = (
            last and step.offloader is None
        )  # else its graph would wait on the device for the loss
        parts = Parts(step, micro.inputs, run.lap)
        outputs = parts.outputs(micro, graph=step.gradients is not None and ends)
        out = joined(outputs)
        if not found:
            self._check(run, out)
        if ends:
            self.graph.append(outputs[-1])
        self.parts = len(parts)
        found.append(tree.map_tensors(Tensor.detach, out))
        if run is self.runs[0]:
            self.targets.append(micro.targets)
        run.sizes[-1].append(micro.size)
