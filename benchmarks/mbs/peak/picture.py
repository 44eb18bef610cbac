"""Peaks by batch size as a picture."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MIB = 1 << 20


def draw(results: dict[str, Any], folder: Path) -> None:
    """Draw peak.png into a folder."""
    rows = results["rows"]
    batches = [row["batch"] for row in rows]
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, label, colour in (
        ("undivided", "torch alone", "#d55e00"),
        ("ours", f'anybatch, memory="{results["budget"]}"', "#0072b2"),
    ):
        axes.plot(batches, [row[key] / MIB for row in rows], marker="o", label=label, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="batch size", ylabel="peak of a step, MiB")
    axes.set_xticks(batches, list(map(str, batches)))
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(folder / "peak.png", dpi=110)
