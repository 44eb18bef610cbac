"""The table of first steps under a budget."""

from typing import Any

from benchmarks.mbs.rows import Results, markdown


def first_step(results: Results) -> str:
    """First step, second start and fifty steps of each network within each budget."""
    head = ["network", "budget", "first step, s", "later step, s", "(first - 1 s) / later"]
    head += ["second start / later", "settled at step", "50 steps / best fixed size"]
    rows = [
        [name, f"{float(share):.0%}", *_cells(found, results["steps"])]
        for name, budgets in results["networks"].items()
        for share, found in budgets.items()
    ]
    return markdown(head, rows)


def _cells(found: dict[str, Any], steps: int) -> list[str]:
    if "ended" in found:
        return [f"not ended after {found['ended']} s", *[""] * 5]
    later = found["later"]
    return [
        f"{found['first']:.2f}",
        f"{later:.3f}",
        f"{max(0.0, found['first'] - 1) / later:.1f}",
        f"{found['second_start'] / later:.1f}",
        str(found["settled"]),
        f"{found['total'] / (steps * found['best']):.2f}",
    ]
