"""Tables of the first hour: lines that changed in each loop, and what comes of habits."""

from typing import Any

from benchmarks.guide.first_hour.run import LOOPS
from benchmarks.mbs.rows import markdown

Results = dict[str, Any]


def first_hour(results: Results) -> str:
    """Lines taken away and added, how it was divided, and the largest difference of a loss."""
    rows = []
    for name in LOOPS:
        one = results["loops"][name]
        lines = str(one["removed"]), str(one["added"])
        divided = one["mechanism"], str(one["micro_batches"])
        rows.append([LOOPS[name], *lines, *divided, f"{one['difference']:.0e}"])
    head = ["lines taken away", "lines added", "mechanism", "micro-batches"]
    return markdown(["loop", *head, "largest difference of a loss"], rows)


def habits(results: Results) -> str:
    """Each call, and its error."""
    rows = []
    for one in results["calls"]:
        text = one["text"].replace("|", "\\|")
        rows.append([f"`{one['call']}`", f"{one['error']}: {text}" if text else "works"])
    return markdown(["call", "outcome"], rows)
