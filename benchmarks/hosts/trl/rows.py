"""The table of TRL's trainers: errors of the gradient by training, and how each was divided."""

from typing import Any

from benchmarks.mbs.rows import figure, markdown


def hosts_trl(results: dict[str, Any]) -> str:
    """A line for each training: the worst error of both steps, by TRL's accumulation and ours."""
    steps = ("first", "second")
    head = ["training", "micro-batches", "the engine took"]
    head += [f"{who}, {step} step" for who in ("TRL accumulated", "anybatch") for step in steps]
    rows = [
        [
            f"{row['method']}, {row['name']}",
            ", ".join(map(str, row["micro_batches"])),
            row["mechanism"],
            *(figure(row[f"{who}_{step}"]) for who in ("trl", "ours") for step in steps),
        ]
        for row in results["rows"]
    ]
    return markdown(head, rows)
