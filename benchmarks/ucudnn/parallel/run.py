"""Convolutions measured by several processes at a time, compared with one process alone.

The paper measures micro-configurations on several GPUs at once, where nothing is shared. Processes
on one CPU share its caches and its memory's speed. The kernels of two networks, ResNet-18 and one
with large windows, are measured by one process twice, and by as many as there are cores: each into
a file of its own. A part's ratio is its seconds to those of the first run, so the line of one
process shows the noise. Choices are the fastest within 64 MiB for each kernel; the last column is
the time of the kernels as chosen by a run's figures, by the figures of the first run.
"""

from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from anybatch.conv.chooser import worthwhile
from anybatch.conv.divide import Key
from anybatch.conv.warm import Warming, warm
from anybatch.core.plan_sections import Configuration, KernelPart
from benchmarks.environment import environment
from benchmarks.results import console, write
from benchmarks.ucudnn.listen import listen
from benchmarks.ucudnn.models import LARGE, NETWORKS

HERE = Path(__file__).parent
SEED = 0
WORKSPACE = 64 << 20
SAMPLES = 8
NAMES = ("resnet18", LARGE)
Parts = dict[Key, list[KernelPart]]


def measured(keys: list[Key], processes: int, folder: Path) -> tuple[Parts, float]:
    """Measure kernels into a file of their own; return them, and the seconds that took."""
    how = Warming(folder / "costs.sqlite", "powerOfTwo", WORKSPACE, 900.0, processes)
    start = perf_counter()
    found = dict(warm(keys, how))
    return found, perf_counter() - start


def compared(found: Parts, first: Parts, seconds: float, single: float, processes: int) -> Any:
    """Return how a run's figures, and what is chosen by them, differ from those of the first."""
    ratios, differ, takes, least = [], 0, 0.0, 0.0
    for key, parts in found.items():
        by_part = {(p.size, p.algorithm): p.seconds + p.setup for p in first[key]}
        there = [p for p in parts if (p.size, p.algorithm) in by_part]
        ratios += [(p.seconds + p.setup) / by_part[p.size, p.algorithm] for p in there]
        best = worthwhile(first[key], key[1], WORKSPACE)[-1]
        mine = worthwhile(there, key[1], WORKSPACE)[-1]
        differ += str(mine) != str(best)
        takes, least = takes + _by(mine, by_part), least + _by(best, by_part)
    tenths = quantiles(ratios, n=20)
    return {
        "processes": processes,
        "seconds": round(seconds, 2),
        "share": round(seconds / single, 3),
        "ratios": [round(cut, 3) for cut in (tenths[0], tenths[9], tenths[18])],
        "differ": differ,
        "kernels": len(found),
        "loss": round(takes / least, 4),
    }


def _by(configuration: Configuration, by_part: dict[tuple[int, str], float]) -> float:
    """Return what a configuration takes by the figures of the first run."""
    return sum(by_part[part.size, part.algorithm] for part in configuration.parts)


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    processes: Annotated[int, typer.Option(help="at a time, beside one")] = 2,
) -> None:
    """Measure by one process, by one again and by several, and write results.json."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    names = NAMES[1:] if quick else NAMES
    recorded = [one for name in names for one in listen(NETWORKS[name])]
    keys = list(dict.fromkeys((one.problem, SAMPLES) for one in recorded))
    keys = keys[:2] if quick else keys
    found: list[tuple[int, Parts, float]] = []
    with TemporaryDirectory() as folder:
        for number, count in enumerate((1, 1, processes)):
            parts, seconds = measured(keys, count, Path(folder) / str(number))
            console.print(f"{count} processes: {seconds:.0f} s")
            found.append((count, parts, seconds))
    (_, first, single), *others = found
    runs = [compared(parts, first, seconds, single, n) for n, parts, seconds in others]
    sizes = {"networks": ", ".join(names), "samples": SAMPLES, "kernels": len(keys)}
    results = {"environment": environment(), "seed": SEED, "sizes": sizes, "runs": runs}
    write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
