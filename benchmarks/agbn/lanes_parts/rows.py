"""Where the time of lanes goes as tables in markdown."""

from statistics import median
from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
SHOWN = {"stays": "lanes, all stays", "watched": "the same, watched", "leaves": "lanes, all leaves"}
SCANS = {"lanes": "micro-batches", "layers": "BatchNorm layers"}


def lanes_parts(results: Results) -> str:
    """A line for each way, and its ratios to the plain loop and the undivided batch."""
    modes = _with(results, "total")
    if not modes:
        return "*Not run yet.*"
    ways = [way for way in next(iter(modes.values()))["seconds"] if way in ("plain", *SHOWN)]
    head = ["way"] + [f"time / {other}, malloc {m}" for m in modes for other in _others(modes)]
    head += [f"processor / plain, malloc {mode}" for mode in modes]
    rows = []
    for way in ways:
        cells = [SHOWN.get(way, way)]
        cells += [
            _range(total[f"to {other}, clock"].get(way))
            for total in modes.values()
            for other in _others(modes)
        ]
        cells += [_range(total["to plain, processor"].get(way)) for total in modes.values()]
        rows.append(cells)
    return markdown(head, rows)


def lanes_parts_shares(results: Results) -> str:
    """What each part takes, the plain loop being 1."""
    modes = _with(results, "total")
    found = {mode: shares(total) for mode, total in modes.items()}
    if not found:
        return "*Not run yet.*"
    names = next(iter(found.values()))
    rows = [[name, *(f"{of[name]:+.3f}" for of in found.values())] for name in names]
    return markdown(["part / plain loop", *(f"malloc {mode}" for mode in found)], rows)


def lanes_parts_scans(results: Results) -> str:
    """Ratios to the plain loop by the number of micro-batches, then of BatchNorm layers."""
    tables = []
    for scan, label in SCANS.items():
        modes = _with(results, scan)
        if not modes:
            continue
        head = [label, *(f"{SHOWN[way]}, malloc {m}" for m in modes for way in SHOWN)]
        rows = [
            [count, *(_range(of[count][way]) for of in modes.values() for way in SHOWN)]
            for count in sorted(next(iter(modes.values())), key=int)
        ]
        tables.append(markdown(head, rows))
    return "\n\n".join(tables) or "*Not run yet.*"


def shares(total: Results) -> dict[str, float]:
    """The parts of a step as shares of the plain loop's seconds."""
    seconds, parts = total["seconds"], total["parts"]

    def difference(way: str, other: str) -> float:
        pairs = zip(seconds[way], seconds[other], seconds["plain"], strict=True)
        return float(median((a[0] - b[0]) / plain[0] for a, b, plain in pairs))

    plain = median(one[0] for one in seconds["plain"])
    norms = parts["BatchNorm"]
    found = {
        "switching": parts["switching"] / plain,
        "BatchNorm beyond torch's": (norms["ours"] - norms["native"]) / plain,
    }
    found["rest of stays"] = difference("stays", "plain") - sum(found.values())
    found["mode"] = difference("watched", "stays")
    found["copies"] = difference("leaves", "watched")
    found["the same bytes by one thread"] = parts["copying"] / plain
    return found


def _with(results: Results, part: str) -> dict[str, Results]:
    return {mode: found[part] for mode, found in results["modes"].items() if part in found}


def _others(modes: dict[str, Results]) -> tuple[str, ...]:
    return ("plain", "undivided") if modes else ()


def _range(found: list[float] | None) -> str:
    if found is None:
        return "1"
    low, middle, high = found
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
