"""The tables of the choice, from its results file to markdown."""

from collections.abc import Iterator
from typing import Any

Results = dict[str, Any]
Row = list[str]
NAMES = {
    "anybatch": "anybatch",
    "largest_that_fits": "largest that fits",
    "lightning_power": "Lightning, power",
    "lightning_binsearch": "Lightning, binsearch",
    "accelerate_decorator": "Accelerate's decorator",
    "halving": "halving, as Composer",
}
LONGEST = 6  # sizes written out in one cell


def _markdown(head: Row, rows: list[Row]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def _budgets(results: Results) -> Iterator[tuple[str, str, str, Results]]:
    """Problem, malloc mode, share of the undivided peak, and what was found there."""
    for mode, ran in results["modes"].items():
        for problem, cells in ran["problems"].items():
            for share, budget in cells["budgets"].items():
                yield problem, mode, share, budget


def _sizes(sizes: list[int]) -> str:
    """Some sizes, the rest as their number; a dash for none."""
    more = len(sizes) - LONGEST
    shown = ", ".join(map(str, sizes[:LONGEST]))
    return (f"{shown} and {more} more" if more > 0 else shown) or "-"


def _share(cell: Results, key: str = "share") -> float:
    """The share of the best that a finder reaches: nothing where its step cannot run."""
    return 0.0 if cell["size"] is None or cell["over"] else float(cell[key])


def choice(results: Results) -> str:
    """Every finder on every problem, budget and malloc mode."""
    rows = []
    for problem, mode, share, budget in _budgets(results):
        for name, cell in budget["finders"].items():
            head = [f"{problem}, {float(share):.0%}, {mode}: {NAMES.get(name, name)}"]
            tries = [str(len(cell["tried"])), str(cell["failed"]), f"{cell['search_seconds']:.1f}"]
            if cell["size"] is None:
                rows.append([*head, "none", "-", "-", *tries, "-"])
                continue
            size = f"{cell['size']}{' (over budget)' if cell['over'] else ''}"
            good = [
                f"{cell['seconds']:.3f}",
                f"{_share(cell):.2f}, {_share(cell, 'share_processor'):.2f}",
            ]
            rows.append([*head, size, *good, *tries, _sizes(cell["missed"])])
    head = [
        "micro-batch",
        "seconds a step",
        "share of the best: wall, processor",
        "tried",
        "ran out of memory",
    ]
    head += ["seconds of search", "better, never tried"]
    return _markdown(["problem, budget, malloc: finder", *head], rows)


def choice_summary(results: Results) -> str:
    """Each finder over all problems, budgets and modes: how often it reaches 95 % of the best."""
    found: dict[str, list[Results]] = {}
    for *_, budget in _budgets(results):
        for name, cell in budget["finders"].items():
            found.setdefault(name, []).append(cell)
    rows = []
    for name, cells in found.items():
        shares = [_share(cell) for cell in cells]
        processor = [_share(cell, "share_processor") for cell in cells]
        reached = ", ".join(str(sum(s >= 0.95 for s in each)) for each in (shares, processor))
        fails = sum(cell["failed"] for cell in cells)
        over = sum(cell.get("over", False) for cell in cells)
        missed = sum(bool(cell.get("missed")) for cell in cells)
        numbers = [
            f"{reached} of {len(cells)}",
            f"{min(shares):.2f}, {min(processor):.2f}",
            str(fails),
            str(over),
        ]
        rows.append([NAMES.get(name, name), *numbers, str(missed)])
    head = [
        "reaches 95 % of the best: wall, processor",
        "worst share",
        "out-of-memory errors",
        "over budget",
    ]
    return _markdown(["finder", *head, "missed a better size it never tried"], rows)


def choice_sweep(results: Results) -> str:
    """Seconds of a whole step at every size of the sweep, by problem and malloc mode."""
    columns = [
        (f"{problem}, malloc {mode}", cells["sweep"])
        for mode, ran in results["modes"].items()
        for problem, cells in ran["problems"].items()
    ]
    sizes = sorted({int(size) for _, swept in columns for size in swept})
    rows = [
        [str(n), *(f"{s[str(n)]['seconds']:.3f}" if str(n) in s else "-" for _, s in columns)]
        for n in sizes
    ]
    return _markdown(["micro-batch", *(name for name, _ in columns)], rows)
