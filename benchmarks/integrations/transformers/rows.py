"""The tables of the Trainer: errors by model, and what a step costs."""

from typing import Any

from benchmarks.mbs.rows import figure, markdown


def transformers(results: dict[str, Any]) -> str:
    """A line for each model: the worst error of its gradient, by way."""
    head = ["model", "transformers, undivided", "transformers, accumulated", "anybatch"]
    rows = [
        [name, *(figure(found[way]) for way in ("undivided", "accumulated", "anybatch"))]
        for name, found in results["errors"].items()
    ]
    return markdown(head, rows)


def transformers_overhead(results: dict[str, Any]) -> str:
    """A line for each training: seconds of a step of ours, as a share of theirs."""
    head = ["training", "seconds a step", "anybatch: wall (lowest to highest)", "processor"]
    rows = [
        [
            name,
            f"{found['seconds']:.3f}",
            f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})",
            f"{found['processor']:.3f}",
        ]
        for name, found in results["overhead"].items()
    ]
    return markdown(head, rows)
