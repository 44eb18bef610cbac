"""Figure 5 as tables in markdown, and what of the paper they bear out, from the results."""

from collections.abc import Iterable
from statistics import fmean, median, quantiles, stdev
from typing import Any

from anybatch import Plateau
from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
Run = dict[str, Any]
GLOBAL = {4: 0.75, 8: 0.70}  # the paper's speed of global beside local, by devices
GAIN = 1.10  # and of adaptive beside global, on average
PATIENCES = (1, 2, 3)
ARMS = ("local", "global", "adaptive")


def of_ranks(results: Results, ranks: int) -> list[Run]:
    """The runs of a number of ranks, in the order of the seeds."""
    found = (run for run in results["runs"] if run["ranks"] == ranks)
    return sorted(found, key=lambda run: run["seed"])


def changed(run: Run) -> int:
    """The epochs that adaptive was local in; all of them where it never changed."""
    return sum(mode == "local" for mode in run["arms"]["adaptive"]["batchnorm"])


def would_change(run: Run, patience: int) -> int:
    """The epochs that adaptive would be local in with a patience, by the losses of local."""
    criterion, epochs = Plateau(patience=patience), 0
    for loss in run["arms"]["local"]["validation_loss"]:
        epochs += 1
        if criterion.converged(loss):
            break
    return epochs


def global_speeds(runs: Iterable[Run]) -> list[float]:
    """Global beside local, of every epoch of every seed."""
    return [
        own / global_seconds
        for run in runs
        for own, global_seconds in zip(
            *(run["arms"][arm]["seconds"] for arm in ARMS[:2]), strict=True
        )
    ]


def adaptive_speed_of(run: Run) -> float:
    """Adaptive beside global, of a whole training."""
    return float(sum(run["arms"]["global"]["seconds"]) / sum(run["arms"]["adaptive"]["seconds"]))


def composed(run: Run, local: int) -> float:
    """Adaptive beside global, from the epochs of local and of global, if it is so long local."""
    own, global_seconds = (run["arms"][arm]["seconds"] for arm in ARMS[:2])
    return float(sum(global_seconds) / (sum(own[:local]) + sum(global_seconds[local:])))


def spread(values: list[float], digits: int = 2, scale: float = 1) -> str:
    """Mean and sample deviation."""
    scaled = [scale * value for value in values]
    more = f" ± {stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{fmean(scaled):.{digits}f}{more}"


def quartiles(values: list[float]) -> str:
    """The median, and the quartiles beside it."""
    low, _, high = quantiles(values, method="inclusive")
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"


def there(results: Results) -> list[int]:
    """The numbers of ranks that have a run."""
    return [ranks for ranks in results["sizes"]["ranks"] if of_ranks(results, ranks)]


def adaptive_speed(results: Results) -> str:
    """Speeds by ranks, each with the paper's, and what follows from them in words."""
    rows, batch = [], results["sizes"]["batch"]
    for ranks in there(results):
        runs = of_ranks(results, ranks)
        paper = f"{GLOBAL[ranks]:.2f}" if ranks in GLOBAL else ""
        local = ", ".join(str(changed(run)) for run in runs)
        mine = spread([adaptive_speed_of(run) for run in runs])
        rows.append(
            [
                *(str(ranks), str(batch // ranks), quartiles(global_speeds(runs)), paper),
                *(mine, f"{GAIN:.2f}", f"{local} of {results['recipe']['epochs']}"),
            ]
        )
    head = ["ranks", "rows a rank", "speed, global / local", "paper"]
    head += ["adaptive / global", "paper, average", "local epochs of adaptive, by seed"]
    words = [size_of(results), *verdicts(results)]
    return "\n\n".join([markdown(head, rows), "\n".join(f"- {line}" for line in words)])


def adaptive_speed_accuracy(results: Results) -> str:
    """Accuracy at the end, by ranks and BatchNorm."""
    rows = []
    for ranks in there(results):
        arms = {arm: [run["arms"][arm] for run in of_ranks(results, ranks)] for arm in ARMS}
        for arm, found in arms.items():
            train = [one["train_accuracy"][-1] for one in found]
            test = [one["test_accuracy"] for one in found]
            gains = [
                own - base["test_accuracy"] for own, base in zip(test, arms["local"], strict=True)
            ]
            gain = "" if arm == "local" else spread(gains, 1, 100)
            rows.append(
                [f"{ranks} ranks, {arm}", spread(train, 1, 100), spread(test, 1, 100), gain]
            )
    head = ["BatchNorm", "training accuracy (%)", "test accuracy (%)", "test, over local (points)"]
    return markdown(head, rows)


def adaptive_speed_patience(results: Results) -> str:
    """Local epochs and speed of adaptive for each patience, and the check of the one that ran."""
    rows = []
    for ranks in there(results):
        runs = of_ranks(results, ranks)
        for patience in sorted({*PATIENCES, results["patience"]}):
            local = [would_change(run, patience) for run in runs]
            speeds = [composed(run, one) for run, one in zip(runs, local, strict=True)]
            ran = patience == results["patience"]
            measured = spread([adaptive_speed_of(run) for run in runs]) if ran else "not run"
            epochs = ", ".join(map(str, local))
            rows.append([f"{ranks} ranks", str(patience), epochs, spread(speeds), measured])
    head = ["ranks", "patience", "local epochs, by seed", "adaptive / global, composed", "measured"]
    return markdown(head, rows)


def size_of(results: Results) -> str:
    """What was run, in words."""
    cores, runs = results["environment"]["cores"], results["runs"]
    many = [str(ranks) for ranks in there(results) if ranks > cores]
    shared = f" {' and '.join(many)} ranks share {cores} cores." if many else ""
    minutes = sum(run["whole_seconds"] for run in runs) / 60
    return (
        f"{len(results['seeds'])} seeds, {results['recipe']['epochs']} epochs, patience "
        f"{results['patience']}; the trainings took {minutes:.0f} minutes.{shared}"
    )


def verdicts(results: Results) -> list[str]:
    """The paper's figures, each beside what was found."""
    lines = []
    for ranks in there(results):
        runs = of_ranks(results, ranks)
        if ranks in GLOBAL:
            lines.append(_of_global(runs, ranks))
        lines.append(_of_adaptive(runs, ranks, results["recipe"]["epochs"]))
    return lines


def _of_global(runs: list[Run], ranks: int) -> str:
    speeds, paper = global_speeds(runs), GLOBAL[ranks]
    low, _, high = quantiles(speeds, method="inclusive")
    return (
        f"{ranks} ranks: global BatchNorm has {100 * median(speeds):.0f} % of the speed of local; "
        f"the paper's {100 * paper:.0f} % {_lies(low, high, paper, 'the quartiles')}."
    )


def _of_adaptive(runs: list[Run], ranks: int, epochs: int) -> str:
    gains = [100 * (adaptive_speed_of(run) - 1) for run in runs]
    never = sum(changed(run) == epochs for run in runs)
    said = f" In {never} of {len(runs)} trainings it never became global." if never else ""
    return (
        f"{ranks} ranks: adaptive trains {fmean(gains):+.0f} % faster than global "
        f"({min(gains):+.0f} to {max(gains):+.0f} % by seed); the paper's "
        f"{100 * (GAIN - 1):+.0f} % "
        f"{_lies(min(gains), max(gains), 100 * (GAIN - 1), 'that range')}.{said}"
    )


def _lies(low: float, high: float, paper: float, range_: str) -> str:
    if low <= paper <= high:
        return f"lies within {range_}"
    return f"lies outside {range_}: it does not reproduce here"
