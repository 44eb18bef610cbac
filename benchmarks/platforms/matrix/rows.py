"""The matrix of versions as a table in markdown."""

from benchmarks.mbs.rows import Results, markdown


def matrix(results: Results) -> str:
    """A row for each pair of versions that was requested."""
    head = ["Python", "torch", "passed", "failed", "skipped", "files", "system"]
    rows = []
    for cell in results["cells"]:
        if "reason" in cell:
            rows.append([cell["python"], cell["torch"], cell["reason"], "", "", "", ""])
            continue
        counts = [str(cell[key]) for key in ("passed", "failed", "skipped", "files")]
        rows.append([cell["python"], cell["torch"], *counts, cell["system"]])
    return markdown(head, rows)
