"""Training loss by step and test accuracy by epoch: a line for each arm, and its seeds' range.

torch's line is wide and pale, so that one that lies on it can be seen to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Results = dict[str, Any]
STYLES: dict[str, dict[str, Any]] = {
    "torch": {"color": "C0", "linewidth": 5, "alpha": 0.4},
    "ours": {"color": "C1", "linewidth": 1.6},
}
PARTS = (("loss", "training loss", "step"), ("test_accuracy", "test accuracy", "epoch"))


def draw(results: Results, path: Path) -> None:
    """Draw a row of two pictures for each training to the PNG file `path`."""
    tasks = results["tasks"]
    figure = Figure(figsize=(8, 2.8 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(tasks), len(PARTS), squeeze=False)
    for row, found in zip(grid, tasks.values(), strict=True):
        for axes, (part, label, unit) in zip(row, PARTS, strict=True):
            for arm, style in STYLES.items():
                runs = [run[part] for run in found["runs"] if run["arm"] == arm]
                by_place = list(zip(*runs, strict=True))
                places = range(1, len(by_place) + 1)
                low, high = list(map(min, by_place)), list(map(max, by_place))
                means = [sum(values) / len(values) for values in by_place]
                axes.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
                axes.plot(places, means, label=arm, **style)
            axes.set(xlabel=unit, ylabel=label)
            axes.set_title(found["title"], fontsize="small")
            axes.grid(visible=True, alpha=0.3)
    grid[0][0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
