"""The tables of honest networks: outcomes by group, and what each network came to."""

from statistics import median

from benchmarks.mbs.rows import Results, figure, markdown

OUTCOMES = ("exact", "refused", "not claimed", "crash", "wrong", "skipped")


def honest_summary(results: Results) -> str:
    """Networks by group and by the worst of their splits; how much longer a first step takes."""
    rows = []
    for group, count in results["groups"].items():
        found = [row for row in results["networks"].values() if row["group"] == group]
        splits = [one for row in found for one in row.get("splits", {}).values() if "first" in one]
        ratio = median(one["first"] / one["later"] for one in splits) if splits else 0.0
        cells = [str(count.get(outcome, 0)) for outcome in OUTCOMES]
        rows.append([group, *cells, f"{ratio:.1f}"])
    return markdown(["networks", *OUTCOMES, "first step / later step"], rows)


def honest(results: Results) -> str:
    """Every network: the mechanism, the worst error of its splits, its bound and its seconds."""
    rows = []
    for name, row in results["networks"].items():
        if "skipped" in row:
            continue
        splits = row["splits"].values()
        outcomes = dict.fromkeys(one["outcome"] for one in splits)
        errors = [one["error"] for one in splits if "error" in one]
        last = row["splits"].get("uneven", {})
        rows.append([
            name,
            last.get("mechanism", "-"),
            ", ".join(outcomes),
            figure(max(errors)) if errors else "-",
            figure(row["bound"]) if "bound" in row else "-",
            *(f"{1000 * last[key]:.1f}" if key in last else "-" for key in ("first", "later")),
            f"{1000 * row['undivided']:.1f}" if "undivided" in row else "-",
        ])  # fmt: skip
    head = ["mechanism", "outcome", "worst error", "bound", "first step, ms", "later, ms"]
    return markdown(["network", *head, "undivided, ms"], rows)


def honest_skipped(results: Results) -> str:
    """What is not run, and why."""
    skipped = {
        name: row["skipped"] for name, row in results["networks"].items() if "skipped" in row
    }
    rows = [[name, why] for name, why in skipped.items()]
    return markdown(["not run", "why"], rows)
