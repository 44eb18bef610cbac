"""The results of lanes that leave while they run, as tables in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.outofcore.narrow.networks import NETWORKS

Results = dict[str, Any]
MIB = 1 << 20
FLOORS = {
    "undivided": "undivided, in memory",
    "undivided, away": "undivided, all that is saved away",
    "lanes": "a lane of one sample, in memory",
    "narrow lanes": "a lane of one sample that leaves while it runs",
}


def narrow_floors(results: Results) -> str:
    """A line for each network: the bytes that are enough."""
    found = next(iter(results["modes"].values()))["networks"]
    rows = []
    for name, one in found.items():
        undivided = one["floors"]["undivided"]
        cells = (one["floors"][key] for key in FLOORS)
        rows.append([_title(name), *(f"{b / MIB:.1f} MiB ({b / undivided:.2f})" for b in cells)])
    return markdown(["network", *FLOORS.values()], rows)


def narrow(results: Results) -> str:
    """A line for each network, malloc mode, budget and way."""
    head = ["network", "malloc", "budget", "way", "samples", "peak", "predicted", "wall", "error"]
    rows = []
    for mode, found in results["modes"].items():
        for name, one in found["networks"].items():
            for budget in one["budgets"].values():
                label = f"{budget['budget'] / MIB:.1f} MiB"
                for way in budget["ways"]:
                    rows.append([_title(name), mode, label, *_cells(way, one["batch"])])
    return markdown(head, rows)


def _title(name: str) -> str:
    net = NETWORKS[name]
    return f"{name}, {net.batch} images of {net.pixels}x{net.pixels}"


def _cells(way: Results, batch: int) -> list[str]:
    low, middle, high = way["wall"]
    lanes = (
        "undivided, saved tensors offloaded" if way["micro_batch"] == batch else "lanes that leave"
    )
    return [
        "lanes in memory" if way["way"] == "in memory" else lanes,
        str(way["micro_batch"]),
        f"{way['peak'] / MIB:.1f} MiB",
        f"{way['predicted'] / MIB:.1f} MiB",
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        f"{way['error']:.1e}",
    ]
