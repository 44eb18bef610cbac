"""Validation loss of the four arms as they train: how far each is from the undivided one."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Results = dict[str, Any]
STYLES: dict[str, dict[str, Any]] = {
    "undivided": {"color": "C0", "linewidth": 5, "alpha": 0.4},
    "anybatch": {"color": "C1", "linewidth": 1.6},
    "by hand": {"color": "C2", "linewidth": 1.6, "linestyle": "--"},
    "by hand, by length": {"color": "C3", "linewidth": 1.6, "linestyle": ":"},
}


def draw(results: Results, path: Path) -> None:
    """Draw the loss, and its distance from the undivided one by seed, to the PNG file `path`."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    every = results["size"]["every"]
    runs = {(run["arm"], run["seed"]): run["losses"] for run in results["runs"]}
    seeds = results["size"]["seeds"]
    for arm, style in STYLES.items():
        losses = [runs[arm, seed] for seed in seeds]
        steps = [every * k for k in range(len(losses[0]))]
        left.plot(steps, [sum(v) / len(v) for v in zip(*losses, strict=True)], label=arm, **style)
        gaps = [
            [a - b for a, b in zip(runs[arm, seed], runs["undivided", seed], strict=True)]
            for seed in seeds
        ]
        over = list(zip(*gaps, strict=True))
        right.fill_between(
            steps, list(map(min, over)), list(map(max, over)), color=style["color"], alpha=0.15
        )
        right.plot(steps, [sum(v) / len(v) for v in over], **style)
    left.set(xlabel="step", ylabel="validation loss a token")
    right.set(xlabel="step", ylabel="from undivided, paired by seed")
    for axis in (left, right):
        axis.grid(visible=True, alpha=0.3)
    left.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
