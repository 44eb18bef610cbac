"""`anybatch.offload` around the same step, with budgets that are shares of the peak in memory."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anybatch
from benchmarks.outofcore.frontier.peers import Ways
from benchmarks.outofcore.offload.steps import Step, floor

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
LINES = {"offload, moving": False, "offload, moving or again": True}
"""A line of the figure, and whether cheap results may be computed again."""


def ours(step: Step, spill: Path | None = None) -> dict[str, Ways]:
    """Return our lines of the figure: name -> setting -> way.

    A budget below what the step holds with everything away is left out: it is refused.
    """
    in_memory, least = step.peak(nullcontext()), floor(step, spill)
    shares = [share for share in SHARES if share * in_memory >= least]
    return {
        line: {
            f"{share:g} of the peak": anybatch.offload(
                memory=int(share * in_memory), store=spill, device=step.device, recompute=again
            )
            for share in shares
        }
        for line, again in LINES.items()
    }


def reported(around: Any) -> dict[str, Any]:
    """Return what `anybatch.offload` says of its last step; nothing of other ways."""
    if not isinstance(around, anybatch.reports.Offload):
        return {}
    assert around.last is not None
    return {
        "budget": around.memory,
        "predicted": around.last.predicted_bytes,
        "kind": around.last.mode,
        "out": around.last.out_bytes,
        "remade": around.last.remade_bytes,
    }
