"""Convolution kernels of a model, layer by layer: their seconds, workspace and division.

layer   kernel    samples   torch's   chosen       takes   workspace   gain
0       forward        32    81.2 ms  fft@4 x 8   9.6 ms     9.1 MiB   8.5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from anybatch.cli.faults import SettingsError
from anybatch.cli.picture import refuse_without_matplotlib
from anybatch.kernels import MeasuredKernel
from anybatch.units import show_bytes

WIDE = 110
"""Columns of a table that are not shown on a terminal."""


def name_of(row: MeasuredKernel) -> str:
    """Return the layers of a kernel in a few words."""
    more = f" and {len(row.layers) - 1} more" if len(row.layers) > 1 else ""
    return f"{row.layers[0]}{more}" if row.layers else "-"


def table_of(rows: Iterable[MeasuredKernel]) -> Table:
    """Return the kernels as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "kernel", "samples", "torch's", "chosen", "takes", "workspace", "gain"):
        right = name not in ("layer", "kernel", "chosen")
        folds = name == "chosen"
        table.add_column(
            name, justify="right" if right else "left", no_wrap=not folds, overflow="fold"
        )
    for row in rows:
        problem, size = row.key
        chosen = row.chosen
        best = [str(chosen), _ms(chosen.seconds), show_bytes(chosen.workspace)]
        gain = f"{row.seconds / chosen.seconds:.1f}"
        ours = [*best, gain] if chosen.divided else ["torch's own", "", "", ""]
        cells = [name_of(row), problem.kernel, str(size), _ms(row.seconds), *ours]
        table.add_row(*map(Text, cells))
    return table


def console_of(stderr: bool = False) -> Console:  # noqa: FBT001, FBT002
    """Return where tables go: as wide as the terminal, or wide enough for a file or a pipe."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=WIDE)


def summary_of(rows: Sequence[MeasuredKernel]) -> str:
    """Return one line on all kernels together: seconds before and after, and workspace."""
    if not rows:
        return "The model has no convolutions that could be divided."
    before, after = sum(r.seconds for r in rows), sum(r.chosen.seconds for r in rows)
    most = max(r.chosen.workspace for r in rows)
    count = sum(r.chosen.divided for r in rows)
    return (
        f"{count} of {len(rows)} kernels are not torch's own: {_ms(before)} become {_ms(after)} "
        f"({before / after:.1f} times as fast) with {show_bytes(most)} of workspace."
    )


def refuse_without_rows(inputs: Tensor) -> None:
    """Refuse to record a model without samples.

    Raises:
        SettingsError: there are none.
    """
    if not len(inputs):
        raise SettingsError(
            "convolutions are recorded with a sample or more; the data have none that can be read."
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# Picture of a model's convolutions: gain by workspace, and the workspace of each kernel.
#
#     ┌ seconds against workspace of the kernel that ┐ ┌ workspace of every kernel that has any, ┐
#     └ gains most: its front, torch's own, chosen   ┘ └ the largest first                       ┘
#
# Source: u-cuDNN, Fig. 8 (the front of a layer) and Fig. 14 (the division of a network's
# workspace).

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
