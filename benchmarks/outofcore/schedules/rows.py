"""The tables of the schedules, from their results file to markdown."""

from collections.abc import Iterator
from itertools import product
from statistics import median
from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.outofcore.schedules.cases import MACHINES, MEASURED, NETWORKS
from benchmarks.outofcore.schedules.differences import differences
from benchmarks.outofcore.schedules.reserved import ALLOCATORS, LIMITED

Results = dict[str, Any]
Row = list[str]
GIB = 1 << 30
POLICIES = {
    "default": "default",
    "belady": "Belady + fit",
    "window": "paper's window",
    "distance": "fixed distance",
    "prefetch": "prefetch",
    "on demand": "on demand",
    "naive": "naive",
}
PLANNED = ("window", "default")
AGAIN = {
    "with cheap": "default, cheap results again",
    "with recomputation": "default, any recomputation",
    "stretches alone": "recomputation alone",
}


def _cells(results: Results) -> Iterator[tuple[str, str, Results]]:
    """Yield network, batch and what was found, of those of which a function fits."""
    for name, sizes in networks(results):
        for n, found in sizes.items():
            if "machines" in found:
                yield name, n, found


def networks(results: Results) -> Iterator[tuple[str, Results]]:
    """Yield the networks and their batches in the order in which they are planned."""
    for name in NETWORKS:
        if name in results["networks"]:
            sizes = results["networks"][name]
            yield name, {n: sizes[n] for n in sorted(sizes, key=int)}


def machines(results: Results) -> list[str]:
    return [machine.name for machine in MACHINES if machine.name in results["machines"]]


def _relative(one: Results, key: str) -> str:
    found = one[key]
    if found is None:
        return "does not fit"
    seconds = found if isinstance(found, float) else found["seconds"]
    return f"{one['memory'] / seconds:.3f}"


def _over_bound(one: Results) -> float:
    return float(one["default"]["seconds"] / one["bound"])


def _against(one: Results, key: str) -> float | None:
    """How much faster the default is than another policy; None where that does not fit."""
    return one[key]["seconds"] / one["default"]["seconds"] if one[key] else None


def schedules_summary(results: Results) -> str:
    """A row for each machine: the default beside the bound, the others, and recomputation."""
    rows = []
    for machine in machines(results):
        ones = [found["machines"][machine] for _, _, found in _cells(results)]
        above = [_over_bound(one) - 1 for one in ones]
        row = [machine, str(len(ones)), f"{median(above):.1%}", f"{max(above):.1%}"]
        for key in ("window", "distance"):
            ratios = [ratio for one in ones if (ratio := _against(one, key)) is not None]
            row.append(f"{median(ratios):.2f} ({min(ratios):.3f} to {max(ratios):.2f})")
        again = [one["default"]["seconds"] / one["with recomputation"]["seconds"] for one in ones]
        row.append(f"{median(again):.2f} ({min(again):.2f} to {max(again):.2f})")
        rows.append(row)
    head = ["steps", "above the bound, median", "worst", "faster than the paper's window"]
    head += ["than fixed distance", "faster again with recomputation"]
    return markdown(["machine", *head], rows)


def schedules(results: Results) -> str:
    """Everything else: speeds on each machine, Table 1, and what allocators reserve."""
    parts = [_speeds(results, machine) for machine in machines(results)]
    if MEASURED[0] in results["networks"]:
        parts.append(_table_1(results))
    parts += [_sizes(results), _figure_3(results), _wastes(results)]
    return "\n\n".join(
        [*parts, f"### What does not reproduce, and what was left\n\n{differences(results)}"]
    )


def _speeds(results: Results, machine: str) -> str:
    rows = []
    for name, n, found in _cells(results):
        one = found["machines"][machine]
        row = [
            f"{NETWORKS[name].title}, {n}",
            f"{found['peak'] / GIB:.1f}",
            _relative(one, "bound"),
        ]
        rows.append(row + [_relative(one, key) for key in (*POLICIES, *AGAIN)])
    facts = results["machines"][machine]
    figures = f"{facts['flops'] / 1e12:g} TF/s, memory {facts['memory'] / 1e9:g} GB/s"
    title = f"### {machine}\n\n{figures}, link {facts['link'] / 1e9:g} GB/s each way at a time."
    about = "Speed relative to the same step in memory, where it would fit; 1 is no loss."
    head = ["network, batch", "in memory, GiB", "bound", *POLICIES.values(), *AGAIN.values()]
    return f"{title} {about}\n\n{markdown(head, rows)}"


