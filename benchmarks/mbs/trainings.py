"""A real training, run as the command runs it, and the figures of its run folder.

A figure at the end says little about a training, and a curve without its settings less. Kept here
are the recipe, every epoch's losses and metrics, the time, and for scale the best figure that a
constant answer reaches on the same test set. The figure of a run is that of its last epoch: the
best one would have been chosen by looking at the test set.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from anybatch.cli.build import build
from anybatch.cli.images import Unreadable
from anybatch.cli.metrics import make_metric
from anybatch.cli.progress import make_progress
from anybatch.cli.settings import Settings
from anybatch.cli.train import train
from benchmarks.environment import environment
from benchmarks.mbs.training_rows import CURVES, HEAD, metric_name, summary_row
from benchmarks.results import console

RUNS = Path("runs")
RECIPE = "model optimizer lr momentum weight_decay schedule loss epochs crop pad".split()
SUMMARY = "epochs steps images parameters seconds train_seconds last train_last best best_epoch"
Results = dict[str, Any]


def trainings(what: str, settings: Settings, folder: Path, seeds: Sequence[int]) -> Results:
    """Train once for each seed, into `folder`-SEED, and return the results; an old run is replaced.

    `what` names the data in the tables.
    """
    runs = []
    for seed in seeds:
        run = folder.with_name(f"{folder.name}-{seed}")
        train(replace(settings, seed=seed, out=run, overwrite=True), make_progress(console))
        runs.append(record(run))
    found = {
        "what": what,
        "seeds": list(seeds),
        "constant": constant(settings),
        "environment": environment(),
        "sizes": {"batch": settings.batch_size, "micro_batch": settings.micro_batch},
        "recipe": _recipe(folder.with_name(f"{folder.name}-{seeds[0]}"), settings),
        "runs": runs,
    }
    console.print(shown(found))
    return found


def record(run: Path) -> Results:
    """Return the figures of a run folder: the seed, the summary's figures, a list per curve."""
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["kind"] == "epoch"]
    metric = summary["metric"]
    curves = {name: [row[name.replace("metric", metric)] for row in rows] for name in CURVES}
    figures = {name: summary[name] for name in ("metric", "seed", *SUMMARY.split())}
    return figures | {"train": summary["train_samples"], "test": summary["test_samples"]} | curves


def constant(settings: Settings) -> float:
    """Return the test figure of the best constant answer.

    It is the largest class, or foreground in every pixel.
    """
    parts = build(settings)
    views = [parts.test[0, index] for index in range(len(parts.test))]
    targets = torch.stack([view[1] for view in views if not isinstance(view, Unreadable)])
    metric = make_metric(parts.data.task)
    if parts.data.task == "segmentation":
        answers = torch.ones_like(targets)
    else:
        largest = torch.bincount(targets, minlength=parts.data.num_classes).argmax()
        answers = torch.zeros(len(targets), parts.data.num_classes)
        answers[:, largest] = 1
    metric.update(answers, targets)
    return metric.value()


def _recipe(run: Path, settings: Settings) -> Results:
    recipe = json.loads((run / "config.json").read_text())["recipe"]
    used = {name: recipe[name] for name in RECIPE if recipe[name] is not None}
    if recipe["optimizer"] != "sgd":
        del used["momentum"]
    flipped = settings.data != "digits" if settings.flip is None else settings.flip
    return used | {"crops of an image": settings.crops, "flip": flipped, "norm": settings.norm}


def shown(results: Results) -> Table:
    """Return the row of README's table, upright, for a terminal."""
    table = Table(show_header=False)
    for name, cell in zip(HEAD, summary_row(results), strict=True):
        table.add_row(name, cell)
    return table


def draw(results: Results, path: Path) -> None:
    """Draw the curves of all seeds, and the constant answer as a line, to the PNG file `path`."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for number, run in enumerate(results["runs"]):
        epochs = range(1, run["epochs"] + 1)
        for axis, measure in zip(axes, ("loss", "metric"), strict=True):
            for color, part in (("C0", "train"), ("C1", "test")):
                style = ("-", "--", ":")[number % 3]
                label = f"{part}, seed {run['seed']}"
                axis.plot(epochs, run[f"{part}_{measure}"], style, color=color, label=label)
    axes[1].axhline(results["constant"], color="0.6", label="constant answer")
    for axis, name in zip(axes, ("loss", metric_name(results)), strict=True):
        axis.set(xlabel="epoch", ylabel=name)
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
