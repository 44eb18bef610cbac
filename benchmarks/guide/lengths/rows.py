"""The table of trainings on many lengths."""

from pathlib import Path

from benchmarks.mbs.rows import Results, markdown
from benchmarks.results import read

BEFORE = Path(__file__).with_name("before.json")
"""The same trainings before later lengths were planned for less."""


def guide_lengths(results: Results) -> str:
    """A line for each count and budget: all seconds by those of the loop by hand."""
    head = ["batches", "budget", "by hand, s", "in all, s", "ratio", "without the first step"]
    head += ["first step, s", "second slowest, s", "before: ratio", "before: without the first"]
    earlier = {
        (one["batches"], one["budget"]): one for one in (read(BEFORE) or {"rows": []})["rows"]
    }
    lines = []
    for row in results["rows"]:
        before = earlier.get((row["batches"], row["budget"]))
        budget = f"{row['budget'] / 2**20:.0f} MiB"
        seconds = [f"{row['first']:.1f}", f"{row['slow'][0]:.1f}"]
        hand = f"{min(row['by_hand'].values()):.1f}"
        line = [str(row["batches"]), budget, hand, f"{row['total']:.1f}", *_ratios(row), *seconds]
        lines.append([*line, *(["-", "-"] if before is None else _ratios(before))])
    return markdown(head, lines)


def _ratios(row: Results) -> list[str]:
    hand, count = min(row["by_hand"].values()), row["batches"]
    rest = (row["total"] - row["first"]) / (hand * (count - 1) / count)
    return [f"{row['total'] / hand:.2f}", f"{rest:.2f}"]
