"""Convolutions with large or long windows, and a usual one, compared with torch's own kernels.

Forward, the gradient of the input and that of the filters run as torch runs them, and inside
`anybatch.convolutions` with a workspace of 100 MiB for each, back to back, alternating: `times as
fast` is the median (and the quartiles) of time(torch) / time(ours). torch counts in the layout that
is faster in an earlier run: operands as they are, or channels last (which a model would have to be
built for). Where one image alone takes more than twenty seconds, the others are not run.
`workspace` is the memory that our parts allocate besides operands and result, as a meter counts it.

Then a training step of a small network in the manner of RepLKNet, windows of 31, 29 and 27 pixels,
is compared with torch, the full model in either layout. The time of measuring for the choice is
listed separately. Both glibc malloc modes run, each in its own process.
"""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.conv.algorithms import native
from anybatch.conv.problem import KERNELS, Kernel, Problem
from benchmarks.environment import environment
from benchmarks.modes import in_both_modes
from benchmarks.results import console, write
from benchmarks.ucudnn.kernels.cases import LAYERS, Layer, large_windows

HERE = Path(__file__).parent
SEED = 0
WORKSPACE = 100 << 20
LONG = 20.0
IMAGES = 8
Results = dict[str, Any]
Work = Callable[[], Any]


def seconds(work: Work) -> float:
    """Return what a run takes."""
    start = perf_counter()
    work()
    return perf_counter() - start


def paired(torchs: Work, work: Work, cache: Path, rounds: int) -> Results:
    """Run torch's and ours in turns; ratios are time(torch) / time(ours)."""
    pairs = []
    for index in range(rounds):
        if index % 2:
            after, before = inside(work, cache), seconds(torchs)
        else:
            before, after = seconds(torchs), inside(work, cache)
        pairs.append((before, after))
    return {
        "times": [round(cut, 3) for cut in quantiles(a / b for a, b in pairs)],
        "seconds": [round(median(side), 5) for side in zip(*pairs, strict=True)],
    }


def inside(work: Work, cache: Path) -> float:
    """Return what a run takes inside the context, when all is chosen."""
    with anybatch.convolutions(WORKSPACE, cache=cache):
        work()
        return seconds(work)


def chosen(work: Work, cache: Path) -> tuple[anybatch.reports.Convolutions, float]:
    """Return what is chosen for a run, and the seconds in which that was measured."""
    with anybatch.convolutions(WORKSPACE, cache=cache) as found:
        elapsed = seconds(work)
    return found, elapsed


def problem_of(layer: Layer, kernel: Kernel) -> Problem:
    """Return a kernel of a layer."""
    ones = (1,) * len(layer.image)
    padding = tuple(k // 2 for k in layer.window)
    sizes = layer.channels, layer.channels, layer.image, layer.window
    return Problem(kernel, *sizes, ones, padding, ones, layer.groups)


def best_of_torch(problem: Problem, operands: tuple[Tensor, Tensor]) -> tuple[str, Work]:
    """Return torch's faster layout, and what runs a kernel in it."""
    ways = {"contiguous": operands}
    if len(problem.image) == 2:
        last = (t.contiguous(memory_format=torch.channels_last) for t in operands)
        ways["channels last"] = (next(last), next(last))
    times, size = {}, len(operands[0])
    for name, (one, other) in ways.items():
        few = other if problem.kernel != "filter" else other[:1]
        one_image = seconds(partial(native, problem, one[:1], few))
        work = partial(native, problem, one, other)
        times[name] = one_image * size if one_image > LONG else seconds(work)
    name = min(times, key=lambda name: times[name])
    return name, partial(native, problem, *ways[name])


def kernels(layer: Layer, cache: Path, rounds: int) -> Results:
    """Measure the three kernels of a layer."""
    found: Results = {}
    for kernel in KERNELS:
        problem = problem_of(layer, kernel)
        one, other = problem.operands(layer.samples)
        operands = torch.randn(one), torch.randn(other)
        layout, torchs = best_of_torch(problem, operands)
        work = partial(native, problem, *operands)
        choice, elapsed = chosen(work, cache)
        (configuration,) = choice.configurations
        found[kernel] = {
            "layout": layout,
            "chosen": str(configuration),
            "workspace": configuration.workspace,
            "choosing": round(elapsed, 2),
            **paired(torchs, work, cache, rounds),
        }
    return found


def step(cache: Path, rounds: int) -> Results:
    """Measure a training step of a network with large windows, against both layouts."""
    torch.manual_seed(SEED)
    model, x = large_windows(), torch.randn(IMAGES, 3, 64, 64)
    y = torch.randint(10, (IMAGES,))

    def train(model: nn.Module, x: Tensor) -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]

    work = partial(train, model, x)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    lasts = partial(train, last, x.contiguous(memory_format=torch.channels_last))
    work()
    lasts()
    choice, elapsed = chosen(work, cache)
    works = {"contiguous": work, "channels last": lasts}
    against = {name: paired(torchs, work, cache, rounds) for name, torchs in works.items()}
    work()
    true = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with anybatch.convolutions(WORKSPACE, cache=cache):
        work()
    ours = [p.grad for p in model.parameters() if p.grad is not None]
    gap = sum(float((a - b).square().sum()) for a, b in zip(ours, true, strict=True))
    norm = sum(float(b.square().sum()) for b in true)
    return {"against": against, "choosing": round(elapsed, 2), "error": (gap / norm) ** 0.5} | {
        "chosen": sum(str(c) != f"native@{c.size}" for c in choice.configurations),
        "kernels": len(choice.chosen),
    }


def one_mode(names: list[str], rounds: int) -> Results:
    """Measure everything in this process and its malloc mode."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    found: Results = {}
    with TemporaryDirectory() as folder:
        cache = Path(folder) / "costs.sqlite"
        for name in names:
            console.print(name)
            found[name] = kernels(LAYERS[name], cache, rounds)
        console.print("a network")
        return {"environment": environment(), "layers": found, "step": step(cache, rounds)}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="pairs of timings")] = 5,
    layers: Annotated[str, typer.Option(help="names, comma between")] = ",".join(LAYERS),
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure in both malloc modes, and write results.json."""
    names = layers.split(",")
    if quick:
        names, rounds = names[-1:], 2
    if here:
        print(json.dumps(one_mode(names, rounds)))
        return
    words = ["--layers", ",".join(names), "--rounds", str(rounds)]
    modes = in_both_modes("benchmarks.ucudnn.kernels.run", *words)
    write(out / "results.json", {"seed": SEED, "rounds": rounds, "modes": modes})


if __name__ == "__main__":
    typer.run(main)
