"""Honest networks, each run by an engine and undivided: none may be refused.

Two steps in float64 run on 7 samples, in micro-batches of 3 (the last of one sample) and of one
sample. The latter run where the network itself accepts one sample, or normalises it with others
(BatchNorm). The bound is Law 1's (docs/why.md); networks in bfloat16 may be ten times as far from
the undivided batch in float64 as the undivided batch in bfloat16 is. Networks that draw random
numbers run with `rng="batch"`. Networks: ours and those of the tests, blocks of vision, language,
sequences and graphs, each module of torch's module database, and families of Transformers with
random weights. Networks that are not installed, or have no inputs, are listed with the reason.

    python -m benchmarks.mbs.honest.run --only Swin --show    networks whose name holds this
"""

import copy
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn

from anybatch import Engine
from anybatch.core.pytree import map_tensors
from anybatch.errors import AnybatchError
from anybatch.loss.base import loss_inside
from anybatch.tools.exactness import FLOOR, NOISE_FACTOR, error_of, tolerance
from benchmarks.environment import environment
from benchmarks.mbs.honest import families, inside, modules, networks
from benchmarks.mbs.honest.subjects import ROWS, SUBJECTS, Problem, Subject
from benchmarks.mbs.jobs import Died, answers
from benchmarks.mbs.problem import rows
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED, STEPS = 0, 2
SPLITS = {"uneven": 3, "one sample": 1}
ROUNDING = 1e-5
"""Undivided runs in float64 that differ by more draw other numbers for other rows."""

BLOCKS = networks.__name__, inside.__name__
"""The modules that register when they are imported; the others do so when asked to."""
Row = dict[str, Any]
Tensors = dict[str, Tensor]
Step = Callable[[nn.Module, Any, Any], Tensor]


def register() -> None:
    """Fill `SUBJECTS`."""
    modules.register()
    families.register()


def made(subject: Subject, device: str = "cpu") -> Problem:
    """The network and its batch, in float64, with numbers that its dtype holds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(SEED)
    try:
        problem = subject.make()
    finally:
        torch.set_default_dtype(before)
    problem.model.to(subject.dtype).double() if subject.dtype != torch.float64 else None
    inputs, targets = (cast(cast(v, subject.dtype), torch.float64) for v in _data(problem))
    inputs, targets = (map_tensors(lambda t: t.to(device), v) for v in (inputs, targets))
    loss_fn = problem.loss_fn
    for module in (loss_fn, getattr(loss_fn, "inner", None)):
        if isinstance(module, nn.Module):
            module.to(device)
    return Problem(problem.model.to(device), inputs, targets, loss_fn)


def _data(problem: Problem) -> tuple[Any, Any]:
    return problem.inputs, problem.targets


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """A tree whose real tensors have a dtype."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, tuple | list):
        return type(tree)(cast(value, dtype) for value in tree)
    return tree


def states(problem: Problem, step: Step, dtype: torch.dtype = torch.float64) -> list[Tensors]:
    """Loss, gradients and buffers after each step of a copy of the network."""
    model = copy.deepcopy(problem.model)
    model = model if dtype == torch.float64 else model.to(dtype)
    found = []
    for index in range(STEPS):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED + index)
        inputs, targets = (copy.deepcopy(cast(v, dtype)) for v in _data(problem))
        state = {"loss": step(model, inputs, targets).detach().clone()}
        for name, p in model.named_parameters():
            if p.grad is not None:
                state[f"{name}.grad"] = p.grad.detach().clone()
        state |= {f"{name} (buffer)": b.detach().clone() for name, b in model.named_buffers()}
        found.append(state)
    return found


def undivided(problem: Problem, factor: float = 1.0, order: Tensor | None = None) -> Step:
    """A step of the batch as it is; its loss may be scaled, its rows in another order."""

    def step(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        if order is not None:
            inputs, targets = rows(inputs, order), rows(targets, order)
        outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        loss: Tensor
        if problem.loss_fn is None:
            loss = loss_inside(outputs)
        elif targets is None:
            loss = problem.loss_fn(outputs)
        else:
            loss = problem.loss_fn(outputs, targets)
        (loss * factor).backward()  # type: ignore[no-untyped-call]
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(factor)
        return loss

    return step


def worst(got: list[Tensors], want: list[Tensors]) -> float:
    return max(max(error_of(a, b).values()) for a, b in zip(got, want, strict=True))


def bound_of(subject: Subject, problem: Problem, want: list[Tensors]) -> float:
    """Law 1's bound; in another dtype ten times the distance of the undivided batch in it."""
    if subject.dtype != torch.float64:
        far = worst(states(problem, undivided(problem), subject.dtype), want)
        return NOISE_FACTOR * max(FLOOR, torch.finfo(subject.dtype).eps, far)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(SEED))
    others = undivided(problem, order=order), undivided(problem, factor=3.0)
    noise = [worst(states(problem, step), want) for step in others]
    return tolerance({"undivided": max((n for n in noise if n <= ROUNDING), default=0.0)})


