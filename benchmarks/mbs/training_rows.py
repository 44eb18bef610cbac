"""The results of a recorded training as rows of text, for a page and for a terminal."""

from typing import Any

HEAD = [
    *("training", "batch", "micro-batch", "epochs", "steps", "test figure", "constant answer"),
    "seconds",
]
CURVES = ("train_loss", "test_loss", "train_metric", "test_metric")
Results = dict[str, Any]


def summary_row(results: Results) -> list[str]:
    """What was trained, how, the test figure after the last epoch, and seconds: of each seed."""
    runs, sizes = results["runs"], results["sizes"]
    figures = " and ".join(f"{run['last']:.3f}" for run in runs)
    return [
        f"{results['recipe']['model']} on {runs[0]['train']:,} {results['what']}",
        *(str(sizes["batch"]), str(sizes["micro_batch"])),
        *(str(runs[0]["epochs"]), str(runs[0]["steps"])),
        f"{metric_name(results)} {figures}",
        f"{results['constant']:.3f}",
        " and ".join(f"{run['seconds']:.0f}" for run in runs),
    ]


def epoch_rows(results: Results) -> list[list[str]]:
    """A head, then about ten epochs of each seed, the first and the last among them."""
    metric, several = metric_name(results), len(results["runs"]) > 1
    rows = [["after", "training loss", "test loss", f"training {metric}", f"test {metric}"]]
    for run in results["runs"]:
        last = run["epochs"]
        for epoch in sorted({1, last, *range(0, last, max(1, last // 10))} - {0}):
            found = [run[name][epoch - 1] for name in CURVES]
            seed = f"seed {run['seed']}, " if several else ""
            rows.append([f"{seed}epoch {epoch}", *(f"{value:.3f}" for value in found)])
    return rows


def metric_name(results: Results) -> str:
    """The test figure's name as a reader knows it."""
    name: str = results["runs"][0]["metric"]
    return {"iou": "IoU"}.get(name, name)
