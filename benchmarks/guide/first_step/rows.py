"""The table of first steps under a budget."""

from pathlib import Path
from typing import Any

from benchmarks.mbs.rows import Results, markdown
from benchmarks.results import read

BEFORE = Path(__file__).with_name("before.json")
"""The same cells, as far as they ran, before every trial was a step that trains."""


def first_step(results: Results) -> str:
    """First step, second start and fifty steps of each network within each budget."""
    head = ["network", "budget", "first step, s", "later step, s", "(first - 1 s) / later"]
    head += ["second start / later", "settled at step", "50 steps / best fixed size"]
    head += ["before: first / later", "before: 50 steps / best"]
    before = (read(BEFORE) or {"networks": {}})["networks"]
    rows, steps = [], results["steps"]
    for name, budgets in results["networks"].items():
        for share, found in budgets.items():
            earlier = _earlier(before.get(name, {}).get(share), steps)
            rows.append([name, f"{float(share):.0%}", *_cells(found, steps), *earlier])
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
        _ratio(found, steps),
    ]


def _earlier(found: dict[str, Any] | None, steps: int) -> list[str]:
    if found is None:
        return ["-", "-"]
    if "ended" in found:
        return [f"not ended after {found['ended']} s", ""]
    return [f"{found['first'] / found['later']:.0f}", _ratio(found, steps)]


def _ratio(found: dict[str, Any], steps: int) -> str:
    return f"{found['total'] / (steps * found['best']):.2f}"
