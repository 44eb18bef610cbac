"""The results of trainings whose states are away, as a table in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
HEAD = ("way", "states in memory", "seconds a step", "wall", "same bits", "under the limit")
MIB = 1 << 20


def states(results: Results) -> str:
    """A line for each way; wall is over the training in memory."""
    rows, total = [], results["states"]
    plain = results["ways"][0]["free"]
    for one in results["ways"]:
        free, limited = one["free"], one["limited"]
        held = "all" if one["memory"] is None else f"{one['memory'] / MIB:.0f} MiB"
        rows.append(
            [
                one["way"],
                held,
                f"{free['seconds']:.3f}",
                f"{free['seconds'] / plain['seconds']:.2f}",
                "yes" if free["bits"] == plain["bits"] else "no",
                _outcome(limited, plain["bits"]),
            ]
        )
    head = (
        f"{total / MIB:.0f} MiB of parameters, gradients and AdamW's state; the limit is "
        f"{results['limit'] / MIB:.0f} MiB."
    )
    return f"{head}\n\n{markdown(list(HEAD), rows)}"


def _outcome(limited: Results, bits: str) -> str:
    if "failed" in limited:
        return "fails: out of memory"
    return "trains, same bits" if limited["bits"] == bits else "trains, other bits"
