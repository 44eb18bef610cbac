"""Numbers as a page writes them, and figures that may have failed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from anybatch.cli.report.drawing import Titled, installed
from anybatch.cli.report.parts import Figure, Key, Table

ABSENT = "The figure needs matplotlib: pip install 'anybatch[report]', then anybatch report."


class Drawing(NamedTuple):
    """A picture as SVG, or why there is none."""

    svg: str = ""
    missing: str = ""


def drawn(draw: Callable[[], str]) -> Drawing:
    """Return the drawing by `draw`, or its error as text: the page has its numbers all the same."""
    if not installed():
        return Drawing(missing=ABSENT)
    try:
        return Drawing(draw())
    except Exception as error:
        return Drawing(missing=f"The figure could not be drawn ({type(error).__name__}: {error}).")


def figure_of(titled: Titled, drawing: Drawing, keys: tuple[Key, ...], numbers: Table) -> Figure:
    """Return a figure with its numbers."""
    return Figure(
        titled.name,
        titled.title,
        titled.description,
        drawing.svg,
        drawing.missing,
        keys,
        numbers,
    )


def number(value: float) -> str:
    """Return a number with five digits, and separators between thousands."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.5g}"


def rounded(value: float) -> str:
    """Return a number with three digits, or as many as it has before the point."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def counted(count: int, what: str) -> str:
    """Return a count and its noun; the noun is passed as a plural that ends in s."""
    return f"{count:,} {what.removesuffix('s') if count == 1 else what}"


def percent(share: float) -> str:
    """Return a share of 1 in hundredths."""
    return f"{100 * share:.2f} %" if math.isfinite(share) else "not finite"


def seconds(count: float) -> str:
    """Return seconds in readable units."""
    if not math.isfinite(count):
        return "not finite"
    if count < 60:
        return f"{count:.3g} s"
    minutes, rest = divmod(round(count), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
