"""Tables of the hosts: what each does by itself beside an engine, against the undivided batch."""

from typing import Any

from benchmarks.mbs.rows import figure, markdown

Results = dict[str, Any]


def zoo(results: Results) -> str:
    """A line for each family: networks that are exact, and loops by hand that are."""
    rows = []
    for family, found in results["families"].items():
        count = sum(found.get(end, 0) for end in ("exact", "refused"))
        loops = [f"{found[f'{loop} within']} of {found[f'{loop} of']}" for loop in LOOPS]
        ends = [str(found.get(end, 0)) for end in ("exact", "refused")]
        rows.append([family, str(count), *ends, *loops])
    head = ["family", "networks", "exact", "refused by name", *LOOPS.values()]
    return markdown(head, rows)


LOOPS = {
    "mean": "by hand, mean of micro-batches: exact",
    "weighted": "by hand, weighted by samples: exact",
}


def zoo_summary(results: Results) -> str:
    """Counts, and medians of the errors where all three run."""
    networks = results["networks"].values()
    ends = [one["end"] for one in networks]
    other = len(ends) - ends.count("exact") - ends.count("refused")
    loops = results["loops"]
    return (
        f"{len(ends)} networks: {ends.count('exact')} exact, {ends.count('refused')} refused by "
        f"name, {other} wrong. The {loops['networks']} networks of which all three ways run have a "
        f"median error of {figure(loops['error'])}; the mean of micro-batches has "
        f"{figure(loops['mean'])}, and that weighted by samples {figure(loops['weighted'])}."
    )


def zoo_refused(results: Results) -> str:
    """The sentence of each refusal."""
    rows = [
        [name, one["message"].replace("|", "\\|")]
        for name, one in results["networks"].items()
        if one["end"] == "refused"
    ]
    return markdown(["network", "refusal"], rows)


def open_clip(results: Results) -> str:
    """A line for each loss and split: errors of the encoders, and of the scale and the bias."""
    rows = []
    for name, model in results["models"].items():
        for parts, one in model["parts"].items():
            factors = ", ".join(f"{key} x {value:.3g}" for key, value in one["factor"].items())
            errors = (figure(max(one[way].values())) for way in ("script", "engine"))
            rows.append([name, parts, one["mechanism"], factors, *errors])
    head = ["model and loss", "micro-batches", "the engine took"]
    head += ["the script's gradient", "worst error, the script", "worst error, anybatch"]
    return markdown(head, rows)


def nnunet(results: Results) -> str:
    """A line for each plan: the worst error of its batches, by hand and by the trainer."""
    rows = []
    for one in results["rows"]:
        plan = [
            one["configuration"],
            one["norm"],
            one["labels"],
            "yes" if one["batch_dice"] else "no",
        ]
        errors = [figure(max(one["errors"][way])) for way in ("by hand", "anybatch")]
        rows.append([*plan, one["mechanism"], *errors])
    head = ["configuration", "norm", "labels", "batch Dice", "the engine took"]
    return markdown([*head, "mean of micro-batches, by hand", "anybatch"], rows)


def ultralytics(results: Results) -> str:
    """A line for each network: the worst error over seeds of both ways."""
    names = list(dict.fromkeys(one["name"] for one in results["rows"]))
    rows = []
    for name in names:
        found = [one for one in results["rows"] if one["name"] == name]
        errors = [figure(max(one[way] for one in found)) for way in ("own", "ours")]
        rows.append([name, found[0]["mechanism"], *errors])
    return markdown(["network", "the engine took", "ultralytics accumulated", "anybatch"], rows)