def takes_one(problem: Problem) -> bool:
    """Whether the network itself can train on one sample."""
    inputs, targets = (rows(v, slice(0, 1)) for v in _data(problem))
    try:
        undivided(problem)(copy.deepcopy(problem.model), inputs, targets)
    except Exception:
        return False
    return True


def one_split(
    subject: Subject, problem: Problem, size: int, want: list[Tensors], bound: float
) -> Row:
    """What an engine makes of a network: an outcome, an error, seconds of each step."""
    engines: list[Engine] = []
    seconds = []
    options: dict[str, Any] = {} if subject.rng is None else {"rng": subject.rng}

    def step(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        start = time.perf_counter()
        engines.append(engines[0] if engines else Engine(
            model, problem.loss_fn, micro_batch=size, **options))  # fmt: skip
        loss = engines[0].backward(inputs, targets)
        seconds.append(time.perf_counter() - start)
        return loss

    try:
        got = states(problem, step, subject.dtype)
    except Exception as error:
        outcome = "refused" if isinstance(error, AnybatchError) else "crash"
        return {"outcome": outcome, "message": f"{type(error).__name__}: {error}"[:300]}
    plan, off = engines[0].plan, worst(got, want)
    assert plan is not None
    found = {"outcome": "exact"} if plan.exact else {"outcome": "not claimed"}
    return {
        **(found if off <= bound else {"outcome": "wrong"}),
        **({} if plan.exact else {"message": str(plan.exact)}),
        "error": float(f"{off:.2e}"),
        "mechanism": str(plan.mechanism),
        "first": round(seconds[0], 4),
        "later": round(seconds[-1], 4),
    }


def answer(name: str, device: str = "cpu") -> Row:
    """The row of a network, by its name."""
    if name not in SUBJECTS:
        register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return row_of(SUBJECTS[name], device)


def row_of(subject: Subject, device: str = "cpu") -> Row:
    """What the splits of a network came to, or why it was not run."""
    row: Row = {"group": subject.group}
    try:
        problem = made(subject, device)
        want = states(problem, undivided(problem))
        bound = bound_of(subject, problem, want)
    except Exception as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        return row | {"skipped": first[:160]}
    row |= {"bound": float(f"{bound:.2e}"), "splits": {}}
    for split, size in SPLITS.items():
        together = any(one.get("mechanism") != "streaming" for one in row["splits"].values())
        if size > 1 or together or takes_one(problem):
            row["splits"][split] = one_split(subject, problem, size, want, bound)
    start = time.perf_counter()
    states(problem, undivided(problem))
    return row | {"undivided": round((time.perf_counter() - start) / STEPS, 4)}


def died(name: str, why: Died) -> Row:
    """The row of a network whose process did not answer."""
    crash = {"uneven": {"outcome": "crash", "message": str(why)}}
    return {"group": SUBJECTS[name].group, "splits": crash}


def is_exact(row: Row) -> bool:
    """Whether each split was exact and claimed."""
    splits = row.get("splits", {}).values()
    return bool(splits) and all(one["outcome"] == "exact" for one in splits)


def summary(table: dict[str, Row]) -> Row:
    """Networks by group and outcome; a network is what the worst of its splits is."""
    ranking = ("wrong", "crash", "refused", "not claimed", "exact")
    groups: dict[str, Counter[str]] = {}
    for row in table.values():
        outcomes = {one["outcome"] for one in row.get("splits", {}).values()}
        found = "skipped" if "skipped" in row else next(o for o in ranking if o in outcomes)
        groups.setdefault(row["group"], Counter())[found] += 1
    return {group: dict(count) for group, count in groups.items()}


def main(
    *,
    only: Annotated[str, typer.Option(help="networks whose name holds this; no file")] = "",
    show: Annotated[bool, typer.Option("--show", help="print each network")] = False,
    quick: bool = False,
    device: str = "cpu",
    jobs: Annotated[int, typer.Option(help="processes, with one thread each")] = 1,
    out: Path = HERE,
) -> None:
    """Run every network and write results.json."""
    torch.set_num_threads(1)
    register()
    names = [name for name in SUBJECTS if only in name][:: 25 if quick else 1]
    table: dict[str, Row] = {}
    ask = partial(answer, device=device)
    found_of = answers(ask, names, jobs=jobs)
    for name, found in track(found_of, "honest", total=len(names), console=console):
        table[name] = died(name, found) if isinstance(found, Died) else found
        if show or not is_exact(table[name]):
            console.print(name, table[name], highlight=False)
    groups = summary(table)
    console.print(groups)
    if not only:
        results = {"seed": SEED, "environment": environment(), "rows": ROWS, "steps": STEPS}
        results |= {"networks": table, "groups": groups}
        write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
