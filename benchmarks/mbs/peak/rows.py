"""Peaks by batch size as a table in markdown."""

from benchmarks.mbs.rows import Results, markdown

MIB = 1 << 20


def peak(results: Results) -> str:
    """Return a row for each batch size."""
    head = ["batch", "torch alone, MiB", f"anybatch, {results['budget']}", "micro-batch", "exact"]
    rows = [
        [
            str(row["batch"]),
            f"{row['undivided'] / MIB:.1f}",
            f"{row['ours'] / MIB:.1f}",
            str(row["micro_batch"]),
            "yes" if row["exact"] else "no",
        ]
        for row in results["rows"]
    ]
    return markdown(head, rows)
