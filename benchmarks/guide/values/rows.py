"""What steps held whose memory depends on values, as a table in markdown."""

from pathlib import Path

from benchmarks.mbs.rows import Results, markdown
from benchmarks.results import read

BEFORE = Path(__file__).with_name("before.json")
"""The same steps before any but the first was measured."""


def guide_values(results: Results) -> str:
    """A line for each network, now and before later steps were watched."""
    head = ["tokens chosen by", "", "first step over", "later steps over", "most held later"]
    head += ["largest error", "seconds with a budget / without"]
    before = {row["way"]: row for row in (read(BEFORE) or {"rows": []})["rows"]}
    lines = []
    for row in results["rows"]:
        for which, found in (("now", row), ("before", before.get(row["way"]))):
            if found is not None:
                figures = _figures(found, results["budget"])
                lines.append([row["way"], which, *figures, f"{found['cost']:.2f}"])
    return markdown(head, lines)


def _figures(row: Results, budget: int) -> list[str]:
    ran = [one for one in row["steps"] if "held" in one]
    first = next((at for at, one in enumerate(ran, 1) if one["held"] > budget), len(ran))
    later = [one["held"] for one in ran[first:]]
    over = sum(held > budget for held in later)
    most = max(later, default=0) / budget
    worst = max(one["error"] for one in ran)
    return [str(first), f"{over} of {len(later)}", f"{most:.2f} of the budget", f"{worst:.0e}"]
