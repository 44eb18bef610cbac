"""AGBN's Figure 4: gain of global over local BatchNorm by batch size, a line for each device count.

The line is the mean over the seeds, each dot a seed, so that a gain that one seed made is seen.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.agbn.accuracy.rows import CURVES, PAPER, gains

Results = dict[str, Any]


def draw(results: Results, path: Path) -> None:
    """Draw the gains in test and in training accuracy to the PNG file `path`."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    batches = results["sizes"]["batch"]
    for axis, (curve, what) in zip(figure.subplots(1, 2), CURVES.items(), strict=True):
        for number, devices in enumerate(results["sizes"]["devices"]):
            color = f"C{number}"
            found = [gains(results, batch, devices, curve) for batch in batches]
            axis.plot(batches, list(map(fmean, found)), color=color, label=f"{devices} devices")
            for batch, values in zip(batches, found, strict=True):
                axis.plot([batch] * len(values), values, ".", color=color, alpha=0.5)
        for (batch, devices), gain in PAPER.items() if curve == "train_accuracy" else ():
            label = f"the paper's, {devices} devices"
            color = f"C{results['sizes']['devices'].index(devices)}"
            axis.plot([batch], [gain], "x", color=color, label=label)
        axis.axhline(0, color="0.6", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="total batch size", ylabel=f"gain in {what} accuracy (points)")
        axis.set_xticks(batches, list(map(str, batches)))
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
