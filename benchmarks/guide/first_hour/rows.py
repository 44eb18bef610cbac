"""Tables of the first hour: lines that changed in each loop, and what comes of habits."""

from typing import Any

from benchmarks.guide.first_hour.run import LOOPS
from benchmarks.mbs.rows import markdown

Results = dict[str, Any]


def first_hour(results: Results) -> str:
    """Lines taken away and added, and the largest relative difference of a loss."""
    rows = [
        [LOOPS[name], str(one["removed"]), str(one["added"]), f"{one['difference']:.0e}"]
        for name, one in results["loops"].items()
    ]
    head = ["loop", "lines taken away", "lines added", "largest difference of a loss"]
    return markdown(head, rows)


def habits(results: Results) -> str:
    """Each call, and its error."""
    rows = []
    for one in results["calls"]:
        text = one["text"].replace("|", "\\|")
        rows.append([f"`{one['call']}`", f"{one['error']}: {text}" if text else "works"])
    return markdown(["call", "outcome"], rows)
