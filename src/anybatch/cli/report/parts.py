"""Parts of a page: sections of sentences, facts, figures and tables.

A page that reads the run while it is written can be tested only by reading HTML. Here the page is
data first: the template lays it out and decides nothing, and a test reads numbers from a `Table`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from anybatch.cli.report.drawing import Titled, installed

Swatch = Literal["line", "band", "limit"]
Tone = Literal["good", "stopped", "bad", "plain"]


@dataclass(frozen=True)
class Fact:
    """A name and its value.

    `name`: of the value. `value`: in words. `more`: a remark in small print; "" for none. `code`:
    the value is to be copied. Default False.
    """

    name: str
    value: str
    more: str = ""
    code: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of words; the first cell of each is its heading.

    `name`: of the element, unique in a page. `caption`: its caption. `columns`: their headings.
    `rows`: as many cells as there are columns. `words`: places of the columns that hold words, not
    figures, except the first. `marked`: places of the rows that stand out. `shares`: of each row,
    the length of a bar next to its heading, 0 to 1; empty for no bars.
    """

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Key:
    """An entry of a figure's legend.

    `name`: its meaning. `swatch`: how it is drawn. `style`: number of the style. `more`: a figure
    after the name.
    """

    name: str
    swatch: Swatch
    style: int
    more: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture and, always, its numbers.

    `name`: of the element, unique in a page. `title`: its title. `description`: its contents in
    words, for screen readers. `drawing`: the picture as SVG; "" where there is none. `missing`: why
    there is none. `keys`: its legend, in the order in which it is read. `numbers`: the drawn
    values.
    """

    name: str
    title: str
    description: str
    drawing: str
    missing: str
    keys: tuple[Key, ...]
    numbers: Table


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading.

    `name`: of the element, unique in a page. `title`: its heading. `lead`: sentences, a paragraph
    each. `facts`: names and values. `tiles`: the facts are few, and shown large. Default False.
    `points`: sentences, as a list. `figures`: of it. `tables`: of it. `text`: to be shown letter by
    letter; "" for none. `text_name`: name of the text.
    """

    name: str
    title: str
    lead: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    tiles: bool = False
    points: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    text: str = ""
    text_name: str = ""


@dataclass(frozen=True)
class Page:
    """Complete page about a run or a plan.

    `command`: the command that it is of. `title`: its heading. `tone`: how it ended, as a colour
    and a sign. `ending`: the same in words. `notes`: remarks at the top of the page. `sections`: in
    order; none is empty.
    """

    command: str
    title: str
    tone: Tone
    ending: str
    notes: tuple[str, ...]
    sections: tuple[Section, ...]


# Numbers as a page writes them, and figures that may have failed.

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
    name, title, description = titled.name, titled.title, titled.description
    return Figure(name, title, description, *drawing, keys, numbers)


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
