"""Figures 2 and 3 as tables in markdown."""

from typing import Any

from anybatch.core.units import show_bytes
from benchmarks.mbs.rows import markdown

Results = dict[str, Any]


def guide_figures(results: Results) -> str:
    """Figure 2: a line for each mini-batch."""
    head = ["samples", "workspace left", "samples a second, divided", "in one piece", "torch's own"]
    rows = [
        [
            str(one["samples"]),
            show_bytes(one["workspace"]),
            f"{one['anybatch']:.1f}",
            f"{one['undivided']:.1f}",
            f"{one['torch']:.1f}",
        ]
        for one in results["figure 2"]
    ]
    return markdown(head, rows)


def guide_figures_errors(results: Results) -> str:
    """Figure 3: a line for each mini-batch, the test error at some epochs."""
    curves = results["figure 3"]
    last = len(next(iter(curves.values())))
    shown = sorted({1, max(1, last // 4), max(1, last // 2), last})
    rows = [
        [batch, *(f"{curve[epoch - 1]:.3f}" for epoch in shown)] for batch, curve in curves.items()
    ]
    return markdown(["mini-batch", *(f"test error, epoch {epoch}" for epoch in shown)], rows)
