"""Networks of timm and MONAI: an engine and plain accumulation beside the undivided batch.

Two steps in float64, of 7 samples and then of 5, in micro-batches of 3: the last has one sample,
then two. An engine's gradients, and those of two loops, are compared with the undivided batch's;
of an engine buffers, too. (Under checkpointing torch updates running statistics twice in a step of
the undivided batch, an engine once.)
One loop averages the losses of micro-batches, the other weights each by its samples, which is the
best that one can write without knowledge of the network and the loss. The bound is Law 1's
(docs/why.md). Networks that draw run with `rng="batch"`; the loops draw other numbers, and are not
compared. A network with split BatchNorm takes an even number of samples: 8, and then 6.

What is refused must be: timm's `gcvit_xxtiny` repeats the global queries of all images in another
order than their windows, so that images meet; DropBlock divides by what it keeps of the full batch.

    make hosts    the packages, in an environment of their own; then this
    python -m benchmarks.hosts.zoo.run --only SwinUNETR    rows of these alone
"""

import copy
import time
import warnings
from collections import Counter
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from anybatch import Engine
from anybatch.errors import AnybatchError
from anybatch.tools.exactness import error_of, tolerance
from benchmarks.environment import environment
from benchmarks.hosts.zoo import networks, volumes
from benchmarks.hosts.zoo.networks import NETWORKS, Network
from benchmarks.mbs.honest import run as honest
from benchmarks.mbs.honest.run import SEED, STEPS, Row, Step, Tensors
from benchmarks.mbs.honest.subjects import Problem, Subject
from benchmarks.mbs.jobs import Died, answers
from benchmarks.mbs.problem import rows
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
MICRO_BATCH = 3
FEWER = 2
"""So many samples less has the second step."""

PATIENCE = 240.0
"""Seconds after which a network has no end."""

ENDS = ("wrong", "crash", "refused", "not shown", "exact")
"""What a network may come to, the worst first."""


def register() -> None:
    """Fill `NETWORKS`."""
    networks.register()
    volumes.register()


