"""The table of fifty steps by an engine and by finders."""

from typing import Any

from benchmarks.mbs.rows import Results, markdown

OURS = "anybatch"


def finders(results: Results) -> str:
    """Seconds of fifty steps and the size, for each network and budget."""
    networks = results["networks"].items()
    every = next(iter(next(iter(networks))[1].values()))
    ways = [OURS, *sorted(way for way in every if way not in (OURS, "budget"))]
    head = ["network", "budget", *(f"{way}, s (size)" for way in ways), f"{OURS} / best finder"]
    lines = []
    for name, budgets in networks:
        for share, found in budgets.items():
            totals = [found[way]["total"] for way in ways[1:] if "total" in found[way]]
            ratio = f"{found[OURS]['total'] / min(totals):.2f}" if totals else "-"
            cells = [_cell(found[way]) for way in ways]
            lines.append([name, f"{float(share):.0%}", *cells, ratio])
    return markdown(head, lines)


def _cell(found: dict[str, Any]) -> str:
    if "error" in found:
        return "none fits"
    return f"{found['total']:.1f} ({found['size']})"
