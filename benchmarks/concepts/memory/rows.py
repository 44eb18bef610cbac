"""The steps as a table in markdown."""

from benchmarks.mbs.rows import Results, markdown

MIB = 1 << 20


def concepts_memory(results: Results) -> str:
    """A row for each way."""
    head = ["way", "mechanism", "micro-batch", "exact", "peak, MiB", "budget, MiB", "moved, MiB"]
    rows = [
        [
            way["name"],
            way["mechanism"],
            str(way["micro_batch"]),
            "yes" if way["exact"] else "no",
            f"{way['peak'] / MIB:.1f}",
            "-" if way["budget"] is None else f"{way['budget'] / MIB:.1f}",
            f"{way['moved'] / MIB:.1f}",
        ]
        for way in results["ways"]
    ]
    return markdown(head, rows)
