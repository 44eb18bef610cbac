"""The seconds of whole runs, as a table in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown


def guide_pace(results: dict[str, Any]) -> str:
    """A line for each run."""
    head = ["run", "epochs", "micro-batch: plan, run", "foreseen, s (interval)", "trained, s"]
    head += ["error", "whole command, s"]
    rows = []
    for name, run in results["runs"].items():
        low, middle, high = run["foreseen"]
        rows.append(
            [
                name,
                str(run["epochs"]),
                ", ".join(map(str, run["micro_batch"])),
                f"{middle:.1f} ({low:.1f} to {high:.1f})",
                f"{run['trained']:.1f}",
                f"{middle / run['trained'] - 1:+.1%}",
                f"{run['whole']:.1f}",
            ]
        )
    return markdown(head, rows)
