"""The paper's figures, as bars.

python -m benchmarks.ucudnn.paper.figures        draws them anew from results.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from anybatch.conv.problem import KERNELS
from benchmarks.results import console, read
from benchmarks.ucudnn.models import NETWORKS
from benchmarks.ucudnn.paper.choices import MIB, POWERS, UNDIVIDED
from benchmarks.ucudnn.paper.rows import ORDER, by_size, in_order

HERE = Path(__file__).parent
Results = dict[str, Any]
COLORS = {
    "native": "#999999",
    "channels_last": "#56b4e9",
    "im2col": "#e69f00",
    "fft": "#009e73",
    "overlap_save": "#d55e00",
    "set-up": "#f0e442",
    "other": "#cc79a7",
}
"""Of an algorithm (Okabe and Ito)."""
MOST = 12
"""Kernels of a figure; of more, those that show most."""
SIDES = ("#999999", "#0072b2", "#d55e00", "#009e73")


def draw(results: Results, folder: Path) -> list[str]:
    """Draw what the results have into a folder, and return the names."""
    made = {
        "figure_1.png": cliff(results),
        "figure_9.png": layer(results),
        "figure_10.png": networks(results, "each", ("undivided", "powerOfTwo", "all")),
        "figure_12.png": memory(results),
        "figure_13.png": networks(results, "against", ("WR, undivided", "WR", "WD")),
        "figure_14.png": shares(results),
    }
    drawn = {name: figure for name, figure in made.items() if figure is not None}
    for name, figure in drawn.items():
        figure.savefig(folder / name, dpi=75)
    return list(drawn)


def networks(results: Results, table: str, kinds: Sequence[str]) -> Figure | None:
    """Figures 10, 11 and 13: a panel for each network, a group of bars for each workspace."""
    there = results["networks"]
    panels = _panels(len(there))
    if panels is None:
        return None
    figure, grid = panels
    for axes, (name, one) in zip(grid, in_order(there, list(NETWORKS)), strict=True):
        found = by_size(one[table])
        labels = [f"{int(w) // MIB} MiB" for w, _ in found]
        for at, choice in enumerate(kinds):
            heights = [each[choice]["seconds"] if choice in each else 0.0 for _, each in found]
            _bars(axes, at, len(kinds), heights, choice)
        _ticks(axes, labels, NETWORKS[name].title)
        axes.set_ylabel("seconds of all kernels")
    _legend(figure, grid[0])
    return figure


def layer(results: Results) -> Figure | None:
    """Figure 9: the parts of a kernel one upon the other, with their samples."""
    found = [one["conv2"] for one in results["networks"].values() if "conv2" in one]
    panels = _panels(len(found[0]) if found else 0)
    if panels is None:
        return None
    figure, grid = panels
    for axes, (kernel, policies) in zip(grid, in_order(found[0], KERNELS), strict=True):
        chosen_by = in_order(policies, ORDER)
        for at, (_, chosen) in enumerate(chosen_by):
            below = 0.0
            for size, name, seconds in chosen["parts"]:
                color = COLORS.get(name, COLORS["other"])
                axes.bar(at, seconds, bottom=below, color=color, edgecolor="white", width=0.7)
                axes.text(at, below + seconds / 2, str(size), ha="center", va="center", size=7)
                below += seconds
            once = max(0.0, chosen["seconds"] - below)
            axes.bar(at, once, bottom=below, color=COLORS["set-up"], edgecolor="white", width=0.7)
        _ticks(axes, [policy for policy, _ in chosen_by], f"conv2, {kernel}")
        axes.set_ylabel("seconds")
    for name, color in COLORS.items():
        grid[0].bar(0, 0, color=color, label=name)
    _legend(figure, grid[0])
    return figure


def cliff(results: Results) -> Figure | None:
    """Figure 1: seconds with the best algorithm's workspace, and with a byte less."""
    rows = [
        (f"{name} {row['layer']} {row['kernel']}", row)
        for name, one in in_order(results["networks"], list(NETWORKS))
        for row in one["cliff"]
        if "less" in row
    ]
    rows.sort(key=lambda row: -row[1]["less"]["seconds"] / row[1]["best"]["seconds"])
    del rows[MOST:]
    if not rows:
        return None
    figure, (axes,) = _wide(len(rows))
    for at, (key, label) in enumerate(CLIFF.items()):
        _bars(axes, at, len(CLIFF), [row[key]["seconds"] for _, row in rows], label)
    _ticks(axes, [label for label, _ in rows], "")
    axes.tick_params(axis="x", rotation=60)
    axes.set(yscale="log", ylabel="seconds")
    axes.legend(fontsize="small")
    return figure


