"""Figures 2 and 3 as pictures."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(results: dict[str, Any], folder: Path) -> None:
    """Draw both figures into a folder."""
    _figure_2(results["figure 2"]).savefig(folder / "figure_2.png", dpi=110)
    _figure_3(results["figure 3"]).savefig(folder / "figure_3.png", dpi=110)


def _blank() -> Figure:
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _figure_2(rows: list[dict[str, Any]]) -> Figure:
    figure = _blank()
    axes = figure.subplots()
    sizes = [row["samples"] for row in rows]
    axes.plot(sizes, [row["anybatch"] for row in rows], "o-", label="in what memory is left")
    axes.plot(sizes, [row["undivided"] for row in rows], "^-.", label="the same, not divided")
    axes.plot(sizes, [row["torch"] for row in rows], "s--", label="torch's own kernels")
    axes.set(xlabel="samples in a mini-batch", ylabel="samples a second", ylim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    return figure


def _figure_3(errors: dict[str, list[float]]) -> Figure:
    figure = _blank()
    axes = figure.subplots()
    for (batch, curve), style in zip(errors.items(), ("-", "--", "-.", ":") * 3, strict=False):
        axes.plot(range(1, len(curve) + 1), curve, style, label=batch)
    axes.set(xlabel="epoch", ylabel="test error", ylim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(title="mini-batch", ncols=2)
    return figure
