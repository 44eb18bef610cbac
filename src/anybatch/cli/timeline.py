"""`anybatch plan --timeline`: the planned step in letters, each owner in its colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from anybatch.units import show_bytes

if TYPE_CHECKING:
    from anybatch.reports import StepTimeline

NONE = "There is no timeline: nothing was foreseen for this plan."

SCALE = 12
"""Letters before a chart, of its scale."""

COLORS = {
    "weights, inputs, gradients": "#5c5c5c",
    "parameters": "#5c5c5c",
    "buffers": "#9b9b9b",
    "optimizer": "#0072b2",
    "gradients": "#56b4e9",
    "inputs": "#009e73",
    "activations": "#e69f00",
    "saved": "#e69f00",
    "kernels, new gradients": "#f0e442",
    "on its way out": "#d55e00",
    "copied, not given up": "#f2c3a5",
    "on its way back": "#cc79a7",
    "waiting, at most": "#f7d9a0",
}
"""Owner -> colour of Okabe and Ito, in the order in which they are stacked, from below."""


def stacked(step: StepTimeline) -> list[str]:
    """Return the owners that ever hold bytes, in the order in which they are stacked."""
    order = {name: place for place, name in enumerate(COLORS)}
    held = step.ledger.live.max(0, initial=0)
    there = [name for name, most in zip(step.ledger.owners, held, strict=True) if most]
    return sorted(there, key=lambda name: order.get(name, order["inputs"]))


def color_of(owner: str) -> str:
    """Return the colour of an owner; "" for those that have none of their own."""
    return COLORS.get(owner, "")


def colored(step: StepTimeline, width: int = 84) -> Text:
    """Return a chart of a step in so many letters, each owner in its colour, with a legend."""
    shown = Text()
    for line in step.chart(max(8, min(width, 84) - SCALE)):
        for text, owner in line:
            shown.append(text, "bold" if owner == "budget" else color_of(owner))
        shown.append("\n")
    shown.append("at the peak")
    for owner, size in sorted(step.ledger.at_peak().items(), key=lambda pair: -pair[1]):
        shown.append("  ").append("█", color_of(owner)).append(f" {owner} {show_bytes(size)}")
    return shown