def _table_1(results: Results) -> str:
    """The paper's images a second, beside those that its link allows in the simulator."""
    name, at, rate = MEASURED
    machine = machines(results)[0]
    paper, rows = results["table_1"], []
    for n, found in dict(networks(results))[name].items():
        if "machines" not in found:
            continue
        one = found["machines"][machine]
        printed = [paper[key].get(n) for key in ("schedule", "schedule + virtual addressing")]
        row = [n, *(f"{ips} ({ips / rate:.2f})" if ips else "x" for ips in printed)]
        times = [one["with recomputation"]["seconds"]]
        for each in (one, found["wide"]):
            times += [each["window"]["seconds"], each["default"]["seconds"], each["bound"]]
        rows.append(row + [_images(int(n), seconds, rate) for seconds in times])
    head = ["paper: schedule", "schedule + VA", "default with recomputation"]
    head += [
        f"{key}{wide}" for wide in ("", ", 100 GB/s") for key in ("its window", "default", "bound")
    ]
    text = (
        f"### ResNet-50 beside the paper's Table 1\n\nImages a second on {machine}, and as a "
        f"share of the {rate:g} that the paper measured in memory at {at}, to which the simulated "
        "V100 is scaled. The simulated schedules have all of the 16 GiB, and a link of 50 GB/s "
        'each way, or of 100: the paper has two NVLinks that "can transfer memory at 50GB/s" each.'
    )
    return f"{text}\n\n{markdown(['batch', *head], rows)}"


def _images(n: int, seconds: float, rate: float) -> str:
    return f"{n / seconds:.0f} ({n / seconds / rate:.2f})"


def _sizes(results: Results) -> str:
    """The largest batches in memory and out of it, beside the paper's."""
    rows = []
    for name, sizes in networks(results):
        fits = ["none", *(n for n, found in sizes.items() if found["peak"] <= results["budget"])]
        planned = ["none", *(n for n, found in sizes.items() if "machines" in found)]
        n = list(sizes)[-1]
        floor = sizes[n]["floor"] / int(n)
        row = [
            NETWORKS[name].title,
            fits[-1] if fits else "none",
            planned[-1] if planned else "none",
        ]
        rows.append([*row, f"{results['budget'] / floor:.0f}", NETWORKS[name].paper])
    head = ["largest planned here in memory", "out of core", "one function fits up to", "paper"]
    text = "### Batches\n\nOf the sizes in these tables; the paper's Figures 4 and 5 print none."
    return f"{text}\n\n{markdown(['network', *head], rows)}"


def _figure_3(results: Results) -> str:
    """The largest budgets that allocators serve in 16 GiB."""
    rows = []
    for name, n, found in _cells(results):
        budgets = found["budgets"]
        row = [f"{NETWORKS[name].title}, {n}"]
        for policy, allocator in product(PLANNED, LIMITED):
            one = budgets[policy][allocator]
            row.append(f"{one['budget'] / GIB:.1f}" if one else "none")
        rows.append(row)
    head = [f"{policy}: {allocator}" for policy, allocator in product(PLANNED, LIMITED)]
    text = (
        "### Budgets that fit in 16 GiB (Figure 3)\n\nThe largest budget, in GiB and in steps of "
        "half a GiB, whose schedule the allocator serves in 16 GiB of memory."
    )
    return f"{text}\n\n{markdown(['network, batch', *head], rows)}"


def _wastes(results: Results) -> str:
    """What every allocator reserves beside what is held."""
    rows = []
    for name, n, found in _cells(results):
        for policy in PLANNED:
            what, wastes = f"{NETWORKS[name].title}, {n}, {policy}", found["waste"][policy]
            rows.append([what, *(f"{wastes[allocator]:.1%}" for allocator in ALLOCATORS)])
    text = (
        "### Fragmentation\n\nBytes reserved beside those held at most, at a budget of 14 GiB. "
        "Nothing is given back to the device here; the pool is for requests below 1 MiB."
    )
    return f"{text}\n\n{markdown(['network, batch, policy', *ALLOCATORS], rows)}"
