"""The paper's Figure 3: loss and figure by epoch at the initial mini-batch, without and with MBS.

The line is the mean over the seeds and the band their whole range, so that two lines that differ by
less than the seeds do can be seen to.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.mbs.tables.one_run import TRAINED
from benchmarks.mbs.tables.rows import METRICS, WAYS, Run, cases, selected

Results = dict[str, Any]
STYLES = {"undivided": ("C0", "-"), "micro": ("C1", "--"), "memory": ("C2", ":")}
PARTS = (("train_loss", "training loss"), ("test_metric", "test {}"))


def draw(results: Results, path: Path) -> bool:
    """Draw two pictures for each model to the PNG file `path`; return False where none trained."""
    found = {
        name: _trained(results, name, case)
        for name, case in cases(results)
        if case["initial"] is not None
    }
    shown = {name: ways for name, ways in found.items() if any(ways.values())}
    if not shown:
        return False
    figure = Figure(figsize=(8, 2.7 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(shown), 2, squeeze=False)
    for axes, (name, ways) in zip(grid, shown.items(), strict=True):
        case = results["cases"][name]
        for axis, (part, label) in zip(axes, PARTS, strict=True):
            for way, runs in ways.items():
                if runs:
                    _band(axis, runs, part, way)
            axis.set(xlabel="epoch", ylabel=label.format(METRICS[case["task"]]))
            axis.set_title(f"{name}, batch {case['initial']}", fontsize="small")
            axis.grid(visible=True, alpha=0.3)
            axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=60)
    return True


def _trained(results: Results, name: str, case: Results) -> dict[str, list[Run]]:
    pixels, batch = case["pixels"]["large"], case["initial"]
    return {
        way: [run for run in selected(results, name, way, batch, pixels) if run["ended"] == TRAINED]
        for way in WAYS
    }


def _band(axis: Axes, runs: list[Run], part: str, way: str) -> None:
    color, style = STYLES[way]
    epochs = list(range(1, len(runs[0][part]) + 1))
    by_epoch = list(zip(*(run[part] for run in runs), strict=True))
    means = [sum(values) / len(values) for values in by_epoch]
    low, high = [min(values) for values in by_epoch], [max(values) for values in by_epoch]
    axis.fill_between(epochs, low, high, color=color, alpha=0.2, linewidth=0)
    axis.plot(epochs, means, style, color=color, label=WAYS[way])
