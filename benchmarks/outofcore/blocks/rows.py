"""The results of blocks that are computed again, as tables in markdown."""

from typing import Any

from benchmarks.mbs.rows import Results, markdown

MIB = 1 << 20
HEAD = ("step", "way", "peak, MiB", "of memory", "moved", "again", "wall", "bitwise")


def blocks(results: Results) -> str:
    """A line for each step and way: bytes in MiB, and seconds over those in memory."""
    lines = []
    for name, ways in results["steps"].items():
        most = ways["in memory"]["peak"]
        shown = {way: row for way, row in ways.items() if "wall" in row}
        for way, row in sorted(shown.items(), key=lambda pair: pair[1]["wall"][1]):
            lines.append([name, way, *_figures(row, most)])
    return markdown(list(HEAD), lines)


def _figures(row: dict[str, Any], most: int) -> list[str]:
    low, middle, high = row["wall"]
    moved = (f"{row[key] / MIB:.0f}" if key in row else "" for key in ("out", "again"))
    return [
        f"{row['peak'] / MIB:.0f}",
        f"{row['peak'] / most:.2f}",
        *moved,
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        "yes" if row["exact"] else "no",
    ]


def blocks_cuda(results: Results) -> str:
    """The device, and the same lines."""
    where = results["environment"]
    device = f"{where['gpu']}, torch {where['torch']}, CUDA {where['cuda']}."
    return "\n".join([device, "", blocks(results)])
