"""The results of whole steps, as tables in markdown."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.ucudnn.models import LARGE, NETWORKS

Results = dict[str, Any]
GOAL = 0.98
"""Of torch's speed, for networks whose layers all have a fast path in torch."""


def conv_networks_summary(results: Results) -> str:
    """How many medians reach the goal, in words."""
    usual = [
        one["ratio"][1]
        for found in results["modes"].values()
        for name, layouts in found["networks"].items()
        for one in layouts.values()
        if name != LARGE
    ]
    if not usual:
        return "No usual network was measured."
    reached = sum(ratio >= GOAL for ratio in usual)
    return (
        f"{reached} of {len(usual)} medians of usual networks are {GOAL} or more; their median is "
        f"{median(usual):.3f}, the least {min(usual):.3f} and the largest {max(usual):.3f}."
    )


def conv_networks(results: Results) -> str:
    """A line for each network, malloc mode and layout."""
    rows = []
    for mode, found in results["modes"].items():
        for name, layouts in found["networks"].items():
            for layout, one in layouts.items():
                torchs, ours = (f"{s:.3g}" for s in one["seconds"])
                low, middle, high = one["ratio"]
                row = [NETWORKS[name].title, str(NETWORKS[name].few), mode, layout, torchs, ours]
                row += [f"{middle:.3f} ({low:.3f} to {high:.3f})"]
                row += [f"{one['divided']} of {one['kernels']}", f"{one['error']:.1e}"]
                rows.append([*row, f"{one['choosing']:.0f}"])
    head = ["network", "samples", "malloc", "layout", "torch, s", "ours, s", "torch / ours"]
    head += ["kernels that are not torch's", "gradients differ by", "first step inside, s"]
    return markdown(head, rows)
