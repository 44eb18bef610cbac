"""The tables of accelerate's loop."""

from typing import Any

from benchmarks.integrations.loops_rows import errors, overhead


def accelerate(results: dict[str, Any]) -> str:
    """The worst error of a step's gradient, by problem and way."""
    ways = {"accumulated": "accumulated", "counted": "counted", "anybatch": "anybatch"}
    return errors(results, ways)


def accelerate_overhead(results: dict[str, Any]) -> str:
    """What a step takes."""
    return overhead(results)
