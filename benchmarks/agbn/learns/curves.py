"""Training loss and test accuracy by epoch: a line for each arm, and the range of its seeds.

The undivided line is wide and pale, so that one that lies on it can be seen to.
"""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Results = dict[str, Any]
LABELS = {
    "undivided": "torch alone, batch {batch} at once",
    "exact": "anybatch, exact, micro-batches of {micro_batch}",
    "local": "local BatchNorm, micro-batches of {micro_batch}",
}
STYLES: dict[str, dict[str, Any]] = {
    "undivided": {"color": "C0", "linewidth": 5, "alpha": 0.4},
    "exact": {"color": "C1", "linewidth": 1.6},
    "local": {"color": "C2", "linewidth": 1.6, "linestyle": "--"},
}
PARTS = (("train_loss", "training loss", 1), ("test_accuracy", "test accuracy (%)", 100))


def draw(results: Results, path: Path) -> None:
    """Draw the two pictures to the PNG file `path`."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for axis, (part, label, scale) in zip(axes, PARTS, strict=True):
        for arm, style in STYLES.items():
            runs = [run for run in results["runs"] if run["arm"] == arm]
            by_epoch = [
                [scale * value for value in values]
                for values in zip(*(run[part] for run in runs), strict=True)
            ]
            epochs = range(1, len(by_epoch) + 1)
            low, high = map(min, by_epoch), map(max, by_epoch)
            means = [sum(values) / len(values) for values in by_epoch]
            name = LABELS[arm].format(**results["sizes"])
            axis.fill_between(
                epochs, list(low), list(high), color=style["color"], alpha=0.15, linewidth=0
            )
            axis.plot(epochs, means, label=name, **style)
        axis.set(xlabel="epoch", ylabel=label)
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
