"""Picture of a model's convolutions: gain by workspace, and the workspace of each kernel.

    ┌ seconds against workspace of the kernel that ┐ ┌ workspace of every kernel that has any, ┐
    └ gains most: its front, torch's own, chosen   ┘ └ the largest first                       ┘

Source: u-cuDNN, Fig. 8 (the front of a layer) and Fig. 14 (the division of a network's workspace).
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from anybatch.cli.kernels import name_of
from anybatch.cli.picture import refuse_without_matplotlib
from anybatch.kernels import MeasuredKernel

MIB = 1 << 20
MOST = 24
"""Kernels that are drawn; of more, those with the largest workspace."""

COLORS = {"forward": "#0072b2", "data": "#e69f00", "filter": "#009e73"}
"""Kernel -> colour, of Okabe and Ito's, distinct for the colour-blind."""


def draw_fronts(rows: Sequence[MeasuredKernel]) -> bytes:
    """Return the picture of kernels, a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    refuse_without_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ours = sorted((r for r in rows if r.chosen.divided), key=lambda r: -r.chosen.workspace)[:MOST]
    figure = Figure(figsize=(11, 1.8 + max(3.0, 0.24 * len(ours))), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    if rows:
        _front(left, max(rows, key=lambda row: row.seconds - row.chosen.seconds))
    _shares(right, ours)
    png = BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()


def _front(axes: Any, row: MeasuredKernel) -> None:
    """Draw the seconds of a kernel against its workspace."""
    problem, size = row.key
    spaces = [c.workspace / MIB for c in row.front]
    seconds = [1000 * c.seconds for c in row.front]
    axes.step(spaces, seconds, where="post", color="#909090", linewidth=1.0)
    axes.plot(spaces, seconds, "o", color=COLORS[problem.kernel], markersize=5)
    at = row.chosen.workspace / MIB, 1000 * row.chosen.seconds
    axes.plot(*at, "o", markersize=11, markerfacecolor="none", markeredgecolor="#a00000")
    axes.annotate(
        str(row.chosen), at, textcoords="offset points", xytext=(6, 8), fontsize="x-small"
    )
    axes.set_title(f"{name_of(row)}: {problem}\n{size} samples", fontsize="x-small", loc="left")
    axes.set(xlabel="workspace, MiB", ylabel="milliseconds")
    axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)


def _shares(axes: Any, rows: Sequence[MeasuredKernel]) -> None:
    """Draw the workspace of every kernel."""
    axes.set_title("workspace of kernels that are not torch's own", fontsize="x-small", loc="left")
    if not rows:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")
        axes.set_axis_off()
        return
    places = range(len(rows))
    sizes = [row.chosen.workspace / MIB for row in rows]
    colors = [COLORS[row.key[0].kernel] for row in rows]
    axes.barh(places, sizes, color=colors)
    labels = [f"{name_of(row)} {row.key[0].kernel}: {row.chosen}" for row in rows]
    axes.set_yticks(places, labels, fontsize="x-small")
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    axes.grid(visible=True, axis="x", alpha=0.3)
