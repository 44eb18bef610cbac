"""The tables of loops beside ours: errors by problem and number of processes, and seconds."""

from typing import Any

from benchmarks.mbs.rows import figure, markdown

PROCESSES = {"1": "one process", "2": "two"}


def errors(results: dict[str, Any], ways: dict[str, str]) -> str:
    """A line for each problem: the worst error of its gradient, by processes and way."""
    found = results["errors"]
    head = [f"{shown}, {PROCESSES[n]}" for n in found for shown in ways.values()]
    rows = [
        [name, *(figure(found[n][name][way]) for n in found for way in ways)]
        for name in next(iter(found.values()))
    ]
    return markdown(["a step with", *head], rows)


def overhead(results: dict[str, Any]) -> str:
    """A line for each training: seconds of a step of ours, as a share of theirs."""
    head = ["training", "processes", "seconds a step"]
    head += ["anybatch: wall (lowest to highest)", "processor"]
    head.append("more, ms a step")
    rows = [
        [
            name,
            n,
            f"{one['seconds']:.3f}",
            f"{one['ratio']:.3f} ({one['low']:.3f} to {one['high']:.3f})",
            f"{one['processor']:.3f}",
            f"{1000 * one['more']:.1f}",
        ]
        for n, found in results["speed"].items()
        for name, one in found.items()
    ]
    return markdown(head, rows)
