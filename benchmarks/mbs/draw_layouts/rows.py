"""The tables of layouts of draws, from their results file to markdown."""

from benchmarks.mbs.rows import Results, markdown

RULES = ("shape", "two sizes", "neighbours", "arrangements")
OUTCOMES = ("exact", "refused", "crash", "wrong")


def draw_layouts_summary(results: Results) -> str:
    """Networks that draw, by group and rule and by what became of them."""
    rows = []
    for group, rules in results["groups"].items():
        for name in [name for name in RULES if name in rules]:
            count = rules[name]
            rows.append([group, name, *(str(count.get(one, 0)) for one in OUTCOMES)])
    return markdown(["networks", "rule", *OUTCOMES], rows)


def draw_layouts(results: Results) -> str:
    """Every network that draws: where its draws hold the samples, and each rule's outcome."""
    names: list[str] = []
    rows = []
    for name, row in results["networks"].items():
        if "rules" not in row or row.get("draws") == {}:
            continue
        names = [name for name in RULES if name in row["rules"]]
        draws = ", ".join(f"{n} {what}" for what, n in row.get("draws", {}).items())
        every = [row["rules"][name]["outcome"] for name in names]
        rows.append([name, draws or "-", *every, str(row["rules"][names[-1]]["forwards"])])
    return markdown(["network", "draws", *names, "forwards"], rows)


def draw_layouts_refused(results: Results) -> str:
    """Networks that every rule refuses or that were not run, and why."""
    rows = []
    for name, row in results["networks"].items():
        last = [one for name, one in row.get("rules", {}).items() if name == RULES[-1]] or [{}]
        why = row.get("skipped", last[0].get("message"))
        if why is not None:
            rows.append([name, " ".join(why.split())[:160].replace("|", "/")])
    return markdown(["not drawn for the full batch", "why"], rows)
