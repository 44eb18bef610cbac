"""Pictures of where the time goes: parts beside the plain loop, and how the ratios scale."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.agbn.lanes_parts.rows import shares

Results = dict[str, Any]
SCANS = {"lanes": "micro-batches of a batch", "layers": "BatchNorm layers"}
STYLES = {"stays": ("C0", "-"), "watched": ("C1", "--"), "leaves": ("C2", ":")}


def draw(results: Results, path: Path) -> None:
    """Draw a row for each malloc mode to the PNG file `path`."""
    modes = results["modes"]
    figure = Figure(figsize=(11, 3 * len(modes)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(modes), 3, squeeze=False)
    for axes, (mode, found) in zip(grid, modes.items(), strict=True):
        if "total" in found:
            _bars(axes[0], found["total"])
        axes[0].set_title(f"malloc {mode}", fontsize="small")
        for axis, (scan, label) in zip(axes[1:], SCANS.items(), strict=True):
            _lines(axis, found.get(scan, {}), label)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=60)


def _bars(axis: Axes, total: Results) -> None:
    """Parts of a step in lanes, the plain loop being 1."""
    found = shares(total)
    axis.barh(list(found), list(found.values()), color="C0")
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set(xlabel="seconds / plain loop")
    axis.grid(visible=True, alpha=0.3)


def _lines(axis: Axes, scan: Results, label: str) -> None:
    """Median ratios to the plain loop, with the range over the rounds."""
    counts = sorted(map(int, scan))
    for way, (color, style) in STYLES.items():
        low, middle, high = (
            zip(*(scan[str(c)][way] for c in counts), strict=True) if scan else ((),) * 3
        )
        axis.fill_between(counts, low, high, color=color, alpha=0.2, linewidth=0)
        axis.plot(counts, middle, style, color=color, label=way)
    axis.set(xlabel=label, ylabel="time / plain loop", xscale="log")
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize="small")
