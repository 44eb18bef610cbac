"""The results as the paper's tables 1 to 5, in markdown, with the paper's own figures beside ours.

A figure is the mean over the seeds of the best epoch on the test set, as in the paper, with the
sample standard deviation; the figure of the last epoch stands beside it, because the best one was
chosen by looking at the test set. Seconds are those of the median epoch of the fastest seed: what
else runs on a machine can only add to them.
"""

from collections.abc import Callable, Iterable
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.mbs.tables.one_run import DIVERGED, FAILED, TRAINED
from benchmarks.mbs.tables.paper import TABLE1, TABLE2, WITH, WITHOUT

Results = dict[str, Any]
Run = dict[str, Any]
Pick = Callable[[Run], float]
WAYS = {"undivided": "w/o MBS", "micro": "w/ MBS"}
NORMED = {"norm": "w/o MBS", "exact": "w/ MBS, exact"}  # with BatchNorm
METRICS = {"classification": "accuracy", "segmentation": "IoU"}


def best(run: Run) -> float:
    """The best epoch's figure on the test set, in per cent."""
    return 100 * float(max(run["test_metric"]))


def last(run: Run) -> float:
    """The last epoch's figure on the test set, in per cent."""
    return 100 * float(run["test_metric"][-1])


def epoch_seconds(run: Run) -> float:
    """Seconds of the median epoch."""
    return float(median(run["seconds"]))


def cell(runs: Iterable[Run], pick: Pick) -> str:
    """Mean and deviation of what trained, and in words how many of the seeds did not."""
    found = list(runs)
    figures = [pick(run) for run in found if run["ended"] == TRAINED]
    words = []
    for ended, word in ((FAILED, "Failed"), (DIVERGED, "diverged")):
        count = sum(run["ended"] == ended for run in found)
        if count:
            words.append(word if count == len(found) else f"{word} {count} of {len(found)}")
    if figures:
        spread = f" ± {stdev(figures):.2f}" if len(figures) > 1 else ""
        words.insert(0, f"{fmean(figures):.2f}{spread}")
    return ", ".join(words) or "not run"


def seconds(runs: Iterable[Run]) -> str:
    """Seconds of the median epoch, of the fastest seed that trained."""
    found = list(runs)
    times = [epoch_seconds(run) for run in found if run["ended"] == TRAINED]
    return f"{min(times):.2f}" if times else cell(found, epoch_seconds)


def table1(results: Results) -> str:
    """The effect of batch size and image size, without micro-batches."""
    rows = []
    for name, case in cases(results):
        what = f"{name}, max. {METRICS[case['task']]} (%)"
        for size in ("small", "large") if "small" in case["pixels"] else ():
            pixels = case["pixels"][size]
            for batch in results["batches_of_table1"]:
                runs = selected(results, name, "undivided", batch, pixels)
                paper = TABLE1.get(case["paper"], {}).get((size, batch), "")
                rows.append([what, f"{pixels} px", str(batch), cell(runs, best), paper])
    return _markdown(["model", "image", "batch", "ours", "paper"], rows)


