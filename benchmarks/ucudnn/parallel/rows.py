"""The results of measuring in parallel, as a table in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown


def conv_parallel(results: dict[str, Any]) -> str:
    """A line for each number of processes."""
    head = ["processes", "seconds", "of one process", "a part takes, median", "nine in ten within"]
    head += ["choices that differ", "kernels take, by one's figures"]
    rows = []
    for one in results["runs"]:
        low, middle, high = one["ratios"]
        differ = f"{one['differ']} of {one['kernels']}"
        cells = [f"{one['seconds']:.1f}", f"{one['share']:.2f}", f"{middle:.2f}"]
        more = [f"{low:.2f} to {high:.2f}", differ, f"{one['loss']:.3f}"]
        rows.append([str(one["processes"]), *cells, *more])
    return markdown(head, rows)
