"""Loss and retrieval on tests by step: a line for each arm, and the range of its seeds.

The undivided line is wide and pale, so that one that lies on it can be seen to.
"""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

LABELS = {
    "undivided": "torch alone, undivided",
    "anybatch": "anybatch, micro-batches",
    "accumulated": "accumulated: negatives of the micro-batch",
}
STYLES: dict[str, dict[str, Any]] = {
    "undivided": {"color": "C0", "linewidth": 5, "alpha": 0.4},
    "anybatch": {"color": "C1", "linewidth": 1.6},
    "accumulated": {"color": "C2", "linewidth": 1.6, "linestyle": "--"},
}
PARTS = (("loss", "test loss", 1), ("found", "images that find their number (%)", 100))


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the two pictures to the PNG file `path`."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for axis, (part, label, scale) in zip(axes, PARTS, strict=True):
        for arm, style in STYLES.items():
            of_arm = [run for run in runs if run["arm"] == arm]
            each = [[scale * v for v in vs] for vs in zip(*(r[part] for r in of_arm), strict=True)]
            steps = of_arm[0]["steps"]
            low, high = [min(values) for values in each], [max(values) for values in each]
            axis.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
            means = [sum(values) / len(values) for values in each]
            axis.plot(steps, means, label=LABELS[arm], **style)
        axis.set(xlabel="step", ylabel=label)
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
