"""The results of the four arms as a table in markdown."""

from statistics import fmean, stdev
from typing import Any

from benchmarks.mbs.rows import figure, markdown

Results = dict[str, Any]
ARMS = {
    "undivided": "undivided",
    "anybatch": "anybatch, micro-batches of {micro_batch}",
    "by hand": "by hand, micro-batches of {micro_batch}",
    "by hand, by length": "by hand, rows sorted by length",
}


def language(results: Results) -> str:
    """A line for each arm: the loss at the end, its distance, and the error of its gradient."""
    rows = []
    undivided = _ends(results, "undivided")
    for arm, name in ARMS.items():
        ends = _ends(results, arm)
        differences = [a - b for a, b in zip(ends, undivided, strict=True)]
        rows.append(
            [
                name.format(**results["size"]),
                _spread(ends),
                "-" if arm == "undivided" else _spread(differences),
                *(_errors(results, when, arm) for when in ("first", "last")),
            ]
        )
    head = ["arm", "validation loss a token", "from undivided, paired by seed"]
    head += ["error of the first gradient", "error of one after the training"]
    return markdown(head, rows)


def _ends(results: Results, arm: str) -> list[float]:
    runs = sorted((r for r in results["runs"] if r["arm"] == arm), key=lambda r: r["seed"])
    return [run["losses"][-1] for run in runs]


def _spread(values: list[float]) -> str:
    more = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{fmean(values):.4f}{more}"


def _errors(results: Results, when: str, arm: str) -> str:
    if arm == "undivided":
        return "-"
    return figure(max(one[arm] for one in results["errors"][when]))
