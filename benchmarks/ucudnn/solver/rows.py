"""The results of the solver, as a table in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown


def conv_solver(results: dict[str, Any]) -> str:
    """A line for each solver."""
    head = ["solver", "instances", "kernels", "variables", "median, ms", "worst, ms", "optimal"]
    sizes, rows = results["sizes"], []
    for name, one in results["solvers"].items():
        cells = [str(sizes["instances"]), str(sizes["kernels"]), str(results["variables"])]
        times = [f"{1000 * one['median']:.1f}", f"{1000 * one['worst']:.1f}"]
        rows.append([name, *cells, *times, f"{one['optimal']} of {sizes['instances']}"])
    return markdown(head, rows)
