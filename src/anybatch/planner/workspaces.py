"""Workspace of convolutions in a plan: a bound before kernels are chosen, then the actual bytes.

Until a size has been chosen a step may use all the granted workspace. Its kernels are recorded on
fakes, and chosen before it runs, so its seconds are the final ones; and the plan counts the actual
allocations of its kernels.

    all workspace counted ──> sizes that fit ──> kernels of one chosen ──> counted ──> its step

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
from anybatch.core.plan import TRIED, Plan
from anybatch.core.units import show_bytes, show_seconds
from anybatch.errors import BudgetError
from anybatch.execution.signature import RunPlan, Signature
from anybatch.planner.forecast import WORKSPACE, Forecast, total
from anybatch.planner.memory_model import ranked


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

    def counted(self, foreseen: Forecast, signature: Signature) -> Forecast:
        """Return the forecast plus the bytes that it does not contain."""
        return foreseen.completed(signature, self.most(foreseen))

    def within(self, budget: int, decide: Callable[[], RunPlan]) -> RunPlan:
        """Decide, with a smaller workspace where nothing fits next to the requested one.

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
        own.limit(min(own.most, max(0, budget - needed) // 2))
        if own.most:
            with suppress(BudgetError):
                return decide()
            own.limit(0)
        return decide()

    def settle(self, found: RunPlan, foreseen: Forecast | None, signature: Signature) -> RunPlan:
        """Choose how all convolutions of a step are computed, and count their actual workspace.

        In lockstep, with offloading or a workspace for a network, all of it is counted.
        """
        chooser = self.chooser
        if chooser is None:
            return found
        chooser.forget()  # what only planning has run
        if foreseen is None or chooser.found.shared:
            return found
        every = [foreseen.convolutions(n) for n in sizes_of(signature.size, found.micro_batch)]
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
        after = foreseen.completed(signature, used).owners(found.micro_batch, signature.size)
        if total(after) > predicted:  # now it is the update that holds most
            owners, predicted = after, total(after)
        memory = found.memory
        candidates = tuple(  # the others count all that they may use: theirs was not recorded
            replace(one, peak_bytes=min(one.peak_bytes, predicted))
            if (one.micro_batch, one.offloaded) == (found.micro_batch, False)
            else one
            for one in memory.candidates
        )
        floor = None if memory.floor is None else min(memory.floor, predicted)
        memory = replace(
            memory, predicted=predicted, owners=ranked(owners), candidates=candidates, floor=floor
        )
        return replace(found, memory=memory)


# How a budget is shared between micro-batches and the workspace of their convolutions.
#
# Bytes of workspace buy faster algorithms and cost samples: a smaller micro-batch may be worth it,
# or not. Neither side shows which, so full plans are made for a few shares of the budget, a step of
# each is run, and the fastest is chosen.
#
#     budget  │ floor │ half of the rest │ micro-batches │ ──> plan ──> seconds
#             │ floor │ an eighth │ micro-batches        │ ──> plan ──> seconds     the fewest
#             │ floor │ micro-batches                    │ ──> plan ──> seconds
#
# Source: Zou et al. (the guide), section 3.1, "permit X_mini reduction", and Equation 6, where the
# workspace of a layer is free again when it has ended, so that their maximum counts and not their
# sum.

SHARES = (2, 8, 32)
"""Divisors of the budget above the floor, for the share of workspace."""

LEAST = 1 << 20
"""Bytes of workspace below which no share is tried."""

SHARED_GAIN = 0.98
"""Of the seconds without workspace, from which on a share is worth it: steps scatter."""


def shared(foresee: Callable[[int | None], Plan], seconds: Callable[[Plan], float]) -> Plan:
    """Return the plan with the fewest seconds per step, of a few shares of the budget.

    Args:
        foresee: workspace in bytes, or None -> the plan with it.
        seconds: runs a step of a plan, and returns its seconds.

    Raises:
        BudgetError: not even without workspace a micro-batch of one sample fits.
    """
    plain = foresee(None)
    if plain.memory is None or plain.memory.floor is None:
        return plain
    available = plain.memory.budget - plain.memory.floor
    tried: dict[int, Plan] = {}
    for share in SHARES:
        workspace = available // share
        if workspace < LEAST:
            break
        try:
            found = foresee(workspace)
        except BudgetError:  # what is left is too little for one sample
            continue
        if found.convolutions is None or not found.convolutions.other:
            break  # with less there is no more to gain
        tried[workspace] = found
    if not tried:
        return plain
    measured = {workspace: seconds(plan) for workspace, plan in tried.items()}
    without = seconds(plain)
    best = min(measured, key=lambda workspace: (measured[workspace], workspace))
    chosen = tried[best] if measured[best] < SHARED_GAIN * without else plain
    return replace(chosen, reasons=(*chosen.reasons, _reason(without, measured)))


def _reason(without: float, measured: dict[int, float]) -> str:
    rows = [f"{show_seconds(without)} without workspace"]
    rows += [f"{show_seconds(found)} within {show_bytes(one)}" for one, found in measured.items()]
    return f"{TRIED}, and a step takes {', '.join(rows)}"
