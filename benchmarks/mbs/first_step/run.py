"""The first step of an engine, compared with its second and with plain forwards of four samples.

Before it trains, the first step follows samples through the model, on a few rows and without data.
A round is the first and the second step of a new engine, the hand-written loop, and a plain forward
of four samples, one after the other, in processor seconds of the process. The ratios are computed
in each round, and their medians are the result. With BatchNorm, micro-batches wait for each other
in threads of their own; the seconds include all of these.
"""

import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

from anybatch import Engine
from benchmarks.environment import environment
from benchmarks.mbs.loops import by_hand
from benchmarks.mbs.models import LSTM, MLP
from benchmarks.mbs.problem import Problem, term
from benchmarks.mbs.speed.problems import STEPS
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
FEW = 4  # samples of which the look runs forwards
REPEATS = 3  # plain forwards in a round, of which the median counts


def _sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def mlp() -> Problem:
    """Three layers of 256, rows of 64 numbers."""
    inputs, targets = torch.randn(128, 64), torch.randint(10, (128,))
    return Problem(MLP(64, 256, 256, 10), _mean, None, inputs, targets, 128, (term(_sum),))


def lstm() -> Problem:
    """An LSTM over 32 tokens."""
    tokens = torch.randint(64, (64, 33))
    sums = term(_sum, Tensor.numel)
    return Problem(LSTM(), _mean, None, tokens[:, :-1], tokens[:, 1:], 64, (sums,))


def batchnorm() -> Problem:
    """Eight convolutions of 32 channels with BatchNorm, images of 32x32."""
    layers: list[nn.Module] = []
    for n_in in (3, *[32] * 7):
        layers += [nn.Conv2d(n_in, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    inputs, targets = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return Problem(nn.Sequential(*layers), _mean, None, inputs, targets, 64, (term(_sum),))


PROBLEMS: dict[str, tuple[Callable[[], Problem], int]] = {
    "mlp": (mlp, 32),
    "lstm": (lstm, 16),
    "batchnorm": (batchnorm, 16),
    **STEPS,
}


def seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of the processors of one call."""
    start = process_time()
    run()
    return process_time() - start


def one_round(problem: Problem, micro_batch: int) -> dict[str, float]:
    """Return the seconds of a first step, a second one, one by hand and a forward of a few."""
    model = copy.deepcopy(problem.model)
    engine = Engine(model, problem.loss_fn, micro_batch=micro_batch)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        engine.backward(problem.inputs, problem.targets)

    def hand() -> None:
        problem.model.zero_grad(set_to_none=True)
        by_hand(problem, micro_batch)

    few = problem.inputs[:FEW]
    found = {"first": seconds(step), "second": seconds(step), "hand": seconds(hand)}
    plain = [seconds(lambda: problem.model(few)) for _ in range(REPEATS)]
    return {**found, "forward": statistics.median(plain)}


def measured(problem: Problem, micro_batch: int, rounds: int) -> dict[str, float]:
    """Return medians over rounds: milliseconds, and ratios of each round."""
    one_round(problem, micro_batch)
    found = [one_round(problem, micro_batch) for _ in range(rounds)]

    def median(value: Callable[[dict[str, float]], float], digits: int) -> float:
        return round(statistics.median(map(value, found)), digits)

    return {
        "first_ms": median(lambda one: 1000 * one["first"], 3),
        "second_ms": median(lambda one: 1000 * one["second"], 3),
        "hand_ms": median(lambda one: 1000 * one["hand"], 3),
        "forward_ms": median(lambda one: 1000 * one["forward"], 3),
        "more_in_forwards": median(lambda one: (one["first"] - one["second"]) / one["forward"], 1),
        "more_in_steps": median(lambda one: (one["first"] - one["second"]) / one["second"], 2),
        "second_by_hand": median(lambda one: one["second"] / one["hand"], 3),
    }


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="new engines for each network")] = 15,
) -> None:
    """Measure first steps and write results.json."""
    torch.set_num_threads(1)
    rounds = 2 if quick else rounds
    results = {}
    every = PROBLEMS.items()
    for name, (make, micro_batch) in track(every, "networks", len(every), console=console):
        torch.manual_seed(SEED)
        results[name] = {"micro_batch": micro_batch, **measured(make(), micro_batch, rounds)}
    write(
        out / "results.json",
        {"seed": SEED, "rounds": rounds, "networks": results, "environment": environment()},
    )


if __name__ == "__main__":
    typer.run(main)
