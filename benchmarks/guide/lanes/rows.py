"""Peaks of lanes, foreseen and held, as a table in markdown."""

from statistics import median
from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
WAYS = ("while it waits", "while it runs")


def guide_lanes(results: Results) -> str:
    """A line for each training and for when its lanes leave: how far above it was foreseen."""
    lines = []
    names = sorted({row["training"] for row in results["rows"]})
    for name in names:
        for way in WAYS:
            rows = [r for r in results["rows"] if (r["training"], r["leaves"]) == (name, way)]
            if rows:
                lines.append([name, way, *_figures(rows)])
    head = ["training", "a lane leaves", "plans", "least above", "median", "most", "over budget"]
    return markdown(head, lines)


def _figures(rows: list[Results]) -> list[str]:
    above = [row["predicted"] / row["held"] - 1 for row in rows]
    over = sum(row["held"] > row["budget"] for row in rows)
    figures = (min(above), median(above), max(above))
    return [str(len(rows)), *(f"{figure:.1%}" for figure in figures), str(over)]
