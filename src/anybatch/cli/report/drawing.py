"""The figures of a page, drawn by matplotlib: values over steps or epochs, and bytes by owner.

They are small, 420 units wide, so that their letters can be read on a telephone, and have no
legend: that of the page is real text, which wraps. matplotlib is an optional extra, drawn without
pyplot, which would keep a figure in global variables; a user's matplotlibrc has no effect, so the
same data give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from typing import Any
from xml.etree import ElementTree

import numpy as np

from anybatch.cli.report.history import Envelope

WIDTH, HEIGHT = 420.0, 270.0
"""Of a figure, in units that are pixels of a telephone's screen, or somewhat more or less."""

LETTERS = 13.0
LETTER = 0.0185
"""Width of a letter of a phase's name, as a share of a figure's."""

DASHES: tuple[Any, ...] = ("solid", (0, (5, 2.5)), (0, (1.5, 2)))
MARKS = ("o", "s", "^")
DOTS = 40
"""Values of which each has a mark."""


@dataclass(frozen=True)
class Line:
    """One line of a figure.

    `x`: where. `y`: the value; one that is not finite leaves a gap. `low`: lower edge of a band
    around it, as long as `y`; empty for none. `high`: the upper edge.
    """

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Titled:
    """Name, title and description of a figure.

    `name`: of the element, unique in a page. `title`: its title. `description`: its contents, in
    words.
    """

    name: str
    title: str
    description: str


def installed() -> bool:
    """Return whether there is anything to draw with."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw_lines(titled: Titled, lines: Sequence[Line], x_label: str, *, integer: bool = True) -> str:
    """Return lines over an axis as SVG.

    `titled`: title of the figure. `lines`: the first has the first style, and so on. `x_label`:
    label of the axis. `integer`: it counts in integers. Default True.
    """
    with _axes(x_label) as (axes, done):
        from matplotlib.ticker import MaxNLocator

        for i, line in enumerate(lines):
            color = line_color(i)
            if len(line.low):
                axes.fill_between(
                    line.x, _finite(line.low), _finite(line.high), color=color, alpha=0.22, lw=0
                )
            mark = MARKS[i % len(MARKS)] if len(line.x) <= DOTS else ""
            dashes = DASHES[i % len(DASHES)]
            axes.plot(line.x, _finite(line.y), marker=mark, color=color, ls=dashes, ms=4.5)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=integer))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.ticklabel_format(useOffset=False)
        return inlined(done(), titled.name, titled.title, titled.description)


def draw_envelope(titled: Titled, step: Envelope, unit: int) -> str:
    """Return a step's live bytes by owner below its budget, in so many bytes each, as SVG."""
    with _axes("seconds" if step.timed else "events, in their order") as (axes, done):
        live = np.array(step.live, np.float64).reshape(len(step.live), len(step.owners)) / unit
        below = np.zeros(len(live) + 1)
        for i, row in zip(step.styles, np.vstack([live, live[-1:]]).T, strict=True):
            for color in (band_color(i), band_color(i, hatched=True)):
                axes.fill_between(step.edges, below, below + row, step="post", fc=color, lw=0)
            below = below + row
        axes.plot(step.edges, below, color=INK, linewidth=0.9, drawstyle="steps-post")
        top = max(step.peak, step.budget if is_near(step) else 0) * 1.2 / unit
        if is_near(step):
            axes.axhline(step.budget / unit, color=LIMIT, linestyle=(0, (7, 3)), linewidth=1.8)
        _mark_phases(axes, step, top)
        axes.set_ylim(0, top or 1)
        axes.set_xlim(step.edges[0], max(step.edges[-1], step.edges[0] + 1e-9))
        return inlined(done(), titled.name, titled.title, titled.description)


def _mark_phases(axes: Any, step: Envelope, top: float) -> None:
    """Draw where parts of a step begin; a name that would meet the one before it goes below it."""
    first, length = step.edges[0], max(step.edges[-1] - step.edges[0], 1e-9)
    free = [-1.0, -1.0]
    for name, edge in step.phases:
        place = (edge - first) / length
        row = 0 if free[0] <= place else 1
        height = 0.995 - 0.075 * row
        if edge > first:
            axes.axvline(edge, 0, height, color=INK, linewidth=0.9, linestyle=":")
        free[row] = place + LETTER * (len(name) + 2)
        late = free[row] > 1
        side = {"va": "top", "ha": "right" if late else "left"}
        where = step.edges[-1] if late else edge
        axes.text(where, height * top, f" {name}", size=12.0, parse_math=False, **side)


FAR = 3  # peaks in a budget that is not drawn to scale: `StepTimeline.FAR`


def is_near(step: Envelope) -> bool:
    """Return whether a step's budget is so near its peak that both can be drawn to scale."""
    return step.budget <= FAR * step.peak


