"""Dividing a network's workspace (WD): our solver and HiGHS on instances of ResNet-50's size.

Fronts are drawn like those of kernels, some alike as layers of a network are; totals lie between 2
and 90 % of the largest workspaces of all kernels together. HiGHS gets Equations 1 to 4 of the paper
with a gap of 0. `optimal` counts the instances on which a choice takes no longer than the other
solver's, to nine digits; HiGHS satisfies its constraints to a millionth only.
"""

import random
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from scipy.optimize import Bounds, LinearConstraint, milp

from anybatch.conv.divide import share
from anybatch.core.plan_sections import Configuration, KernelPart
from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
KERNELS, POINTS, SCALE = 159, 11, 1 << 26
Fronts = list[list[Configuration]]


def drawn(rng: random.Random) -> Fronts:
    """Return the fronts of a network; every third kernel is like an earlier one."""
    found: Fronts = []
    while len(found) < KERNELS:
        if found and rng.random() < 1 / 3:
            found.append(rng.choice(found))
            continue
        spaces = [0, *sorted(rng.sample(range(1, SCALE), rng.randint(0, POINTS - 1)))]
        seconds = sorted((rng.uniform(0.1, 1) * rng.choice([1, 10]) for _ in spaces), reverse=True)
        parts = zip(seconds, spaces, strict=True)
        found.append([Configuration((KernelPart(1, "any", t, w),)) for t, w in parts])
    return found


def by_highs(fronts: Fronts, total: int) -> float:
    """Return the seconds of HiGHS's choice."""
    t = np.array([c.seconds for front in fronts for c in front])
    w = np.array([c.workspace for front in fronts for c in front], float)
    owners = [k for k, front in enumerate(fronts) for _ in front]
    ones = np.zeros((len(fronts), len(t)))
    ones[owners, range(len(t))] = 1
    rules = [LinearConstraint(ones, 1, 1), LinearConstraint(w / total, -np.inf, 1)]
    options = {"mip_rel_gap": 0.0}
    found = milp(t, constraints=rules, integrality=1, bounds=Bounds(0, 1), options=options)
    assert found.success
    return float(found.fun)


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    instances: Annotated[int, typer.Option(help="random networks")] = 100,
) -> None:
    """Solve random instances by both, and write results.json."""
    instances = 2 if quick else instances
    rng = random.Random(SEED)
    seconds: dict[str, list[float]] = {"ours": [], "HiGHS": []}
    optimal, variables = dict.fromkeys(seconds, 0), []
    for number in range(instances):
        fronts = drawn(rng)
        total = int(sum(front[-1].workspace for front in fronts) * rng.uniform(0.02, 0.9))
        variables.append(sum(map(len, fronts)))
        begin = perf_counter()
        ours = sum(c.seconds for c in share(fronts, total))
        between = perf_counter()
        highs = by_highs(fronts, total)
        seconds["ours"].append(between - begin)
        seconds["HiGHS"].append(perf_counter() - between)
        optimal["ours"] += ours <= highs * (1 + 1e-9)
        optimal["HiGHS"] += highs <= ours * (1 + 1e-9)
        console.print(f"{number + 1} of {instances}")
    solvers = {
        name: {"median": median(times), "worst": max(times), "optimal": optimal[name]}
        for name, times in seconds.items()
    }
    sizes = {"instances": instances, "kernels": KERNELS}
    found = {"variables": round(median(variables)), "solvers": solvers}
    write(
        out / "results.json", {"environment": environment(), "seed": SEED, "sizes": sizes, **found}
    )


if __name__ == "__main__":
    typer.run(main)
