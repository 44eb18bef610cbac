"""The results of the frontier as a table in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.outofcore.frontier.networks import NETWORKS

Results = dict[str, Any]
HEAD = ("network", "malloc", "way", "setting", "live peak", "wall", "gradient", "statistics")
MIB = 1 << 20


def frontier(results: Results) -> str:
    """A line for each network and way; bytes in MiB, and the live peak over that in memory."""
    rows = []
    for mode, found in results["modes"].items():
        for name, one in found["networks"].items():
            in_memory = one["in memory"]
            title = f"{NETWORKS[name].title}, {in_memory / MIB:.1f} MiB in memory"
            for line, settings in one["lines"].items():
                for setting, row in settings.items():
                    rows.append([title, mode, line, setting, *_cells(row, in_memory)])
    return markdown(list(HEAD), rows)


def _cells(row: Results, in_memory: int) -> list[str]:
    low, middle, high = row["wall"]
    return [
        f"{row['peak'] / MIB:.1f} MiB ({row['peak'] / in_memory:.2f})",
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        "the same" if row["same gradient"] else "another",
        "the same" if row["same buffers"] else "another",
    ]