def smaller(step: Step, order: Tensor | None = None) -> Step:
    """A step whose second call, and every other one, has fewer samples; perhaps in an order."""
    calls = count()

    def run(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        n = len(targets) - FEWER * (next(calls) % STEPS)
        chosen = torch.arange(n) if order is None else order[order < n]
        return step(model, rows(inputs, chosen), rows(targets, chosen))

    return run


def accumulated(problem: Problem, *, weighted: bool) -> Step:
    """A loop over micro-batches: the mean of their losses, or each by its share of samples."""

    def step(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        n, total = len(targets), torch.zeros(())
        starts = range(0, n, MICRO_BATCH)
        for start in starts:
            chosen = torch.arange(start, min(start + MICRO_BATCH, n))
            x, y = rows(inputs, chosen), rows(targets, chosen)
            outputs = model(*x) if isinstance(x, tuple) else model(x)
            loss = problem.loss_fn(outputs, y) * (len(y) / n if weighted else 1 / len(starts))
            loss.backward()
            total = total + loss.detach()
        return total

    return step


def gradients(states: list[Tensors]) -> list[Tensors]:
    """Losses and gradients alone, without buffers."""
    return [{k: v for k, v in state.items() if not k.endswith("(buffer)")} for state in states]


def worst(got: list[Tensors], want: list[Tensors]) -> float:
    """The largest error of a tensor, rounded for the table."""
    return float(f"{max(max(error_of(a, b).values()) for a, b in zip(got, want, strict=True)):.2e}")


def loop(problem: Problem, want: list[Tensors], *, weighted: bool) -> float | str:
    """The error of a loop, or its error message."""
    try:
        found = honest.states(problem, smaller(accumulated(problem, weighted=weighted)))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return worst(gradients(found), gradients(want))


def bound_of(problem: Problem, want: list[Tensors]) -> float:
    """Law 1's bound: of rows in another order, or of three times the loss in kernels of float32.

    Draws of samples in another order are others, and no rounding.
    """
    order = torch.randperm(len(problem.targets), generator=torch.Generator().manual_seed(SEED))
    others = smaller(honest.undivided(problem), order), smaller(honest.undivided(problem, 3.0))
    noise = [worst(honest.states(problem, step), want) for step in others]
    return tolerance({"undivided": max((n for n in noise if n <= honest.ROUNDING), default=0.0)})


def engine_row(problem: Problem, want: list[Tensors], bound: float, options: Row) -> Row:
    """What an engine makes of a network."""
    engines: list[Engine] = []
    seconds: list[float] = []

    def step(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        if not engines:
            engines.append(Engine(model, problem.loss_fn, micro_batch=MICRO_BATCH, **options))
        start = time.perf_counter()
        loss = engines[0].backward(inputs, targets)
        seconds.append(time.perf_counter() - start)
        return loss

    try:
        got = honest.states(problem, smaller(step))
    except Exception as error:
        end = "refused" if isinstance(error, AnybatchError) else "crash"
        return {"end": end, "message": f"{type(error).__name__}: {error}"}
    plan, off = engines[0].plan, worst(gradients(got), gradients(want))
    assert plan is not None
    end = "wrong" if not off <= bound else "exact" if plan.exact else "not shown"
    found = {"end": end, "exact": str(plan.exact), "error": off, "loss": str(plan.loss)}
    found["buffers"] = worst(got, want)
    return found | {"mechanism": str(plan.mechanism), "seconds": [round(s, 3) for s in seconds]}


def row_of(network: Network) -> Row:
    """What a network came to, beside the loops; or why it was not run."""
    row: Row = {"family": network.family, "rng": "batch" if network.draws else "micro_batch"}
    start = time.perf_counter()
    try:
        problem = honest.made(Subject("", network.family, network.make))
        if not network.draws:
            networks.without_draws(problem.model)
        want = honest.states(problem, smaller(honest.undivided(problem)))
        bound = bound_of(problem, want)
    except Exception as error:
        return row | {"skipped": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    row |= {"bound": float(f"{bound:.2e}"), "norms": norms(problem.model)}
    options = {"rng": "batch"} if network.draws else {}
    row |= engine_row(problem, want, bound, options)
    if network.draws and row["end"] == "refused":
        row |= {"rng": "rates 0", "refused_draws": row["message"]}
        networks.without_draws(problem.model)
        want = honest.states(problem, smaller(honest.undivided(problem)))
        row |= engine_row(problem, want, bound_of(problem, want), {})
    if row["rng"] != "batch":
        row["mean"] = loop(problem, want, weighted=False)
        row["weighted"] = loop(problem, want, weighted=True)
    return row | {"total_seconds": round(time.perf_counter() - start, 1)}


def norms(model: nn.Module) -> list[str]:
    """Kinds of normalisation in a network."""
    found = {"BatchNorm" for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    for word in ("LayerNorm", "GroupNorm", "InstanceNorm", "RmsNorm", "EvoNorm"):
        found |= {word for m in model.modules() if type(m).__name__.startswith(word)}
    instances = nn.modules.instancenorm._InstanceNorm
    return sorted(found | {"InstanceNorm" for m in model.modules() if isinstance(m, instances)})


def answer(name: str) -> Row:
    """The row of a network, by its name."""
    if not NETWORKS:
        register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return row_of(copy.copy(NETWORKS[name]))


def summary(table: dict[str, Row]) -> dict[str, Row]:
    """By family: ends, and how many of the loops' gradients are within the bound."""
    families: dict[str, Row] = {}
    for row in table.values():
        count = families.setdefault(row["family"], Counter())
        count["skipped" if "skipped" in row else row["end"]] += 1
        for loop in ("mean", "weighted"):
            if loop in row:
                off = row[loop]
                count[f"{loop} within"] += isinstance(off, float) and off <= row["bound"]
                count[f"{loop} of"] += 1
    return {name: dict(count) for name, count in families.items()}


def line(name: str, row: Row) -> str:
    """A network on one line."""
    if "skipped" in row:
        return f"{name}: skipped, {row['skipped']}"
    shown = [row["end"], row.get("mechanism", ""), str(row.get("error", row.get("message", "")))]
    shown += [f"{loop} {row[loop]}" for loop in ("mean", "weighted") if loop in row]
    return f"{name}: {', '.join(shown)} ({row.get('total_seconds', 0)} s)"


def main(
    *,
    only: Annotated[str, typer.Option(help="networks whose name holds this, their rows")] = "",
    quick: bool = False,
    out: Path = HERE,
) -> None:
    """Run every network, print a line for each, and write results.json as it goes."""
    register()
    if not NETWORKS:
        raise SystemExit("install timm or monai beside this torch: make hosts")
    torch.set_num_threads(1)
    names = [name for name in NETWORKS if only in name][:: 25 if quick else 1]
    before = read(out / "results.json") if only else None
    table: dict[str, Row] = before["networks"] if before else {}
    for done, (name, found) in enumerate(answers(answer, names, PATIENCE), 1):
        crash = {"family": NETWORKS[name].family, "end": "crash", "message": str(found)}
        table[name] = crash if isinstance(found, Died) else found
        console.print(f"{done} of {len(names)}", line(name, table[name]), highlight=False)
        if done % 20 == 0 or done == len(names):
            results = {"seed": SEED, "environment": environment(), "micro_batch": MICRO_BATCH}
            results |= {"networks": table, "families": summary(table), "loops": loops(table)}
            write(out / "results.json", results)
    console.print(summary(table))


def loops(table: dict[str, Row]) -> Row:
    """Median errors of the loops and of an engine, over networks on which all of them run."""
    every = [row for row in table.values() if isinstance(row.get("weighted"), float)]
    every = [row for row in every if isinstance(row["mean"], float) and "error" in row]
    columns = ("error", "mean", "weighted")
    medians = {c: median(row[c] for row in every) if every else None for c in columns}
    return medians | {"networks": len(every)}


if __name__ == "__main__":
    typer.run(main)
