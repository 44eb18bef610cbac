"""The table of the memory monger, from its results file to markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

GIB = 1 << 30
PAPER = {"in memory": "3", "cheap": "8, with both", "stretches": "8, with both"}


def monger(results: dict[str, Any]) -> str:
    """A row for each way."""
    rows = [
        [
            way,
            str(one["batch"]),
            f"{one['bytes'] / GIB:.1f} of {results['budget'] / GIB:.0f}",
            f"{one['seconds']:.2f}",
            PAPER.get(way, ""),
        ]
        for way, one in sorted(results["ways"].items(), key=lambda pair: pair[1]["batch"])
    ]
    return markdown(["way", "largest batch", "GiB", "seconds", "paper's batch"], rows)
