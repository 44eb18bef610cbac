"""Forecasts of a plan, compared with the bytes that a step then holds.

Live bytes: one forecast is made before the first step, for each model and optimizer, and gives the
bytes of every size: undivided, divided with gradients summed in place, and divided with an
accumulator (a batch is then three micro-batches). Not all of them run. With SGD, without and with
momentum, the smallest and the largest do, since an optimizer's state is the same at every event of
forward and backward; and the heavy models are divided at fewer sizes. The sizes are listed below.
The engine then runs two steps of each, forward, backward and update, with the optimizer's state
present, under the meter. No peak may be above the forecast, and the forecast at most one percent
above the second step's peak (two for the LSTM, whose kernel rounds its workspace up to pages). The
meter is checked against torch's allocator, as the profiler records it, at the ends of kernels; the
bytes that the allocator holds beyond that inside kernels are no live tensors, and are shown.

The process: a child process for each malloc mode trains five steps by a plan made in another one.
Its growth, and the tensors that were there before, must be within 1.15 x the forecast and 50 MB. A
small network runs before, for torch's one-time set-up. One more child makes the plan itself, so
that the planning counts too.

With `--device cuda` the allocator's own peak is measured; there is no second part there.
"""

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import environment
from benchmarks.mbs.prediction.growth import MODES, in_modes
from benchmarks.mbs.prediction.live import SEED, Way, one_pair, ways
from benchmarks.mbs.prediction.models import GOALS, OPTIMIZERS, SUBJECTS
from benchmarks.results import console, write

HERE = Path(__file__).parent
SIZES = (2, 3, 5, 8, 13, 16, 24, 32, 48, 64)
FEWER = (2, 5, 16, 64)  # in which the heavy models are divided
ENDS = (2, 64)
HEAVY = ("resnet50_batchnorm", "resnet50_groupnorm", "densenet")
ALL_SIZES = "AdamW"  # the optimizer with which every size runs
GROWTH_SIZE = 16  # samples in a micro-batch
QUICK = ("transformer",)
QUICK_SIZES = (2,)


def ways_of(name: str, optimizer: str, *, quick: bool) -> list[Way]:
    """What is run of a model with an optimizer."""
    if quick:
        return ways(QUICK_SIZES, QUICK_SIZES, QUICK_SIZES[:1])
    if optimizer != ALL_SIZES:
        return ways(ENDS, ENDS, ())
    return ways(SIZES, FEWER if name in HEAVY else SIZES, ENDS)


def sizes(live: dict[str, Any]) -> dict[str, str]:
    """Optimizer and samples in the micro-batches that were run -> the models."""
    found: dict[str, list[str]] = {}
    for name, pairs in live.items():
        for optimizer, pair in pairs.items():
            by_way: dict[str, list[str]] = {}
            for cell in pair["ways"]:
                by_way.setdefault(cell["way"], []).append(str(cell["micro_batch"]))
            words = "; ".join(f"{way} {', '.join(ran)}" for way, ran in by_way.items())
            found.setdefault(f"{optimizer}: {words}", []).append(name)
    return {words: ", ".join(names) for words, names in found.items()}


def live(names: list[str], device: str, *, quick: bool) -> dict[str, Any]:
    """Every model with every optimizer."""
    found: dict[str, Any] = {}
    for name in names:
        found[name] = {}
        for optimizer in [ALL_SIZES] if quick else OPTIMIZERS:
            start = perf_counter()
            found[name][optimizer] = one_pair(
                name, optimizer, device, ways_of(name, optimizer, quick=quick)
            )
            console.print(f"{name}, {optimizer}: {perf_counter() - start:.0f} s")
    return found


def growth(names: list[str], threads: int, *, quick: bool) -> dict[str, Any]:
    """Every model in every malloc mode."""
    found, modes = {}, MODES[-1:] if quick else MODES
    size = QUICK_SIZES[0] if quick else GROWTH_SIZE
    for name in names:
        start = perf_counter()
        found[name] = in_modes(name, ALL_SIZES, size, modes, threads)
        console.print(f"{name}, processes: {perf_counter() - start:.0f} s")
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    device: str = "cpu",
    threads: int = 1,
    models: Annotated[str, typer.Option(help="names, comma between")] = ",".join(SUBJECTS),
) -> None:
    """Foresee, measure, and write results.json."""
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda needs a CUDA device, and there is none here")
    torch.set_num_threads(threads)
    names = list(QUICK) if quick else models.split(",")
    start = perf_counter()
    results: dict[str, Any] = {"live": live(names, device, quick=quick)}
    results["seconds"] = {"live": round(perf_counter() - start)}
    if device == "cpu":
        start = perf_counter()
        results["growth"] = growth(names, threads, quick=quick)
        results["seconds"]["growth"] = round(perf_counter() - start)
    name = "results.json" if device == "cpu" else f"results_{device}.json"
    facts = {"goals": {name: GOALS[name] for name in names}, "sizes": sizes(results["live"])}
    write(out / name, {"seed": SEED, "environment": environment(), **facts, **results})


if __name__ == "__main__":
    typer.run(main)
