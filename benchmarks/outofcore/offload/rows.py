"""The results of offloading as a table in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
HEAD = ("step", "malloc", "way", "live peak", "predicted", "moved out", "wall", "same gradient")
MIB = 1 << 20


def offload(results: Results) -> str:
    """A line for each step and way; bytes in MiB, the live peak over that in memory."""
    rows = []
    for mode, found in results["modes"].items():
        for name, one in found["steps"].items():
            in_memory = one["in memory"]
            for way, row in one["ways"].items():
                low, middle, high = row["wall"]
                predicted = row.get("predicted")
                rows.append(
                    [
                        f"{name}, {in_memory / MIB:.1f} MiB in memory",
                        mode,
                        way,
                        f"{row['peak'] / MIB:.1f} MiB ({row['peak'] / in_memory:.2f})",
                        "" if predicted is None else f"{predicted / MIB:.1f} MiB",
                        f"{row['out'] / MIB:.1f} MiB" if "out" in row else "",
                        f"{middle:.2f} ({low:.2f} to {high:.2f})",
                        "yes" if row["exact"] else "no",
                    ]
                )
    return markdown(list(HEAD), rows)
