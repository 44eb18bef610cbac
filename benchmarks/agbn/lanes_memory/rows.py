"""What lanes hold as tables in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]


def lanes_memory(results: Results) -> str:
    """A line for each network: live bytes at the peak, and its growth from outside."""
    head = [
        "network",
        "undivided, MB",
        "plain",
        "lanes",
        "gradients",
        "(lanes - gradients) / undivided",
    ]
    head += ["process: undivided", "plain", "lanes", "the same share"]
    rows = []
    for name, net in results["nets"].items():
        ways = net["ways"]
        rows.append(
            [
                name,
                *(_mb(ways[way]["peak"]) for way in ("undivided", "plain", "lanes")),
                _mb(ways["lanes"]["gradients"]),
                f"{net['share']['inside']:.3f}",
                *(_mb(ways[way]["growth"]) for way in ("undivided", "plain", "lanes")),
                f"{net['share']['outside']:.3f}",
            ]
        )
    return markdown(head, rows) if rows else "*Not run yet.*"


def lanes_memory_scan(results: Results) -> str:
    """Live bytes at the peak by the number of micro-batches, of a small ResNet."""
    scan = results["scan"]
    if not scan:
        return "*Not run yet.*"
    undivided = scan["1"]["undivided"]["peak"]
    rows = [
        [
            count,
            _mb(ways["plain"]["peak"]),
            _mb(ways["lanes"]["peak"]),
            f"{ways['plain']['peak'] / undivided:.3f}",
            f"{ways['lanes']['peak'] / undivided:.3f}",
        ]
        for count, ways in sorted(scan.items(), key=lambda item: int(item[0]))
        if "lanes" in ways
    ]
    head = ["micro-batches", "plain, MB", "lanes, MB", "plain / undivided", "lanes / undivided"]
    return markdown(head, rows)


def lanes_memory_thresholds(results: Results) -> str:
    """Growth and time by the size from which blocks are mapped by themselves."""
    found = results.get("thresholds", {})
    if not found:
        return "*Not run yet.*"
    head = ["network", "mapped from, KiB"]
    head += [f"{way}: {what}" for way in ("plain", "lanes") for what in ("growth, MB", "time")]
    rows = [
        [
            name,
            str(int(size) // 1024),
            *(text for way in ("plain", "lanes") for text in _grown(ways[way])),
        ]
        for size, nets in sorted(found.items(), key=lambda item: -int(item[0]))
        for name, ways in nets.items()
    ]
    return markdown(head, sorted(rows, key=lambda row: row[0]))


def _grown(cell: Results) -> tuple[str, str]:
    return _mb(cell["growth"]), f"{cell['time']:.2f}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"
