"""The results of BatchNorm over ranks as tables in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]


def global_bn(results: Results) -> str:
    """A line for each number of ranks and rows a rank; the speed beside local BatchNorm."""
    modes = results["modes"]
    head = ["ranks", "rows a rank"]
    for mode in modes:
        head += [f"global / local, malloc {mode}", f"nothing sent, malloc {mode}"]
    rows = []
    first = next(iter(modes.values()))
    for ranks, found in first["ranks"].items():
        for batch in found["steps"]:
            cells = [ranks, batch]
            for one in modes.values():
                ways = one["ranks"][ranks]["steps"][batch]
                for name in ("global", "global, nothing sent"):
                    low, middle, high = ways[name]["speed"]
                    cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            rows.append(cells)
    return markdown(head, rows)


def global_bn_volume(results: Results) -> str:
    """What a rank sends in an all-reduce, beside the ring's volume."""
    first = next(iter(results["modes"].values()))
    rows = [
        [
            ranks,
            f"{one['bytes'] / 2**20:g}",
            f"{one['sent'] / 2**20:.2f}",
            f"{one['ring'] / 2**20:.2f}",
        ]
        for ranks, found in first["ranks"].items()
        for one in found["volumes"]
    ]
    return markdown(["ranks", "all-reduce, MiB", "a rank sends, MiB", "2 M (N - 1) / N, MiB"], rows)


def global_bn_numerics(results: Results) -> str:
    """The relative error of the variance, by formula and mean."""
    found = results["numerics"]
    names = list(next(iter(found.values())))
    rows = [[name, *(f"{found[mean][name]:.1e}" for mean in found)] for name in names]
    return markdown(["formula", *(f"mean {mean}" for mean in found)], rows)
