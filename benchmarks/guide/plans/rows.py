"""What plans foresee and choose, as tables in markdown."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from anybatch.core.units import show_bytes
from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
GOAL = 0.95
NAMES = {
    "anybatch": "anybatch",
    "largest_that_fits": "largest that fits",
    "lightning_power": "Lightning, power",
    "lightning_binsearch": "Lightning, binsearch",
    "accelerate_decorator": "Accelerate's decorator",
    "halving": "halving, as Composer",
}


def guide_plans(results: Results) -> str:
    """A line for each training and budget."""
    head = ["training", "budget", "fill", "chosen", "seconds", "fastest", "share of the fastest"]
    rows = []
    for cell in results["cells"]:
        if not cell["planned"]:
            rows.append([cell["name"], show_bytes(cell["budget"]), *["-"] * 2, "none fits", "", ""])
            continue
        own, best = cell["candidates"][0], _best(cell)
        rows.append(
            [
                cell["name"],
                f"{show_bytes(cell['budget'])}, {cell['budget'] / cell['whole']:.0%} of undivided",
                f"{own['peak'] / cell['budget']:.0%}",
                _words(own),
                f"{own['seconds']:.3f}",
                f"{_words(best)}, {best['seconds']:.3f}",
                f"{best['seconds'] / own['seconds']:.2f}",
            ]
        )
    return markdown(head, rows)


def guide_plans_foreseen(results: Results) -> str:
    """Peaks and seconds, foreseen against measured, by mechanism."""
    head = ["mechanism", "runs", "peak above it: worst", "too low", "over the budget"]
    head += ["seconds foreseen", "median error", "within 20 %"]
    kinds: dict[str, list[tuple[Results, int]]] = {}
    for cell in results["cells"]:
        for one in (c for c in cell["candidates"] if c["planned"]):
            suffix = ", saved tensors offloaded" if one["away"] else ""
            kinds.setdefault(one["mechanism"] + suffix, []).append((one, cell["budget"]))
    every = [pair for pairs in kinds.values() for pair in pairs]
    return markdown(head, [_foreseen(n, pairs) for n, pairs in [*kinds.items(), ("all", every)]])


def _foreseen(name: str, pairs: list[tuple[Results, int]]) -> list[str]:
    above = [one["predicted"] / one["peak"] - 1 for one, _ in pairs if one["peak"]]
    errors = [
        abs(one["foreseen"] - one["seconds"]) / one["seconds"]
        for one, _ in pairs
        if one["foreseen"] is not None
    ]
    times = ["0", "-", "-"]
    if errors:
        near = sum(error <= 0.2 for error in errors)
        times = [str(len(errors)), f"{median(errors):.1%}", f"{near} of {len(errors)}"]
    over = sum(one["peak"] > budget for one, budget in pairs)
    low = sum(one["peak"] > one["predicted"] for one, _ in pairs)
    return [name, str(len(pairs)), f"{max(above, default=0):.1%}", str(low), str(over), *times]


def guide_plans_summary(results: Results) -> str:
    """Every finder: how often it reaches 95 % of the fastest candidate."""
    shares: dict[str, list[float]] = {}
    for cell in results["cells"]:
        if not cell["planned"]:
            continue
        best = _best(cell)["seconds"]
        shares.setdefault("anybatch", []).append(best / cell["candidates"][0]["seconds"])
        for name, seconds in _peers(cell):
            shares.setdefault(name, []).append(0.0 if seconds is None else best / seconds)
    head = ["finder", "reaches 95 % of the fastest", "median share", "worst share"]
    rows = []
    for name, found in shares.items():
        reached = sum(share >= GOAL for share in found)
        rows.append(
            [
                NAMES.get(name, name),
                f"{reached} of {len(found)}",
                f"{median(found):.2f}",
                f"{min(found):.2f}",
            ]
        )
    return markdown(head, rows)


def _peers(cell: Results) -> Iterator[tuple[str, float | None]]:
    """The seconds of each finder's size, with all in memory.

    None where it found none, or one that does not fit: its search has run the loop by hand, which
    holds no accumulator.
    """
    fit = [one for one in cell["candidates"] if not one["away"] and not one["over"]]
    table = {one["micro_batch"]: one["seconds"] for one in fit}
    for name, size in cell["peers"].items():
        yield name, None if size is None else table.get(size)


def _best(cell: Results) -> Results:
    fit = [one for one in cell["candidates"] if not one["over"]]
    found: Results = min(fit, key=lambda one: one["seconds"])
    return found


def _words(one: Results) -> str:
    suffix = ", away" if one["away"] else ""
    return f"{one['mechanism']} {one['micro_batch']}{suffix}"
