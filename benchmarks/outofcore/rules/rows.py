"""The table of rules, from its results file to markdown."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.mbs.rows import markdown

SETS = {
    "furthest next use (Belady)": ("furthest",),
    "best hidden": ("hidden",),
    "best hidden at both ends": ("ends",),
    "furthest next use, best hidden": ("furthest", "hidden"),
    "furthest next use, ends": ("furthest", "ends"),
    "best hidden, ends": ("hidden", "ends"),
    "all three": ("furthest", "hidden", "ends"),
    "the paper's window, four sizes": ("window 0/8", "window 2/8", "window 4/8", "window 8/8"),
}
KINDS = {"paper": "16 GiB, three machines", "budgets": "other budgets and links"}


def rules(results: dict[str, Any]) -> str:
    """A row for each set of rules."""
    rows = []
    for title, names in SETS.items():
        row = [title]
        for kind in KINDS:
            found = [_slower(one["seconds"], names) for one in results[kind]]
            row += [f"{median(found):.4f}", f"{max(found):.3f}"]
            row.append(f"{sum(one > 1.01 for one in found)} of {len(found)}")
        rows.append(row)
    head = [f"{what}, {kind}" for kind in KINDS.values() for what in WHATS]
    return markdown(["rules", *head], rows)


WHATS = ("median", "worst", "slower by more than 1%")


def _slower(seconds: dict[str, float], names: tuple[str, ...]) -> float:
    """Return the seconds of the fastest of some rules, relative to the fastest of all."""
    mine = [seconds[name] for name in names if name in seconds]
    return min(mine) / min(seconds.values())