CLIFF = {"best": "best undivided", "less": "a byte less", "divided": "a byte less, divided"}


def memory(results: Results) -> Figure | None:
    """Figure 12: bytes of every layer, with its workspace undivided and divided."""
    there = results["networks"]
    panels = _panels(len(there))
    if panels is None:
        return None
    figure, grid = panels
    for axes, (name, one) in zip(grid, in_order(there, list(NETWORKS)), strict=True):
        rows = one["memory"]
        for at, choice in enumerate((UNDIVIDED, "divided")):
            below = [0.0] * len(rows)
            for shade, key in enumerate(("data", "filters", choice)):
                heights = [row[key] / MIB for row in rows]
                places = [place + 0.4 * at for place in range(len(rows))]
                label = LABELS[key] if at == 0 or shade == 2 else None
                color = SIDES[shade if shade < 2 else 2 + at]
                axes.bar(places, heights, 0.36, bottom=below, color=color, label=label)
                below = [b + h for b, h in zip(below, heights, strict=True)]
        axes.set(ylabel="MiB", xlabel="layer, undivided and divided")
        axes.set_title(NETWORKS[name].title, fontsize="small")
        axes.set_xticks([])
    _legend(figure, grid[0])
    return figure


LABELS = {
    "data": "input and output",
    "filters": "filters",
    "undivided": "workspace, undivided in 512 MiB",
    "divided": "workspace, divided in 64 MiB",
}


def shares(results: Results) -> Figure | None:
    """Figure 14: how a total is divided; a bar for each network that has shares."""
    there = {
        name: [row for row in one["shares"] if row["workspace"]]
        for name, one in results["networks"].items()
    }
    there = {
        name: sorted(rows, key=lambda row: -row["workspace"])[:MOST]
        for name, rows in there.items()
        if rows
    }
    panels = _panels(len(there))
    if panels is None:
        return None
    figure, grid = panels
    for axes, (name, rows) in zip(grid, in_order(there, list(NETWORKS)), strict=True):
        _bars(axes, 0, 1, [row["workspace"] / MIB for row in rows], POWERS)
        _ticks(axes, [f"{row['layer']} {row['kernel']}" for row in rows], NETWORKS[name].title)
        axes.tick_params(axis="x", rotation=60)
        axes.set_ylabel("MiB of a total of 8 for each kernel")
    return figure


def _panels(count: int) -> tuple[Figure, Sequence[Axes]] | None:
    if not count:
        return None
    figure = Figure(figsize=(3.1 * max(count, 2), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _wide(count: int) -> tuple[Figure, tuple[Axes]]:
    figure = Figure(figsize=(max(6.0, 0.7 * count), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, (figure.subplots(),)


def _bars(axes: Axes, at: int, count: int, heights: Sequence[float], label: str) -> None:
    width = 0.8 / count
    places = [place + at * width for place in range(len(heights))]
    axes.bar(places, heights, width, color=SIDES[at + (count == 1)], label=label)


def _ticks(axes: Axes, labels: Sequence[str], title: str) -> None:
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(labelsize="small")
    axes.set_title(title, fontsize="small")
    axes.grid(visible=True, axis="y", alpha=0.3)


def _legend(figure: Figure, axes: Axes) -> None:
    lines, labels = axes.get_legend_handles_labels()
    figure.legend(
        lines,
        labels,
        loc="outside lower center",
        ncols=2 + 2 * (figure.get_figwidth() > 9),
        fontsize="small",
    )


def main(*, out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE) -> None:
    """Draw the figures of results.json anew."""
    results = read(out / "results.json")
    if results is None:
        console.print("no results.json there: run `python -m benchmarks.ucudnn.paper.run`")
        raise typer.Exit(1)
    console.print(f"drew {', '.join(draw(results, out))}")


if __name__ == "__main__":
    typer.run(main)
