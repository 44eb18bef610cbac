"""The time of a step outside the model's forward and autograd's backward.

The speed table compares full steps. Here the processor time of the thread is split into forward of
the model, backward, and the rest (the loss, its count, and the engine's bookkeeping), for the
hand-written loop and for the engine, alternating. The same bookkeeping is also timed in a tight
loop on a linear layer of four inputs, where nothing else passes through the caches. A real step
adds to that the price of code that runs once between kernels that fill the caches.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import nn
from torch.nn import functional

from benchmarks.environment import environment
from benchmarks.mbs.loops import Loop, by_hand
from benchmarks.mbs.ours import anybatch
from benchmarks.mbs.problem import Problem, term
from benchmarks.mbs.speed.problems import STEPS
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
ENGINE = "_engine_run_backward"  # what torch.autograd.backward calls, by hand and in the engine
LOOPS: dict[str, Loop] = {"by_hand": by_hand, "anybatch": anybatch}


@contextmanager
def timed(model: nn.Module, spent: dict[str, float]) -> Iterator[None]:
    """Add the thread's seconds in forward and in backward to `spent`.

    The same functions are there for all steps: an engine inspects a model with another forward.
    """
    forward, backward = type(model).forward, getattr(torch.autograd, ENGINE)

    def clocked(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += thread_time() - start

        return call

    type(model).forward = clocked("forward", forward)
    setattr(torch.autograd, ENGINE, clocked("backward", backward))
    try:
        yield
    finally:
        type(model).forward = forward
        setattr(torch.autograd, ENGINE, backward)


def one(
    loop: Loop, problem: Problem, micro_batch: int, spent: dict[str, float]
) -> dict[str, float]:
    """Thread seconds of one step from empty gradients: forward, backward, rest."""
    problem.model.zero_grad(set_to_none=True)
    spent.update(forward=0.0, backward=0.0)
    start = thread_time()
    loop(problem, micro_batch)
    total = thread_time() - start
    return {**spent, "rest": total - spent["forward"] - spent["backward"]}


def parted(problem: Problem, micro_batch: int, count: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each part for both loops, run in turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LOOPS}
    spent: dict[str, float] = {}
    with timed(problem.model, spent):
        for loop in LOOPS.values():
            for _ in range(3):
                one(loop, problem, micro_batch, spent)
        for index in range(count):
            for name in sorted(LOOPS, reverse=bool(index % 2)):
                found[name].append(one(LOOPS[name], problem, micro_batch, spent))
    return {
        name: {
            part: round(1000 * statistics.median(run[part] for run in runs), 4) for part in runs[0]
        }
        for name, runs in found.items()
    }


class Tiny(nn.Linear):
    """A layer whose forward can be clocked without touching torch's own class."""


def tight_loop() -> Problem:
    """A step that is nothing but bookkeeping."""
    sums = term(lambda o, t: functional.cross_entropy(o, t, reduction="sum"))
    inputs, targets = torch.randn(128, 4), torch.randint(3, (128,))
    return Problem(Tiny(4, 3), nn.CrossEntropyLoss(), None, inputs, targets, 128, (sums,))


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    count: Annotated[int, typer.Option("--runs", help="steps of each loop")] = 60,
) -> None:
    """Take the steps of the speed table apart and write results.json."""
    torch.set_num_threads(1)
    count = 2 if quick else count
    steps = {"tight loop": (tight_loop, 32), **STEPS}
    results = {}
    for name, (make, micro_batch) in track(steps.items(), "steps", len(steps), console=console):
        torch.manual_seed(SEED)
        problem = make()
        runs = count * (1 if name in STEPS else 20)
        results[name] = {
            "micro_batches": -(-problem.batch // micro_batch),
            **parted(problem, micro_batch, runs),
        }
    write(
        out / "results.json",
        {"seed": SEED, "runs": count, "steps": results, "environment": environment()},
    )


if __name__ == "__main__":
    typer.run(main)
