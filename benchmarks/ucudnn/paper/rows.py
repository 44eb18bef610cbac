"""The paper's tables, from the results file to markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from anybatch.conv.problem import KERNELS
from benchmarks.mbs.rows import markdown
from benchmarks.ucudnn.models import MODULES, NETWORKS
from benchmarks.ucudnn.paper.choices import ALL, MIB, POWERS, UNDIVIDED

Results = dict[str, Any]
ORDER = (UNDIVIDED, POWERS, ALL)


def conv_paper(results: Results) -> str:
    """Networks at three workspaces (Fig. 10, 11): seconds of all convolution kernels of a step."""
    head = ["network", "samples in the paper", "here", "kernels", "workspace of each", *ORDER]
    rows = []
    for name, one in _networks(results):
        for w, found in by_size(one["each"]):
            row = [NETWORKS[name].title, NETWORKS[name].paper, str(one["batch"])]
            row += [str(one["kernels"]), _mib(int(w))]
            least = found[UNDIVIDED]["seconds"]
            for policy in ORDER:
                row.append(_summed(found[policy], least) if policy in found else "not measured")
            rows.append(row)
    text = (
        "### Figures 10 and 11: networks within a workspace for each kernel\n\nSeconds of all "
        "convolution kernels of a step, how many times as fast as undivided, and of how many "
        "kernels something other than torch's own was chosen."
    )
    return f"{text}\n\n{markdown(head, rows)}"


def _summed(one: Results, least: float) -> str:
    return f"{one['seconds']:.3g} ({least / one['seconds']:.2f}, {one['divided']})"


def conv_paper_layer(results: Results) -> str:
    """AlexNet's second layer at 64 MiB (Fig. 9)."""
    rows = []
    for _, one in _networks(results):
        for kernel, found in in_order(one.get("conv2", {}), KERNELS):
            least = found[UNDIVIDED]["seconds"]
            for policy, chosen in in_order(found, ORDER):
                row = [kernel, policy, chosen["chosen"], _mib(chosen["workspace"])]
                times = f"{least / chosen['seconds']:.2f}"
                rows.append([*row, f"{chosen['seconds']:.3g}", times])
    head = ["kernel", "policy", "chosen", "its workspace", "seconds", "times as fast"]
    text = "### Figure 9: AlexNet's conv2 within 64 MiB"
    return f"{text}\n\n{markdown(head, rows)}" if rows else f"{text}\n\nAlexNet was not measured."


def conv_paper_took(results: Results) -> str:
    """What choosing took."""
    rows = []
    for name, one in [*_networks(results), *_modules(results)]:
        title = (NETWORKS | MODULES)[name].title
        for policy, took in in_order(one["took"], ORDER):
            solving = f"{1000 * took['solving']:.1f}"
            row = [title, policy, str(took["parts"]), f"{took['measuring']:.1f}"]
            rows.append([*row, solving])
    head = ["network", "policy", "parts", "measuring, s", "fronts, ms"]
    text = (
        "### What choosing takes\n\nOnce for a network, batch and machine; within 512 MiB, `all` "
        "within 64 MiB. What `all` shares with powerOfTwo is counted in both."
    )
    return f"{text}\n\n{markdown(head, rows)}"


def conv_paper_memory(results: Results) -> str:
    """Bytes of every layer (Fig. 12)."""
    rows = []
    for name, one in _networks(results):
        if NETWORKS[name].title in ("ResNet-50", NETWORKS["densenet40"].title):
            continue
        for layer in one["memory"]:
            row = [f"{NETWORKS[name].title}, {layer['layer']}", str(layer["count"])]
            rows.append(row + [_mib(layer[key]) for key in ("data", "filters", *PLANS)])
    head = ["layer", "times", "input and output", "filters", *PLANS.values()]
    text = "### Figure 12: memory of every layer\n\nThe largest workspace of its three kernels."
    return f"{text}\n\n{markdown(head, rows)}"


PLANS = {"undivided": "workspace, undivided in 512 MiB", "divided": "divided in 64 MiB"}


def conv_paper_shared(results: Results) -> str:
    """WD beside WR at equal totals (Fig. 13)."""
    rows = []
    kinds = ("WR, undivided", "WR", "WD, undivided", "WD")
    for name, one in _networks(results):
        for w, found in by_size(one["against"]):
            least = found[kinds[0]]["seconds"]
            row = [NETWORKS[name].title, _mib(int(w)), _mib(found["total"])]
            row += [_shared(found[choice], least) for choice in kinds]
            row += [str(found["variables"]), str(found["WD"]["kernels"])]
            rows.append([*row, f"{1000 * found['solving']:.2f}"])
    head = ["network", "each in WR", "total", *kinds, "variables", "kernels", "solving, ms"]
    text = (
        "### Figure 13: WD beside WR at equal totals\n\nSeconds of all kernels, how many times as "
        "fast as WR undivided, and the workspace that is used. powerOfTwo where nothing is said."
    )
    return f"{text}\n\n{markdown(head, rows)}"


def _shared(one: Results, least: float) -> str:
    seconds = one["seconds"]
    return f"{seconds:.3g} ({least / seconds:.2f}), {_mib(one['workspace'])}"


