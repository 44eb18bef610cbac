"""The results of Table 1 on a device as a table in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.outofcore.schedules.cases import TABLE_1
from benchmarks.outofcore.table1.settings import EXPANDABLE, MEMORY

Results = dict[str, Any]
GOAL = 0.85
"""Of the speed of the bound."""
RATE = 581.0
"""Images a second in memory at 190, in the paper."""


def table1(results: Results) -> str:
    """A row for each batch; speeds in images a second, and over those in memory."""
    in_memory = _in_memory(results)
    ways, quick = results["setting"]["ways"], results["setting"]["depth"] != 50
    rows, shares = [], []
    for n, found in results["sizes"].items():
        bound = results["bounds"].get(n)
        share = _share(found, bound)
        shares.append(share)
        row = [n, *(_speed(int(n), found[way], in_memory) for way in ways)]
        row += [_images(int(n), bound, in_memory), "x" if share is None else f"{share:.2f}"]
        one = found[EXPANDABLE]
        row.append(f"{one['budget'] / results['setting']['cap']:.3f}" if _ran(one) else "x")
        rows.append(row if quick else [*row, _paper(int(n))])
    head = ["batch", *ways, "bound", "offload / bound", "its budget / cap"]
    link, facts = results["measured"]["link"], results["measured"]
    text = (
        f"The device is held to {results['setting']['cap'] / (1 << 30):.2f} GiB. Its link: "
        f"{link['out'] / 1e9:.1f} GB/s out, {link['back'] / 1e9:.1f} GB/s back; "
        f"{facts['flops'] / 1e12:.1f} TF/s in products, memory {facts['memory'] / 1e9:.0f} GB/s. "
        "Images a second, and as a share of the largest batch in memory; x does not run."
    )
    reached = sum(share is not None and share >= GOAL for share in shares)
    verdict = f"{reached} of {len(shares)} batches reach {GOAL} of the bound."
    return "\n\n".join([text, markdown(head if quick else [*head, "paper"], rows), verdict])


def _in_memory(results: Results) -> float | None:
    """Images a second of the largest batch that ran in memory."""
    ran = {
        int(n): one[MEMORY]["seconds"] for n, one in results["sizes"].items() if _ran(one[MEMORY])
    }
    return max(ran) / ran[max(ran)] if ran else None


def _ran(one: Results) -> bool:
    return "failed" not in one


def _share(found: Results, bound: float | None) -> float | None:
    one = found[EXPANDABLE]
    return bound / one["seconds"] if bound is not None and _ran(one) else None


def _speed(n: int, one: Results, in_memory: float | None) -> str:
    return _images(n, one["seconds"] if _ran(one) else None, in_memory)


def _images(n: int, seconds: float | None, in_memory: float | None) -> str:
    if seconds is None:
        return "x"
    rate = n / seconds
    return f"{rate:.1f}" if in_memory is None else f"{rate:.1f} ({rate / in_memory:.2f})"


def _paper(n: int) -> str:
    """The paper's speeds: scheduled, and with virtual addressing."""
    speeds = [TABLE_1[key].get(n) for key in ("schedule", "schedule + virtual addressing")]
    return ", ".join(f"{ips} ({ips / RATE:.2f})" if ips else "x" for ips in speeds)
