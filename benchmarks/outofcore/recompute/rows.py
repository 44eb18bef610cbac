"""The tables of computing cheap results again, from the results file to markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

MIB = 1 << 20
Results = dict[str, Any]
HEAD = "step, malloc, saved, kept, peak in memory, again, predicted, wall, processor, same gradient"


def recompute(results: Results) -> str:
    """A line for each step and malloc mode; bytes in MiB."""
    rows = []
    for mode, found in results["modes"].items():
        for name, one in found["steps"].items():
            low, middle, high = one["wall"]
            rows.append(
                [
                    name,
                    mode,
                    f"{one['saved'] / MIB:.1f}",
                    f"{1 - one['remade'] / one['saved']:.2f}",
                    f"{one['in memory'] / MIB:.1f}",
                    f"{one['peak'] / MIB:.1f} ({one['peak'] / one['in memory']:.2f})",
                    f"{one['predicted'] / MIB:.1f}",
                    f"{middle:.2f} ({low:.2f} to {high:.2f})",
                    f"{one['processor'][1]:.2f}",
                    "yes" if one["exact"] else "no",
                ]
            )
    return markdown(HEAD.split(", "), rows)


def recompute_pixels(results: Results) -> str:
    """A line for each batch that fits in what 3 samples take."""
    found = results["modes"]["default"].get("pixels")
    if found is None:
        return ""
    budget = found["budget"] / MIB
    rows = [
        [n, f"{budget:.1f}", f"{held / MIB:.1f}", "in memory" if n == "3" else "computed again"]
        for n, held in found["fit"].items()
    ]
    head = ["samples", "budget, MiB", "least with all computed again, MiB", "fits"]
    return markdown(head, rows)
