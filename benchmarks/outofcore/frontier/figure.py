"""The time of a step against the memory that it holds, a line for every way.

    python -m benchmarks.outofcore.frontier.figure        draws it anew from results.json

Both are over those in memory, so in memory is at (1, 1), and better is further left and lower.
Colours are those of Okabe and Ito, and every line has a mark of its own.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.outofcore.frontier.networks import NETWORKS
from benchmarks.results import console, read

HERE = Path(__file__).parent
NAME = "frontier.png"
Results = dict[str, Any]
LOOKS = {
    "checkpoint": ("#d55e00", "--", "s"),
    "save_on_cpu": ("#cc79a7", "", "D"),
    "files by hand": ("#000000", "", "X"),
    "offload, moving": ("#0072b2", "-", "o"),
    "offload, moving or again": ("#009e73", "-.", "^"),
}
"""Colour, line and mark of a way."""


def frontier(results: Results) -> Figure:
    """A panel for each malloc mode and network."""
    modes = results["modes"]
    names = list(next(iter(modes.values()))["networks"])
    figure = Figure(figsize=(3.6 * len(names), 2.9 * len(modes) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(modes), len(names), squeeze=False)
    for row, (mode, found) in zip(grid, modes.items(), strict=True):
        for axes, name in zip(row, names, strict=True):
            _panel(axes, found["networks"][name])
            axes.set_title(f"{NETWORKS[name].title}\nmalloc {mode}", fontsize="small")
    lines, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=3, fontsize="small")
    return figure


def _panel(axes: Axes, one: Results) -> None:
    axes.plot([1.0], [1.0], "k*", markersize=9, label="in memory")
    for line, settings in one["lines"].items():
        points = sorted((r["peak"] / one["in memory"], r["wall"][1]) for r in settings.values())
        color, style, mark = LOOKS[line]
        options: dict[str, Any] = {"color": color, "linestyle": style, "marker": mark}
        axes.plot(*zip(*points, strict=True), label=line, markersize=4, **options)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, alpha=0.3)
    axes.tick_params(labelsize="small")
    axes.set(xlabel="live peak, in memory = 1", ylabel="seconds, in memory = 1")


def draw(results: Results, folder: Path) -> None:
    """Draw the figure of the results into a folder."""
    frontier(results).savefig(folder / NAME, dpi=75)


def main(*, out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE) -> None:
    """Draw the figure of results.json anew."""
    results = read(out / "results.json")
    if results is None:
        console.print("no results.json there: run `python -m benchmarks.outofcore.frontier.run`")
        raise typer.Exit(1)
    draw(results, out)
    console.print(f"drew {NAME}")


if __name__ == "__main__":
    typer.run(main)
