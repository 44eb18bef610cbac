"""The tables of computing cheap results again, from the results file to markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.outofcore.schedules.cases import MACHINES

MIB = 1 << 20
Results = dict[str, Any]
HEAD = (
    "step, malloc, saved, cheap, kept, peak in memory, again, predicted, wall, processor, bitwise"
)


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
                    f"{one['cheap'] / one['saved']:.2f}",
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
    """A line for each way: the largest batch in what 3 samples take in memory."""
    rows = [
        [
            one["way"],
            str(one["samples"]),
            f"{one['share']:.2f}",
            *(f"{seconds:.2f}" for seconds in one["seconds"]),
        ]
        for one in results["pixels"]
    ]
    head = ["ResNet-50 for pixels, 512x1024", "largest batch", "of the memory"]
    return markdown([*head, *(f"seconds, {machine.name}" for machine in MACHINES)], rows)
