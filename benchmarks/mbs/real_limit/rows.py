"""The tables of the real limit, from its results file to markdown."""

from typing import Any

Results = dict[str, Any]
Row = list[str]
LONGEST = 120  # characters of an error in a cell


def _markdown(head: Row, rows: list[Row]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.0f}"


def real_limit(results: Results) -> str:
    """How every training ended, in each malloc mode."""
    rows = []
    for mode, ran in results["modes"].items():
        for name, cell in ran["trainings"].items():
            error = cell["error"].replace("|", "/")
            end = cell["outcome"] if not error else f"died: {error[:LONGEST]}"
            last = f"{cell['losses'][-1]:.4f}" if cell["losses"] else "-"
            spent = "-" if cell["seconds"] is None else f"{cell['seconds']:.1f}"
            sizes = [_mib(cell["budget_bytes"]), _mib(cell["growth_bytes"])]
            rows.append([f"{name}, malloc {mode}", *sizes, str(cell["steps"]), last, spent, end])
    head = ["budget, MiB", "growth, MiB", "steps", "last loss", "seconds", "end"]
    return _markdown(["training", *head], rows)


def real_limit_compared(results: Results) -> str:
    """How far each training is from the plain one without a limit, and how far it may be."""
    rows = []
    for dtype, subjects in results["comparisons"].items():
        for name, cell in subjects.items():
            if "died" in cell:
                rows.append([f"{name}, {dtype}", "died", "-", "no"])
                continue
            far = [f"{cell[key]:.1e}" for key in ("distance", "allowed")]
            rows.append([f"{name}, {dtype}", *far, "yes" if cell["same"] else "no"])
    return _markdown(["training", "distance", "allowed", "the same training"], rows)