@contextmanager
def _axes(x_label: str) -> Iterator[tuple[Any, Any]]:
    """Yield axes in the page's style, and the function that returns the figure's bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "anybatch", "font.size": LETTERS}
            | {"axes.unicode_minus": False, "axes.spines.top": False, "axes.spines.right": False}
            | {"axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "text.color": INK}
            | {"xtick.color": MUTED, "ytick.color": MUTED, "axes.labelpad": 5}
            | {"axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "lines.linewidth": 2}
        )
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        figure.patch.set_visible(False)
        axes = figure.add_axes((0.145, 0.19, 0.81, 0.755))
        axes.patch.set_visible(False)
        axes.set_axisbelow(True)
        axes.set_xlabel(x_label)

        def done() -> bytes:
            file = BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
            return file.getvalue()

        yield axes, done


def _finite(values: Sequence[float]) -> Any:
    found = np.asarray(values, np.float64)
    return np.where(np.isfinite(found), found, np.nan)


# matplotlib's SVG made a part of a page: its colours are the page's, its names are read aloud.
#
# A figure of matplotlib is a file by itself: it fixes colours, so it is a white sheet on a dark
# page; its ids are those of every other figure; its fonts are its own; and a screen reader finds
# nothing in it. So a figure is drawn in stand-in colours, one for each role, and here each becomes
# a variable of the page's style sheet:
#
#     style="stroke: #0a0001"   ──>   style="stroke: var(--line-1)"
#
# Ids that nothing refers to go, the others get the figure's name in front of them.

HATCHES = (
    *("", "M-2 2L2-2M0 8L8 0M6 10L10 6", "M-2 6L2 10M0 0L8 8M6-2L10 2", "M0 4V8M4 0V4"),
    *("M0 4H8", "M2 2h1M6 6h1", "M4 0V8", "M0 0L8 8M8 0L0 8", "M1 4h2M5 4h2M1 0h2M5 0h2"),
    *("M0 4H8M4 0V8", "M1 2l3 3l3-3"),
)
"""Patterns over a band, in a square of 8, to distinguish it without its colour."""

LINES, BANDS = 3, len(HATCHES)
"""Distinct styles of lines and of bands."""

ROLES = {
    "#0a0000": "var(--ink)",
    "#0a0010": "var(--muted)",
    "#0a0020": "var(--grid)",
    "#0a0030": "var(--limit)",
    **{f"#0b00{i:02x}": f"var(--line-{i})" for i in range(LINES)},
    **{f"#0c00{i:02x}": f"var(--band-{i})" for i in range(BANDS)},
    **{f"#0d00{i:02x}": f"url(#hatch-{i})" for i in range(BANDS)},
}
"""Colour of a drawn figure -> its replacement."""

INK, MUTED, GRID, LIMIT = list(ROLES)[:4]

_COLOR = re.compile("|".join(ROLES))
_LONG = re.compile(r"-?\d+\.\d{3,}")
_URL = re.compile(r"url\(#([^)]+)\)")
_REFERENCE = re.compile(r"(?:url\(|href=\")#([^)\"]+)")
_FONT = re.compile(r"font(-\w+)?:[^;]*;?\s*")
_SIZE = re.compile(r"font(?:-size)?:[^;]*?(\d+(?:\.\d+)?)px")


def line_color(i: int) -> str:
    """Return the colour in which the `i`-th line is drawn."""
    return f"#0b00{i % LINES:02x}"


def band_color(i: int, *, hatched: bool = False) -> str:
    """Return the colour in which the `i`-th band is drawn, or its pattern."""
    return f"#{'0d' if hatched else '0c'}00{i % BANDS:02x}"


def inlined(svg: bytes, name: str, title: str, description: str) -> str:
    """Return a figure as an element of a page.

    `svg`: as matplotlib writes it. `name`: of the figure, unique in the page. `title`: its title.
    `description`: its contents, in words.
    """
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if _tag(child) in ("metadata", "style"):
                parent.remove(child)
    _rename_ids(root, name)
    for element in root.iter():
        element.tag = _tag(element)
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        element.attrib.clear()
        element.attrib.update({key: _themed(key, value) for key, value in attributes.items()})
    box = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib.update(
        {"viewBox": box, "role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    )
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        child.text = text
        root.insert(place, child)
    return ElementTree.tostring(root, encoding="unicode")


def _tag(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]


def _rename_ids(root: ElementTree.Element, name: str) -> None:
    """Give ids that are referred to a name of this figure's; remove the others."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = set(_REFERENCE.findall(text))
    new = _names(root, name, used)
    for element in root.iter():
        old = element.attrib.pop("id", "")
        for key, value in element.attrib.items():
            if key.endswith("href"):
                element.set(key, f"#{new[value[1:]]}")
            elif "url(#" in value:
                element.set(key, _URL.sub(lambda hit: f"url(#{new[hit[1]]})", value))
        if old in new:
            element.set("id", new[old])


def _names(root: ElementTree.Element, name: str, used: set[str]) -> dict[str, str]:
    """Return the new name of each id; a shape that is drawn twice is stored, and named, once."""
    new, shapes, numbers = dict[str, str](), dict[str, str](), count()
    for parent in list(root.iter()):
        for element in list(parent):
            old, shape = element.get("id", ""), element.get("d", "")
            if old not in used:
                continue
            if shape in shapes:
                parent.remove(element)
            new[old] = shapes.get(shape) or f"{name}-{next(numbers)}"
            if shape:
                shapes[shape] = new[old]
    return new


def _themed(key: str, value: str) -> str:
    """Return an attribute with the page's colours and font, and with two digits."""
    if key == "style" and "font" in value:
        size = _SIZE.search(value)
        value = (f"font-size: {size[1]}px; " if size else "") + _FONT.sub("", value)
    value = _COLOR.sub(lambda hit: ROLES[hit[0]], value)
    value = _LONG.sub(lambda hit: f"{float(hit[0]):.2f}", value)
    return _without_repeats(value) if key == "d" else value


def _without_repeats(path: str) -> str:
    """Return a path without the lines that lead nowhere: steps have as many as others."""
    parts = re.findall(r"[A-Za-z][^A-Za-z]*", path)
    points = [(part[0], part[1:].split()) for part in parts]
    distinct = [
        f"{letter}{' '.join(numbers)}"
        for i, (letter, numbers) in enumerate(points)
        if letter != "L" or numbers != points[i - 1][1]
    ]
    return "".join(distinct)
