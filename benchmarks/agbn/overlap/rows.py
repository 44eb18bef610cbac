"""The results of gradients summed during backward as tables in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
SHARES = ("waiting", "summing", "last backward")
WAYS = ("by hand, nothing sent", "by hand, during", "engine, during")


def overlap(results: Results) -> str:
    """A line for each step and link; the speed beside the same loop that sends after backward."""
    rows = []
    for mode, found in results["modes"].items():
        for case, one in found["cases"].items():
            for link, ways in one["links"].items():
                cells = [case, link, mode]
                for way in WAYS:
                    low, middle, high = ways[way]["speed"]
                    cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
                rows.append(cells)
    return markdown(["step of a rank", "link", "malloc", *WAYS], rows)


def overlap_shares(results: Results) -> str:
    """What the sum of gradients takes of a step of the engine, after backward."""
    rows = [
        [case, mode, *(f"{one['profile'][share]:.3f}" for share in SHARES), str(one["rounds"])]
        for mode, found in results["modes"].items()
        for case, one in found["cases"].items()
    ]
    return markdown(["step of a rank", "malloc", *SHARES, "rounds"], rows)
