"""The results under limits as tables in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
MIB = 1 << 20
HEAD = (
    *("step", "live peak in memory", "growth in memory", "limit", "in memory under it", "ours"),
    "live peak predicted",
    *("moved out", "waited", "wall", "same gradient"),
)


def limits(results: Results) -> str:
    """A line for each step."""
    return markdown(list(HEAD), [_row(name, one) for name, one in results["steps"].items()])


def _row(name: str, one: Results) -> list[str]:
    start = [
        f"{name}, {one['batch']} samples",
        f"{one['live'] / MIB:.0f} MiB",
        f"{one['growth'] / MIB:.0f} MiB",
        f"{one['limit'] / MIB:.0f} MiB",
        one["limited"],
    ]
    if one["failed"] is not None:
        return [*start, one["failed"], "", "", "", "", ""]
    low, middle, high = one["wall"]
    return [
        *start,
        "trains",
        f"{one['predicted'] / MIB:.0f} MiB of {one['memory'] / MIB:.0f}",
        f"{one['out'] / MIB:.0f} MiB",
        f"{one['waited']:.2f} s",
        f"{middle:.2f} ({low:.2f} to {high:.2f}) of malloc {one['best']}",
        "yes" if one["exact"] else "no",
    ]


def cgroup(results: Results) -> str:
    """Both ways in the group."""
    found = results["cgroup"]
    if found is None:
        return "*A cgroup could not be made where this was run.*"
    rows = [
        [
            f"{way}, {found['batch']} samples",
            f"{found['limit'] / MIB:.0f} MiB",
            one.get("failed", f"{one['steps']} steps of {one.get('seconds', 0):.1f} s"),
            f"{one['out'] / MIB:.0f} MiB" if "out" in one else "",
            f"{one['peak'] / MIB:.0f} MiB",
        ]
        for way, one in found["ways"].items()
    ]
    return markdown(["way", "limit of the group", "result", "moved out", "the group held"], rows)