def table2(results: Results) -> str:
    """The largest mini-batch that trains undivided, its half, and how the next one ended."""
    rows = []
    for name, case in cases(results):
        first = case["initial"]
        if first is None:
            continue
        after = selected(results, name, "undivided", 2 * first, case["pixels"]["large"])
        error = next((run["error"] for run in after if run["ended"] == FAILED), "not run")
        mini, micro = TABLE2[case["paper"]]
        ours = [str(first), str(max(1, first // 2))]
        rows.append([name, f"{case['cap'] / 2**20:,.0f} MiB", *ours, error, mini, micro])
    head = ["cap", "mini-batch", "micro-batch", "twice the mini-batch ends with"]
    return _markdown(["model", *head, "paper: mini-batch", "micro-batch"], rows)


def table3(results: Results) -> str:
    """The figure of segmentation at the initial mini-batch, without and with MBS."""
    rows = []
    for name, case in cases(results):
        first = case["initial"]
        if case["task"] != "segmentation" or first is None:
            continue
        cells = [
            cell(selected(results, name, way, first, case["pixels"]["large"]), best)
            for way in _ways(results)
        ]
        theirs = [WITHOUT[case["paper"]][0], WITH[case["paper"]][first][0]]
        found = {
            way: selected(results, name, way, first, case["pixels"]["large"]) for way in NORMED
        }
        normed = [cell(found[way], best) + _shorter(results, found[way]) for way in NORMED]
        rows.append([f"{name}: IoU (%)", *cells, *theirs, *normed])
    ways = [WAYS[way] for way in _ways(results)]
    head = ["model", *ways, "paper: w/o MBS", "w/ MBS"]
    return _markdown([*head, *(f"BatchNorm: {how}" for how in NORMED.values())], rows)


def table4(results: Results) -> str:
    """Accuracy and seconds by mini-batch: classification."""
    return _by_batch(results, "classification")


def table5(results: Results) -> str:
    """IoU and seconds by mini-batch: segmentation."""
    return _by_batch(results, "segmentation")


def _by_batch(results: Results, task: str) -> str:
    ways, metric, rows = _ways(results), METRICS[task], []
    for name, case in cases(results):
        if case["task"] != task or case["initial"] is None:
            continue
        pixels, first = case["pixels"]["large"], case["initial"]
        for batch in sorted({run["batch"] for run in results["runs"] if run["case"] == name}):
            found = {way: selected(results, name, way, batch, pixels) for way in ways}
            if batch < first or not found["micro"]:
                continue
            cells = [cell(found[way], pick) for pick in (best, last) for way in ways]
            cells += [seconds(found[way]) for way in ways]
            micro = str(found["micro"][0]["micro"])
            found = {way: selected(results, name, way, batch, pixels) for way in NORMED}
            normed = [
                cell(found[way], pick) + _shorter(results, found[way])
                for pick in (best, last)
                for way in NORMED
            ]
            normed += [seconds(found[way]) for way in NORMED]
            rows.append([name, str(batch), micro, *cells, *_paper(case, batch), *normed])
    said = (f"max. {metric} (%)", f"{metric} of the last epoch (%)", "seconds an epoch")
    head = [f"{what}, {WAYS[way]}" for what in said for way in ways]
    theirs = [f"paper: {metric} (%), w/o MBS", "w/ MBS", "seconds, w/o MBS", "w/ MBS"]
    ours = [f"BatchNorm: {what}, {NORMED[way]}" for what in said for way in NORMED]
    return _markdown(["model", "batch", "micro-batch", *head, *theirs, *ours], rows)


def _paper(case: Results, batch: int) -> list[str]:
    theirs = WITH[case["paper"]]
    if batch not in theirs:
        return [""] * 4
    figure, seconds = WITHOUT[case["paper"]] if batch == min(theirs) else ("Failed", "Failed")
    return [figure, theirs[batch][0], seconds, theirs[batch][1]]


def _shorter(results: Results, runs: list[Run]) -> str:
    """How the runs of a cell differ from the others of the table, if they are fewer or shorter."""
    trained = [run for run in runs if run["ended"] == TRAINED]
    epochs, seeds = {len(run["test_metric"]) for run in trained}, {run["seed"] for run in runs}
    others = sorted(epochs - {results["sizes"]["epochs"]})
    words = [f"{n} epoch{'s' if n > 1 else ''}" for n in others]
    if seeds and len(seeds) < len(results["seeds"]):
        words.append(f"{len(seeds)} of {len(results['seeds'])} seeds")
    return f" ({', '.join(words)})" if words else ""


def cases(results: Results) -> list[tuple[str, Results]]:
    """The models in the paper's order; a results file has its keys sorted."""
    return [(name, results["cases"][name]) for name in results["order"]]


def selected(results: Results, case: str, way: str, batch: int, pixels: int) -> list[Run]:
    """The runs of all seeds of one cell."""
    want = {"case": case, "way": way, "batch": batch, "pixels": pixels}
    return [
        run for run in results["runs"] if all(run[name] == value for name, value in want.items())
    ]


def _ways(results: Results) -> list[str]:
    there = {run["way"] for run in results["runs"]} | {"undivided", "micro"}
    return [way for way in WAYS if way in there]


WRITE: dict[str, tuple[str, Callable[[Results], str]]] = {
    "table1": ("Table 1: batch size and image size", table1),
    "table2": ("Table 2: the initial mini-batch and micro-batch", table2),
    "table3": ("Table 3: segmentation without and with MBS", table3),
    "table4": ("Table 4: larger mini-batches, classification", table4),
    "table5": ("Table 5: larger mini-batches, segmentation", table5),
}


def tables(results: Results) -> str:
    """All tables that were run, each with its heading and the time it took."""
    parts = []
    for name, (title, write) in WRITE.items():
        if name in results["table_seconds"]:
            minutes = results["table_seconds"][name] / 60
            took = f"Took {minutes:.0f} minutes, {results['processes']} trainings at a time."
            parts += [f"### {title}", write(results), took]
    normed = [run["whole_seconds"] for run in results["runs"] if run["way"] in NORMED]
    if normed:
        parts.append(
            f"The {len(normed)} trainings with BatchNorm took {sum(normed) / 60:.0f} minutes, the "
            "sum of what each took by itself."
        )
    return "\n\n".join(parts)


def tables_summary(results: Results) -> str:
    """What the cap lets through without and with MBS, a line a model, and what it costs."""
    rows = []
    for name, case in cases(results):
        first, pixels = case["initial"], case["pixels"]["large"]
        if first is None:
            continue
        undivided, ours = (selected(results, name, way, first, pixels) for way in WAYS)
        trained = {
            run["batch"]: run["micro"]
            for run in results["runs"]
            if (run["case"], run["way"], run["ended"]) == (name, "micro", TRAINED)
        }
        largest = max(trained, default=first)
        metric = METRICS[case["task"]]
        rows.append(
            [
                f"{name}, {case['cap'] / 2**20:,.0f} MiB",
                str(first),
                f"{largest} in micro-batches of {trained.get(largest, first)}",
                f"{metric} {cell(undivided, best)}",
                cell(ours, best),
                seconds(undivided),
                seconds(ours),
            ]
        )
    head = ["model, cap", "largest batch w/o MBS", "w/ MBS"]
    same = ["at the first: w/o MBS (%)", "w/ MBS (%)", "seconds an epoch w/o", "w/"]
    return _markdown([*head, *same], rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])
