"""The table of cheap results, from its results file to markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.outofcore.schedules.cases import MACHINES, NETWORKS

GIB = 1 << 30


def cheap(results: dict[str, Any]) -> str:
    """A row for each network and share."""
    rows = []
    for name in [name for name in NETWORKS if name in results["networks"]]:
        found = results["networks"][name]
        for share, one in found["shares"].items():
            row = [f"{NETWORKS[name].title}, {found['batch']}", str(found["results"])]
            row += [f"{found['peak'] / GIB:.1f}", share, f"{one['without'] / GIB:.1f}"]
            row.append(f"{one['without'] / found['peak']:.2f}")
            rows.append(row + [f"{one['seconds'][m.name]:.3f}" for m in MACHINES])
    head = ["cheap results", "in memory, GiB", "computed again", "then, GiB", "of the first"]
    return markdown(["network, batch", *head, *(f"seconds, {m.name}" for m in MACHINES)], rows)
