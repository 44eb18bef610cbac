"""Programs that ran on a GPU, or on the stand-in for one, as a table in markdown."""

from collections import Counter

from benchmarks.mbs.rows import Results, markdown

OUTCOMES = ("exact", "refused", "not claimed", "crash", "wrong")


def gpu(results: Results) -> str:
    """A row for each program, the device, and each network that is not both exact and shown."""
    where, tests, cases = (results[key] for key in ("environment", "tests", "adversary"))
    networks: Counter[str] = Counter()
    for count in results["honest"]["groups"].values():
        networks.update(count)
    rows = [
        [
            "tests in tests/gpu",
            str(tests["passed"]),
            "",
            "",
            str(tests["failed"]),
            "",
            str(tests["skipped"]),
        ]
    ]
    every = {
        "honest networks": networks,
        "adversary, samples couple": cases["coupled"],
        "adversary, honest twins": cases["twins"],
    }
    for name, found in every.items():
        wrong = found.get("wrong", 0) + found.get("silently wrong", 0)
        counts = [found.get(outcome, 0) for outcome in OUTCOMES[:-1]]
        rows.append(
            [name, *map(str, (*counts, wrong)), str(found["skipped"]) if "skipped" in found else ""]
        )
    driver = f", CUDA {where['cuda']}" if where["cuda"] not in (None, "None") else ""
    device = f"{where['gpu']}, torch {where['torch']}{driver}."
    others = [
        f"- {name}: {said}" for name, said in sorted(results["honest"]["others"].items())
    ]  # fmt: skip
    head = [
        "",
        "exact, or passed",
        "refused",
        "not claimed",
        "crash, or failed",
        "wrong",
        "skipped",
    ]
    return "\n".join(
        [
            device,
            "",
            markdown(head, rows),
            "",
            "Networks that are not both exact and shown:",
            "",
            *others,
        ]
    )
