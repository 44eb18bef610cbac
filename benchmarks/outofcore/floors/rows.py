"""Least memory of one sample, and time at equal memory, as tables in markdown."""

from benchmarks.mbs.rows import Results, markdown
from benchmarks.outofcore.floors.networks import NETWORKS

MIB = 1 << 20
PEERS = "plain", "checkpoint", "fused head", "torch's op", "tiled MLP", "all flags"
OURS = "anybatch"
EQUAL = 1.05
"""Times the seconds of a peer that anybatch may take in its memory."""


def floors(results: Results) -> str:
    """A line for each network and length: MiB of the least limit, and the processor's seconds."""
    lines = []
    for row in results["rows"]:
        ways = row["ways"]
        least = min(one["limit"] for one in ways.values())
        cells = [_cell(ways.get(way), least) for way in (*PEERS, OURS)]
        budget = ways[OURS]["budget"] - row["parameters"]
        lines.append([_title(row), *cells, f"{budget / MIB:.1f}"])
    return markdown(["sample", *PEERS, OURS, "of `memory=`"], lines)


def floors_live(results: Results) -> str:
    """A line for each network and length: MiB of live tensors at the least, without parameters."""
    lines = []
    for row in results["rows"]:
        ways = row["ways"]
        cells = [f"{ways[way]['live'] / MIB:.1f}" if way in ways else "" for way in (*PEERS, OURS)]
        error = max((one["error"] for one in ways.values() if one["error"] is not None), default=0)
        lines.append([_title(row), f"{row['parameters'] / MIB:.1f}", *cells, f"{error:.0e}"])
    return markdown(["sample", "parameters", *PEERS, OURS, "worst error"], lines)


def floors_equal(results: Results) -> str:
    """A line for each comparison of seconds at equal memory."""
    head = ["sample", "peer", "limit, MiB", "within it", "`memory=`", "processor", "wall"]
    lines = []
    for row in results["rows"]:
        for way, one in row["ways"].items():
            if (equal := one.get("equal")) is not None:
                found = [_title(row), way, f"{one['limit'] / MIB:.1f}"]
                found += ["yes" if equal["fits"] else "no"]
                found += ["refused: its least" if equal["refused"] else "as the peer"]
                lines.append([*found, f"{equal['processor']:.2f}", f"{equal['wall']:.2f}"])
    return markdown(head, lines)


def floors_claims(results: Results) -> str:
    """What holds of the claims, in two sentences."""
    rows = results["rows"]
    lowest = sum(_is_lowest(row["ways"]) for row in rows)
    every = [one["equal"] for row in rows for one in row["ways"].values() if one.get("equal")]
    fast = sum(one["fits"] and one["processor"] <= EQUAL for one in every)
    return (
        f"anybatch has the least limit in {lowest} of {len(rows)} rows. At equal memory it takes "
        f"at most {EQUAL} times the seconds of the peer in {fast} of {len(every)} comparisons."
    )


def _is_lowest(ways: Results) -> bool:
    return bool(ways[OURS]["limit"] == min(one["limit"] for one in ways.values()))


def _title(row: Results) -> str:
    return NETWORKS[row["network"]][1].format(row["length"])


def _cell(one: Results | None, least: int) -> str:
    if one is None:
        return ""
    limit = f"{one['limit'] / MIB:.1f}"
    bold = f"**{limit}**" if one["limit"] == least else limit
    return f"{bold} ({one['processor']:.2f} s)"
