"""Workspace of convolutions in a plan: a bound before kernels are chosen, then the actual bytes.

Until a size has been chosen a step may use all the granted workspace. Its kernels are recorded on
fakes. They are chosen before it is timed, so its seconds are the final ones; and for the chosen
size the plan counts the actual allocations of its kernels.

    all workspace counted ──> sizes that fit ──> kernels of each chosen, timed ──> one ──> counted

The granted workspace is a ceiling. If it leaves too little for a step, kernels may use half of the
budget above that step without them, and if even that is too much, nothing.

Source: u-cuDNN, section III; the trade of a smaller micro-batch for a faster algorithm is the
guide's, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from anybatch.conv.chooser import Chooser
from anybatch.conv.convolutions import Engaged
from anybatch.conv.dispatch import sizes_of
from anybatch.conv.divide import Key
from anybatch.core.plan import OffloadPlan
from anybatch.core.plan_sections import Capacity, Memory
from anybatch.errors import BudgetError
from anybatch.execution.signature import RunPlan
from anybatch.planner.forecast import WORKSPACE, Forecast, total
from anybatch.planner.offload_choice import StepTimer


class Workspaces:
    """Convolutions and their workspace in a planner.

    Attributes:
        engaged: the session that computes them; None (default) where there is none yet.
        kernels: those of all steps that were planned, as far as they were recorded.
    """

    def __init__(self) -> None:
        self.engaged: Engaged | None = None
        self.kernels: set[Key] = set()

    @property
    def chooser(self) -> Chooser | None:
        """The chooser of kernels now in use; None where convolutions are torch's."""
        return None if self.engaged is None else self.engaged.chooser

    def most(self, foreseen: Forecast) -> int:
        """Return the most bytes that any convolution of a step may take; 0 where there is none."""
        chooser = self.chooser
        if chooser is None or not chooser.most:
            return 0
        recorded = foreseen.convolutions(1)
        return 0 if recorded is not None and not recorded.keys else chooser.most

    def within(self, budget: Callable[[], int], decide: Callable[[], RunPlan]) -> RunPlan:
        """Decide, with a smaller workspace where nothing fits next to the requested one.

        Args:
            budget: returns the bytes that a step may hold, when decided.
            decide: returns how a step is run.

        Raises:
            BudgetError: nothing fits without any workspace either.
        """
        try:
            return decide()
        except BudgetError as error:
            own = None if self.engaged is None else self.engaged.yields
            if own is None or not own.most:
                raise
            needed = error.needed - own.most
        own.limit(min(own.most, max(0, budget() - needed) // 2))
        if own.most:
            with suppress(BudgetError):
                return decide()
            own.limit(0)
        return decide()

    def ready(self, foreseen: Forecast, n: int) -> None:
        """Choose how the convolutions of a micro-batch are computed, before it is timed."""
        chooser = self.chooser
        recorded = None if chooser is None else foreseen.convolutions(n)
        if chooser is not None and recorded is not None:
            chooser.choose(recorded.keys)

    def before(self, foreseen: Callable[[], Forecast | None], time_step: StepTimer) -> StepTimer:
        """Return a step timer that first chooses the convolutions of the step.

        Args:
            foreseen: returns the forecast when it is timed.
            time_step: times it.
        """

        def timed(n: int, waiting: Capacity, offload: OffloadPlan | None) -> float | None:
            forecast = foreseen()
            if forecast is not None:
                self.ready(forecast, n)
            return time_step(n, waiting, offload)

        return timed

    def settle(
        self,
        found: RunPlan,
        foreseen: Forecast | None,
        size: int,
        forecast_with: Callable[[int], Forecast],
    ) -> RunPlan:
        """Choose how all convolutions of a step are computed, and count their actual workspace.

        In lockstep, with offloading or a workspace for a network, all of it is counted.

        Args:
            found: how the step is run.
            foreseen: its forecast; None if there is none with its kernels.
            size: N_B, samples in the mini-batch.
            forecast_with: returns the forecast with so many bytes of workspace.
        """
        chooser = self.chooser
        if chooser is None:
            return found
        chooser.forget()  # what only planning has run
        if foreseen is None or chooser.found.shared:
            return found
        every = [foreseen.convolutions(n) for n in sizes_of(size, found.micro_batch)]
        keys = [key for recorded in every if recorded is not None for key in recorded.keys]
        chooser.choose(keys)
        self.kernels.update(keys)
        owners = dict(found.memory.owners)
        if not keys or WORKSPACE not in owners or found.lanes or found.offload is not None:
            return found
        used = chooser.used(keys)
        less = min(owners[WORKSPACE], chooser.most) - used
        predicted = found.memory.predicted - less
        owners[WORKSPACE] -= less
        after = forecast_with(used).owners(found.micro_batch, size)
        if total(after) > predicted:  # now it is the update that holds most
            owners, predicted = after, total(after)
        rows = tuple(sorted(owners.items(), key=lambda pair: -pair[1]))
        return replace(found, memory=_settled(found, predicted, rows))


def _settled(found: RunPlan, predicted: int, rows: tuple[tuple[str, int], ...]) -> Memory:
    """Return the memory of a plan, with the predicted bytes in the chosen candidate.

    The others count all the workspace that they may use: theirs was not recorded.
    """
    memory = found.memory
    candidates = tuple(
        replace(one, peak_bytes=min(one.peak_bytes, predicted))
        if (one.micro_batch, one.offloaded) == (found.micro_batch, False)
        else one
        for one in memory.candidates
    )
    return replace(
        memory,
        predicted=predicted,
        owners=rows,
        candidates=candidates,
        floor=min(memory.floor, predicted),
    )
