"""Figure 4 as a table in markdown, and what of the paper it bears out, from the results."""

from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
PAPER = {(8, 4): 2.1, (8, 8): 4.4}  # (batch, devices): gain in training accuracy, points
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 97.5 %, by degrees of freedom
CURVES = {"test_accuracy": "test", "train_accuracy": "training"}


def ends(results: Results, batch: int, devices: int, curve: str) -> list[float]:
    """The last epoch's accuracy of every seed, in per cent, in the order of the seeds."""
    runs = [run for run in results["runs"] if (run["batch"], run["devices"]) == (batch, devices)]
    return [100 * run[curve][-1] for run in sorted(runs, key=lambda run: run["seed"])]


def gains(results: Results, batch: int, devices: int, curve: str) -> list[float]:
    """Global less local of every seed, in points."""
    pairs = (ends(results, batch, each, curve) for each in (1, devices))
    return [shared - own for shared, own in zip(*pairs, strict=True)]


def spread(values: list[float], sign: str = "") -> str:
    """Mean and sample deviation."""
    more = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.1f}{more}"


def accuracy(results: Results) -> str:
    """A line for each batch size and number of devices, and what follows from all of them."""
    sizes, rows = results["sizes"], []
    for devices in sizes["devices"]:
        for batch in sizes["batch"]:
            cells = [str(devices), str(batch), str(batch // devices)]
            for curve in CURVES:
                both = (ends(results, batch, each, curve) for each in (1, devices))
                cells += map(spread, both)
                cells.append(spread(gains(results, batch, devices, curve), "+"))
            theirs = PAPER.get((batch, devices))
            rows.append([*cells, "" if theirs is None else f"{theirs:+.1f}"])
    head = ["devices", "batch", "samples a device"]
    for what in CURVES.values():
        head += [f"{what} accuracy, global (%)", "local (%)", "gain"]
    words = [size_of(results), *verdicts(results)]
    return "\n\n".join(
        [markdown([*head, "gain in the paper"], rows), "\n".join(f"- {line}" for line in words)]
    )


def size_of(results: Results) -> str:
    """How long the trainings were, how good they became, and what the table took, in words."""
    lowest = {curve: min(100 * run[curve][-1] for run in results["runs"]) for curve in CURVES}
    figures = " and ".join(f"{lowest[curve]:.1f} % ({what})" for curve, what in CURVES.items())
    return (
        f"{len(results['seeds'])} seeds, {results['recipe']['epochs']} epochs; the lowest accuracy "
        f"of any training is {figures}, chance is 10 %. The trainings took "
        f"{results['seconds'] / 60:.0f} minutes, at most {results['processes']} at a time."
    )


def verdicts(results: Results) -> list[str]:
    """The paper's figures and its "monotonously", each beside what was found."""
    lines = []
    for devices in results["sizes"]["devices"]:
        for curve, what in CURVES.items():
            theirs = [size for size in PAPER if size[1] == devices]
            lines += [_figure(results, *size, curve, what) for size in theirs]
            lines.append(_fall(results, devices, curve, what))
    return lines


def _figure(results: Results, batch: int, devices: int, curve: str, what: str) -> str:
    found, theirs = gains(results, batch, devices, curve), PAPER[batch, devices]
    wide = _interval(found)
    borne = abs(fmean(found) - theirs) <= wide
    return (
        f"{devices} devices, batch {batch}, {what} accuracy: {fmean(found):+.1f} points, in a 95 % "
        f"interval of ± {wide:.1f} over {len(found)} seeds; the paper's {theirs:+.1f} "
        f"{'lies in it' if borne else 'lies outside: it does not reproduce here'}."
    )


def _fall(results: Results, devices: int, curve: str, what: str) -> str:
    batches = results["sizes"]["batch"]
    means = [fmean(gains(results, batch, devices, curve)) for batch in batches]
    rises = [
        f"{first} to {second}"
        for (first, before), (second, after) in pairwise(zip(batches, means, strict=True))
        if after >= before
    ]
    clear = [
        str(batch)
        for batch in batches
        if abs(fmean(found := gains(results, batch, devices, curve))) > _interval(found)
    ]
    fall = "falls at every doubling" if not rises else f"does not fall from {', '.join(rises)}"
    where = f"at batch {', '.join(clear)}" if clear else "at no batch size"
    return (
        f"{devices} devices, {what} accuracy: the mean gain {fall} of the batch (the paper: "
        f"monotonously); its 95 % interval leaves out 0 {where}."
    )


def _interval(values: list[float]) -> float:
    if len(values) < 2:
        return float("inf")
    student = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    return student * stdev(values) / sqrt(len(values))
