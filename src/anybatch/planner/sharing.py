"""How a budget is shared between micro-batches and the workspace of their convolutions.

Bytes of workspace buy faster algorithms and cost samples: a smaller micro-batch may be worth it, or
not. Neither side shows which, so full plans are made for a few shares of the budget, a step of each
is run, and the fastest is chosen.

    budget  │ floor │ half of the rest │ micro-batches │ ──> plan ──> seconds
            │ floor │ an eighth │ micro-batches        │ ──> plan ──> seconds     the fewest
            │ floor │ micro-batches                    │ ──> plan ──> seconds

Source: Zou et al. (the guide), section 3.1, "permit X_mini reduction", and Equation 6, where the
workspace of a layer is free again when it has ended, so that their maximum counts and not their
sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anybatch.core.plan import TRIED, Plan
from anybatch.core.units import show_bytes, show_seconds
from anybatch.errors import BudgetError

SHARES = (2, 8, 32)
"""Divisors of the budget above the floor, for the share of workspace."""

LEAST = 1 << 20
"""Bytes of workspace below which no share is tried."""

GAIN = 0.98
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
    if plain.memory is None:
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
    chosen = tried[best] if measured[best] < GAIN * without else plain
    return replace(chosen, reasons=(*chosen.reasons, _reason(without, measured)))


def _reason(without: float, measured: dict[int, float]) -> str:
    rows = [f"{show_seconds(without)} without workspace"]
    rows += [f"{show_seconds(found)} within {show_bytes(one)}" for one, found in measured.items()]
    return f"{TRIED}, and a step takes {', '.join(rows)}"
