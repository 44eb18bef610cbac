"""The figures of a page, drawn by matplotlib: values over steps or epochs, and bytes by owner.

They are small, 420 units wide, so that their letters can be read on a telephone, and have no
legend: that of the page is real text, which wraps. matplotlib is an optional extra and is drawn
with as in `curves`; a user's matplotlibrc has no effect, so the same data give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from anybatch.cli.report.envelope import Envelope
from anybatch.cli.report.svg import GRID, INK, LIMIT, MUTED, band_color, inlined, line_color
from anybatch.reports import StepTimeline

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

    Attributes:
        x: where.
        y: the value; one that is not finite leaves a gap.
        low: lower edge of a band around it, as long as `y`; empty for none.
        high: the upper edge.
    """

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Titled:
    """Name, title and description of a figure.

    Attributes:
        name: of the element, unique in a page.
        title: its title.
        description: its contents, in words.
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

    Args:
        titled: title of the figure.
        lines: the first has the first style, and so on.
        x_label: label of the axis.
        integer: it counts in integers. Default True.
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


def is_near(step: Envelope) -> bool:
    """Return whether a step's budget is so near its peak that both can be drawn to scale."""
    return step.budget <= StepTimeline.FAR * step.peak


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
