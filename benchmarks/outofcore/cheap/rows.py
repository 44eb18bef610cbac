"""The table of cheap results, from its results file to markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.outofcore.schedules.cases import MACHINES, NETWORKS

GIB = 1 << 30


def cheap(results: dict[str, Any]) -> str:
    """A row for each network."""
    rows = []
    for name in [name for name in NETWORKS if name in results["networks"]]:
        found = results["networks"][name]
        row = [f"{NETWORKS[name].title}, {found['batch']}", str(found["results"])]
        row += [f"{found[key] / GIB:.1f}" for key in ("peak", "without")]
        row.append(f"{found['without'] / found['peak']:.2f}")
        rows.append(row + [f"{found['seconds'][m.name]:.3f}" for m in MACHINES])
    head = ["cheap results", "in memory, GiB", "computed again", "share"]
    return markdown(["network, batch", *head, *(f"seconds, {m.name}" for m in MACHINES)], rows)
