"""The tables of Lightning's Trainer."""

from typing import Any

from benchmarks.integrations.loops_rows import errors, overhead


def lightning(results: dict[str, Any]) -> str:
    """The worst error of a step's gradient, by problem and way."""
    return errors(results, {"accumulated": "accumulated", "anybatch": "anybatch"})


def lightning_overhead(results: dict[str, Any]) -> str:
    """What a step takes."""
    return overhead(results)