def conv_paper_shares(results: Results) -> str:
    """Every kernel's share of the total (Fig. 14)."""
    rows, lines = [], []
    for name, one in _networks(results):
        total = sum(share["workspace"] for share in one["shares"])
        if not total:
            lines.append(f"{NETWORKS[name].title}: every kernel stays torch's, and has no share.")
            continue
        for share in one["shares"]:
            if not share["workspace"]:
                continue
            row = [f"{NETWORKS[name].title}, {share['layer']} {share['kernel']}", share["chosen"]]
            row += [_mib(share["workspace"]), f"{share['workspace'] / total:.1%}"]
            rows.append([*row, f"{share['own']:.3g}", f"{share['seconds']:.3g}"])
    head = ["kernel", "chosen", "share", "of all", "torch, s", "seconds"]
    text = (
        "### Figure 14: shares of a total\n\nThe total is 8 MiB for each kernel; those that have "
        "none are left out."
    )
    table = [markdown(head, rows)] if rows else []
    return "\n\n".join([text, *table, *(f"- {line}" for line in lines)])


def conv_paper_branches(results: Results) -> str:
    """Parallel branches within a total."""
    rows = []
    for name, one in _modules(results):
        for total, found in by_size(one["totals"]):
            row = [MODULES[name].title, str(one["batch"]), str(one["kernels"]), _mib(int(total))]
            row.append(f"{found['torch']:.3g}")
            kinds = ("equal, undivided", "equal", "WD")
            rows.append(row + [_shared(found[choice], found["torch"]) for choice in kinds])
    head = ["module", "samples", "kernels", "total", "torch, s"]
    head += ["equal shares, undivided", "equal shares", "WD"]
    text = (
        "### Parallel branches\n\nAll kernels of a module's branches hold their workspaces at a "
        "time. Seconds are of one after another, and in brackets how many times as fast as torch."
    )
    return f"{text}\n\n{markdown(head, rows)}"


def conv_paper_cliff(results: Results) -> str:
    """The best algorithm's workspace, and one byte less (Fig. 1)."""
    rows, lines = [], []
    for name, one in _networks(results):
        steps = [row for row in one["cliff"] if "less" in row]
        without = len(one["cliff"]) - len(steps)
        lines.append(f"- {NETWORKS[name].title}: {without} of {len(one['cliff'])} have none.")
        for row in steps:
            best, less, parts = row["best"], row["less"], row["divided"]
            cells = [f"{NETWORKS[name].title}, {row['layer']} {row['kernel']}", best["chosen"]]
            cells += [_mib(best["workspace"]), f"{best['seconds']:.3g}"]
            for found in (less, parts):
                cells.append(f"{found['seconds']:.3g} ({found['seconds'] / best['seconds']:.2f})")
            rows.append([*cells, parts["chosen"]])
    head = ["kernel", "best undivided", "its workspace", "seconds", "a byte less"]
    text = (
        "### Figure 1: one byte less\n\nWithout division the next best algorithm is a fall; in "
        "brackets, over the best. Kernels whose best is torch's own need no workspace:"
    )
    table = [markdown([*head, "a byte less, divided", "by"], rows)] if rows else []
    return "\n\n".join([text, "\n".join(lines), *table])


def conv_paper_checks(results: Results) -> str:
    """Kernels that were run, beside what was foreseen."""
    rows = []
    for name, one in _networks(results):
        for check in one.get("checks", []):
            row = [f"{NETWORKS[name].title}, {check['layer']} {check['kernel']}", check["chosen"]]
            torchs, ours = check["predicted"]
            row += [f"{torchs:.3g} / {ours:.3g} = {torchs / ours:.2f}"]
            low, middle, high = check["times"]
            torchs, ours = check["seconds"]
            rows.append(
                [*row, f"{torchs:.3g} / {ours:.3g}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
            )
    head = ["kernel", "chosen", "foreseen: torch / ours", "run: torch / ours", "times as fast"]
    text = "### Foreseen and run\n\nWithin 64 MiB, powerOfTwo; median and quartiles of pairs."
    return f"{text}\n\n{markdown(head, rows)}"


MORE = (
    conv_paper_layer,
    conv_paper_shared,
    conv_paper_shares,
    conv_paper_cliff,
    conv_paper_memory,
    conv_paper_branches,
    conv_paper_took,
    conv_paper_checks,
)
"""What stands below the first table, in this order."""


def by_size(found: Results) -> list[tuple[str, Any]]:
    """What is kept by bytes, the least first: a file has its keys as text."""
    return sorted(found.items(), key=lambda item: int(item[0]))


def in_order(found: Results, order: Sequence[str]) -> list[tuple[str, Any]]:
    """What is there of some names, in their order."""
    return [(name, found[name]) for name in order if name in found]


def _networks(results: Results) -> Iterator[tuple[str, Results]]:
    """Yield the networks that were measured, in the order of the catalogue."""
    yield from in_order(results["networks"], list(NETWORKS))


def _modules(results: Results) -> Iterator[tuple[str, Results]]:
    yield from in_order(results["modules"], list(MODULES))


def _mib(count: int) -> str:
    return f"{count / MIB:.3g} MiB" if count else "0"
