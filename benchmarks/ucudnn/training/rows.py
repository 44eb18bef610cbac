"""The results of whole trainings as tables in markdown, and what follows from them in words."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from benchmarks.agbn.learns.rows import MEASURES, spread
from benchmarks.mbs.rows import figure, markdown

Results = dict[str, Any]
Run = dict[str, Any]
ENDS = {  # in words, scale, digits
    "test_accuracy": ("test accuracy (%)", 100, 1),
    "test_loss": ("test loss", 1, 3),
    "loss": ("training loss", 1, 3),
}


def conv_training(results: Results) -> str:
    """A line for each training and arm: how long it took, and where it ended."""
    rows = []
    for found in results["tasks"].values():
        for arm in ("torch", "ours"):
            runs = of(found, arm)
            row = [found["title"], arm, ", ".join(f"{run['wall']:.0f}" for run in runs)]
            row += [f"{min(run['step'] for run in runs):.3f}", f"{runs[0]['first']:.1f}"]
            row.append(times(found) if arm == "ours" else "")
            for end, (_, scale, digits) in ENDS.items():
                row.append(spread([run[end][-1] for run in runs], scale, digits))
            rows.append(row)
    head = ["training", "convolutions", "wall of each seed, s", "a step, s", "the first, s"]
    head += ["times as fast: a step (wall)", *(label for label, _, _ in ENDS.values())]
    return markdown(head, rows)


def times(found: Results) -> str:
    """How many times as fast ours is: the median step and the wall, medians over the seeds."""
    pairs = list(zip(of(found, "torch"), of(found, "ours"), strict=True))
    step, wall = (median([a[key] / b[key] for a, b in pairs]) for key in ("step", "wall"))
    return f"{step:.2f} ({wall:.2f})"


def of(found: Results, arm: str) -> list[Run]:
    """The runs of an arm, in the order of the seeds."""
    return sorted((run for run in found["runs"] if run["arm"] == arm), key=lambda r: r["seed"])


def conv_training_same(results: Results) -> str:
    """Whether both arms are the same training: the first steps, then the ends."""
    rows, lines = [], list[str]()
    for found in results["tasks"].values():
        same = found["agreement"]
        for dtype in ("float64", "float32"):
            row = [f"{found['title']}, {dtype}", str(same[dtype]["divided"])]
            for measure in MEASURES:
                distance, limit = same[dtype]["apart"][measure], same[dtype]["allowed"][measure]
                verdict = "within" if distance <= limit else "beyond"
                row.append(f"{figure(distance)} of {figure(limit)}: {verdict}")
            rows.append(row)
        rows.append(_to_float64(found))
        lines += ends(found)
    head = [f"distance after {same['steps']} steps, of what is allowed"]
    head += ["kernels that are not torch's", *MEASURES.values()]
    return "\n\n".join([markdown(head, rows), "\n".join(lines)])


def _to_float64(found: Results) -> list[str]:
    """How far float32 is from torch in float64: ours, and torch in all its orders."""
    same, cells = found["agreement"], list[str]()
    for measure in MEASURES:
        ours, low, high = (same["to_float64"][key][measure] for key in ("ours", "least", "most"))
        label = f"torch in {same['orders']} orders {figure(low)} to {figure(high)}"
        cells.append(f"{figure(ours)}; {label}")
    title = f"{found['title']}, float32, from torch in float64"
    return [title, str(same["float32"]["divided"]), *cells]


def ends(found: Results) -> list[str]:
    """Whether our mean at the end lies within torch's seeds, in words."""
    lines = []
    for end, (label, scale, digits) in ENDS.items():
        torchs, ours = ([run[end][-1] for run in of(found, arm)] for arm in ("torch", "ours"))
        gaps = [a - b for a, b in zip(ours, torchs, strict=True)]
        low, high = min(torchs), max(torchs)
        within = "within" if low <= fmean(ours) <= high else "outside"
        lines.append(
            f"- {found['title']}, {label}: {spread(gaps, scale, digits)} from torch, paired by "
            f"seed; the mean is {within} torch's seeds' {scale * low:.{digits}f} to "
            f"{scale * high:.{digits}f}."
        )
    return lines
