"""The results of lanes as a table in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]


def lanes(results: Results) -> str:
    """A line for each size of micro-batches, and for each malloc mode its paired ratios."""
    modes = results["modes"]
    first = next(iter(modes.values()))
    head = ["micro-batch", "what waits", "peak, MB", "of undivided", "of local"]
    head += [f"time / {other}, malloc {mode}" for mode in modes for other in ("undivided", "local")]
    rows = []
    for index, row in enumerate(first["rows"]):
        alone = first["local"][str(row["micro_batch"])]
        cells = [
            str(row["micro_batch"]),
            row["way"],
            f"{row['peak'] / 1e6:.1f}",
            f"{row['peak'] / first['whole']:.3f}",
            f"{row['peak'] / alone:.2f}",
        ]
        for found in modes.values():
            same = found["rows"][index]
            for other in ("to undivided", "to local"):
                low, middle, high = same[other]
                cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append(cells)
    return markdown(head, rows)
