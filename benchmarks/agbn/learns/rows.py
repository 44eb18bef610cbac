"""The results of the three arms as tables in markdown, and what follows from them in words."""

from statistics import fmean, stdev
from typing import Any

from benchmarks.mbs.rows import figure, markdown

Results = dict[str, Any]
Run = dict[str, Any]
ARMS = {
    "undivided": "torch alone, undivided",
    "exact": 'anybatch, `batchnorm="exact"`',
    "local": 'anybatch, `batchnorm="local"`',
}

MEASURES = {"worst": "the furthest tensor", "all": "all tensors together"}
CURVES = {  # in words, scale, digits
    "test_accuracy": ("test accuracy (%)", 100, 1),
    "test_loss": ("test loss", 1, 3),
    "train_accuracy": ("training accuracy (%)", 100, 1),
    "train_loss": ("training loss", 1, 3),
}


def of(results: Results, arm: str) -> list[Run]:
    """The runs of an arm, in the order of the seeds."""
    return sorted((run for run in results["runs"] if run["arm"] == arm), key=lambda r: r["seed"])


def last(results: Results, arm: str, curve: str) -> list[float]:
    """The last epoch's figure of every seed."""
    return [run[curve][-1] for run in of(results, arm)]


def spread(values: list[float], scale: float = 100, digits: int = 2) -> str:
    """Mean and sample deviation."""
    scaled = [scale * value for value in values]
    more = f" ± {stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{fmean(scaled):.{digits}f}{more}"


def summary(results: Results) -> str:
    """A line for each arm: the last epoch's figures over the seeds, its peak and its time."""
    rows = []
    undivided = results["peaks"]["undivided"]
    for arm, name in ARMS.items():
        seconds = [run["step_seconds"] for run in of(results, arm)]
        rows.append(
            [
                name,
                spread(last(results, arm, "test_accuracy")),
                spread(last(results, arm, "test_loss"), 1, 3),
                spread(last(results, arm, "train_accuracy")),
                spread(last(results, arm, "train_loss"), 1, 3),
                f"{results['peaks'][arm] / 1e6:.1f} ({results['peaks'][arm] / undivided:.3f})",
                f"{min(seconds):.2f}",
            ]
        )
    head = ["arm", "test accuracy (%)", "test loss", "training accuracy (%)", "training loss"]
    return markdown([*head, "peak of a step, MB (of undivided)", "seconds a step"], rows)


def learns(results: Results) -> str:
    """Whether the arms are the same training, and their test accuracy by epoch."""
    return "\n\n".join([same(results), ends(results), by_epoch(results)])


def same(results: Results) -> str:
    """How far exact and local are from undivided after the first steps, and how far they may be."""
    found, rows = results["agreement"], []
    for dtype in ("float64", "float32"):
        row = found[dtype]
        for arm in ("exact", "local"):
            cells = []
            for measure in MEASURES:
                distance, limit = row[arm][measure], row["allowed"][measure]
                verdict = "within" if distance <= limit else "beyond"
                cells.append(f"{figure(distance)} of {figure(limit)}: {verdict}")
            rows.append([f"{ARMS[arm]}, {dtype}", *cells])
        if dtype == "float32":
            rows.append(_to_float64(found))
    first = f"distance after {found['steps']} steps at batch {found['batch']}, of what is allowed"
    return markdown([first, *MEASURES.values()], rows)


def _to_float64(found: Results) -> list[str]:
    there, cells = found["to_float64"], []
    for measure in MEASURES:
        low, high = figure(there["least"][measure]), figure(there["most"][measure])
        ours = figure(there["exact"][measure])
        cells.append(f"{ours}; undivided in {found['orders']} orders {low} to {high}")
    return [f"{ARMS['exact']}, float32, from undivided in float64", *cells]


def ends(results: Results) -> str:
    """Whether each arm's mean at the end lies within the undivided seeds, in words."""
    lines = []
    for curve, (what, scale, digits) in CURVES.items():
        undivided = last(results, "undivided", curve)
        low, high = min(undivided), max(undivided)
        for arm in ("exact", "local"):
            values = last(results, arm, curve)
            gaps = [value - other for value, other in zip(values, undivided, strict=True)]
            within = "within" if low <= fmean(values) <= high else "outside"
            lines.append(
                f"- {ARMS[arm]}, {what}: {spread(gaps, scale, digits)} from undivided, paired by "
                f"seed; its mean is {within} the undivided seeds' {scale * low:.{digits}f} to "
                f"{scale * high:.{digits}f}."
            )
    return "\n".join(lines)


def by_epoch(results: Results) -> str:
    """Test accuracy of every arm after each epoch, over the seeds."""
    head = ["after epoch", *(f"test accuracy (%), {name}" for name in ARMS.values())]
    rows = []
    for index in range(results["recipe"]["epochs"]):
        found = [[run["test_accuracy"][index] for run in of(results, arm)] for arm in ARMS]
        rows.append([str(index + 1), *map(spread, found)])
    return markdown(head, rows)
