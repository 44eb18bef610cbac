"""HTML cards of a plan, an engine and a step for notebooks, without external resources.

    ┌ title ────────────────────────────────────┐
    │ ▇▇▇▇▇▇▒▒▒▒▒░░░░         │ 5.1 MiB of 6 MiB│   bytes by owner, against the budget
    │ name          value                       │
    │ ▸ why                                     │   opens on a click
    └───────────────────────────────────────────┘

Inline styles only, in the colours of the page around it, so it is the same in every notebook, light
or dark, trusted or not: there is no script, no style sheet and nothing to fetch. Every text is
escaped, since names of models and losses are the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from anybatch.core.memory import Memory, verdicts
from anybatch.core.units import show_bytes

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Of owners, the largest first; a colour-blind person can tell them apart (Okabe and Ito)."""

OVER = "#a00000"
"""Of the budget's mark."""

CELL = "padding:1px 10px 1px 0;text-align:left;vertical-align:top"
PLAIN = "border:0;color:inherit;font-size:inherit"
NAME = f"{CELL};font-weight:normal;white-space:nowrap;opacity:.75"
NUMBER = "padding:1px 10px 1px 0;text-align:right;font-variant-numeric:tabular-nums"


def card(title: str, *parts: str) -> str:
    """Return a card: a title, and parts that are HTML already."""
    box = (
        "border:1px solid rgba(128,128,128,.5);border-radius:6px;padding:8px 12px;"
        "max-width:46em;font-size:90%;line-height:1.4"
    )
    return f'<div style="{box}"><b>{escape(title)}</b>{"".join(parts)}</div>'


def table(named: Mapping[str, str]) -> str:
    """Return a table of names and values."""
    lines = "".join(
        f'<tr><th style="{NAME}" scope="row">{escape(name)}</th>'
        f'<td style="{CELL}">{escape(value)}</td></tr>'
        for name, value in named.items()
    )
    return f'<table style="{PLAIN};margin:6px 0">{lines}</table>'


def bar(owners: Sequence[tuple[str, int]], budget: int) -> str:
    """Return a bar of bytes by owner against a budget, with a legend of its colours.

    Args:
        owners: ``(name, bytes)``, drawn from the left.
        budget: bytes; the mark on the bar.
    """
    held = sum(count for _, count in owners)
    full = max(held, budget, 1)
    colors = [COLORS[min(i, len(COLORS) - 1)] for i in range(len(owners))]
    pieces = "".join(
        f'<span title="{escape(name)}: {show_bytes(count)}" style="display:inline-block;'
        f'height:100%;width:{100 * count / full:.2f}%;background:{color}"></span>'
        for (name, count), color in zip(owners, colors, strict=True)
    )
    mark = (
        f'<span title="budget: {show_bytes(budget)}" style="position:absolute;top:-2px;bottom:-2px;'
        f'left:{100 * budget / full:.2f}%;border-left:2px solid {OVER}"></span>'
    )
    what = f"{show_bytes(held)} of {show_bytes(budget)}"
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:1em"><span style="color:{color}">&#9632;'
        f"</span> {escape(name)} {show_bytes(count)}</span> "
        for (name, count), color in zip(owners, colors, strict=True)
    )
    return (
        f'<div role="img" aria-label="memory: {what}" style="position:relative;height:14px;'
        f"margin:8px 2px 4px 0;background:rgba(128,128,128,.2);white-space:nowrap;font-size:0;"
        f'line-height:0">{pieces}{mark}</div>'
        f'<div style="font-size:90%"><b>{what}</b> &nbsp;{legend}</div>'
    )


def memory_bar(memory: Memory) -> str:
    """Return the predicted peak by owner, against the budget."""
    return bar(memory.owners or (("predicted", memory.predicted),), memory.budget)


def considered(memory: Memory, chosen: int, *, offloaded: bool) -> str:
    """Return the table of the micro-batches that were considered, and why each won or lost.

    Args:
        memory: the memory of a plan.
        chosen: samples in a micro-batch, as was chosen.
        offloaded: its saved tensors are offloaded.
    """
    if not memory.candidates:
        return ""
    head = "".join(
        f'<th style="{NUMBER if i < 3 else CELL};opacity:.75" scope="col">{name}</th>'
        for i, name in enumerate(("micro-batch", "memory", "seconds a step", ""))
    )
    both = len({one.offloaded for one in memory.candidates}) > 1
    lines = []
    for one, why in verdicts(memory, chosen, offloaded=offloaded):
        seconds = "-" if one.seconds is None else f"{one.seconds:.3g}"
        where = "saved tensors offloaded; " if both and one.offloaded else ""
        weight = ";font-weight:bold" if why.startswith("chosen") else ""
        cells = [str(one.micro_batch), show_bytes(one.peak_bytes), seconds]
        numbers = "".join(f'<td style="{NUMBER}{weight}">{cell}</td>' for cell in cells)
        lines.append(f'<tr>{numbers}<td style="{CELL}{weight}">{escape(where + why)}</td></tr>')
    inside = f'<table style="{PLAIN}"><tr>{head}</tr>{"".join(lines)}</table>'
    return folded("micro-batches that were considered", inside)


def folded(title: str, inside: str) -> str:
    """Return HTML that opens on a click, or on Enter."""
    summary = f'<summary style="cursor:pointer">{escape(title)}</summary>'
    return f'<details style="margin:4px 0">{summary}{inside}</details>'


def because(reasons: Iterable[str]) -> str:
    """Return the reasons, a line each."""
    lines = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<ul style="margin:4px 0;padding-left:1.4em">{lines}</ul>' if lines else ""
