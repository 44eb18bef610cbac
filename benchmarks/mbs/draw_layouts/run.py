"""Layouts of full-batch draws: which rules find them, over networks that draw in training.

`rng="batch"` has to know where a draw holds the samples. Two steps in float64 on 7 samples, in
micro-batches of 3, are compared with the undivided batch, under four rules:

- *shape*: a draw whose first dimension is a multiple of the rows of the micro-batch holds the
  samples there, neighbours a sample; any other is the same for all samples. No forward is needed;
- *two sizes*: the model is called at two or three numbers of rows, and the dimension that grows
  holds the samples, neighbours a sample. Rows must give the same outputs as part of more rows;
- *neighbours*: in addition, where a sample has several entries along the dimension, one sample's
  are made NaN and must show in that sample's outputs only. Other draws are refused;
- *arrangements*: in addition, other arrangements of several entries are tried: two views one after
  the other, time before samples.

The proof that samples do not meet in the model comes before, asks another question, and is left
out. Where no draw has several entries a sample, the last three rules do the same and run once.

Networks: families of Transformers with random weights, with every rate of their configuration
whose name holds "drop" at 0.2; the honest networks that draw; and usual networks written here,
among them some that draw what a micro-batch cannot. Networks that draw nothing are left out.

    python -m benchmarks.mbs.draw_layouts.run --only Swin --show    networks whose name holds this
"""

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track
from torch import Tensor, nn

from anybatch import Engine
from anybatch.core.batch import copied
from anybatch.core.modules import call_model
from anybatch.core.rng import RNGState
from anybatch.engine import executor
from anybatch.errors import AnybatchError, NotExactError
from anybatch.execution.few_rows import layout_of as outputs_layout
from anybatch.execution.few_rows import two_sizes
from anybatch.execution.full_batch_rng import draw_layout
from anybatch.execution.full_batch_rng.kernels import Draw, fault_of
from anybatch.execution.full_batch_rng.law import Law, Pattern, fitted
from anybatch.execution.full_batch_rng.mode import FullBatchRNG, SharedDraws
from benchmarks.environment import environment
from benchmarks.mbs.draw_layouts.networks import FOUND, register, swapped
from benchmarks.mbs.honest.run import SEED, Row, Step, bound_of, made, states, undivided, worst
from benchmarks.mbs.honest.subjects import ROWS, Problem, Subject
from benchmarks.mbs.jobs import Died, answers
from benchmarks.results import console, write

HERE = Path(__file__).parent
MICRO_BATCH = 3


def _by_shape(mode: FullBatchRNG, draw: Draw, own: Pattern) -> tuple[Law, Pattern]:
    """The layout that the shape of one micro-batch suggests."""
    n, sizes = mode.rows.size, own.sizes
    mode.shared.laws.steady = True
    law: Law | None = Law(None)
    if sizes and sizes[0] and sizes[0] % n == 0:
        more = Pattern((sizes[0] // n * (n + 1), *sizes[1:]), own.strides)
        law = fitted([own, more], [n, n + 1])
    full = None if law is None else law.full_pattern(own, mode.rows)
    assert law is not None
    fault = fault_of(draw.name, law, len(sizes))
    if fault is not None or full is None:
        raise NotExactError(fault or "no pattern")
    return law, full


def _one_arrangement(law: Law, _entries: int, _n: int) -> Iterator[Law]:
    yield law


RULES: dict[str, list[tuple[Any, str, Any]]] = {
    "shape": [(FullBatchRNG, "_law", _by_shape)],
    "two sizes": [(draw_layout.Lesson, "_settle", lambda *_: None)],
    "neighbours": [(draw_layout, "candidates", _one_arrangement)],
    "arrangements": [],
}
"""What each rule puts in the place of a part of the engine; the last is the engine's own."""

OWN = list(RULES)[-1]


@contextmanager
def rule(name: str) -> Iterator[None]:
    """Find layouts by a rule in the body."""
    with ExitStack() as stack:
        for owner, attribute, value in RULES[name]:
            stack.enter_context(swapped(owner, attribute, value))
        yield


def without_proof(step: Any, *_: Any) -> None:
    """Find where outputs hold the samples, which the proof does too."""
    step.traits.looked = step.traits.steps
    if not step.loss.takes_outputs:
        return
    rng = RNGState.now()
    with torch.no_grad():
        full, part = two_sizes(step)
        outputs, fewer = (call_model(step.model, copied(one).inputs) for one in (full, part))
    rng.put_back()
    step.buffers.restart()
    step.traits.layout = outputs_layout(outputs, fewer, full.size, part.size)


@contextmanager
def watched(steps: list[SharedDraws], calls: list[int], trials: list[int]) -> Iterator[None]:
    """Note the draws of each step, the forwards by which layouts are learnt, and the trials."""
    begin, call = SharedDraws.begin, draw_layout.Lesson._call
    arrangements: Any = vars(draw_layout)["candidates"]  # the rule's

    def noted(shared: SharedDraws) -> None:
        steps.append(shared)
        begin(shared)

    def counted(lesson: draw_layout.Lesson, *args: Any) -> Any:
        calls.append(1)
        return call(lesson, *args)

    def tried(law: Law, entries: int, n: int) -> Iterator[Law]:
        trials.append(1)
        yield from arrangements(law, entries, n)

    with (
        swapped(SharedDraws, "begin", noted),
        swapped(draw_layout.Lesson, "_call", counted),
        swapped(draw_layout, "candidates", tried),
        swapped(executor, "inspect_model", without_proof),
    ):
        yield


def seeded(step: Step) -> Step:
    """A step before which the generators of Python and numpy are seeded too."""

    def run(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        random.seed(SEED)
        np.random.seed(SEED)
        return step(model, inputs, targets)

    return run


def by_engine(problem: Problem) -> Step:
    """Two steps of one engine."""
    engines: list[Engine] = []

    def step(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        engines.append(engines[0] if engines else Engine(
            model, problem.loss_fn, micro_batch=MICRO_BATCH, rng="batch"))  # fmt: skip
        return engines[0].backward(inputs, targets)

    return seeded(step)


def outcome(problem: Problem, want: Any, bound: float) -> Row:
    """What an engine makes of a network: exact, refused, wrong or a crash."""
    try:
        off = worst(states(problem, by_engine(problem)), want)
    except Exception as error:
        found = "refused" if isinstance(error, AnybatchError) else "crash"
        return {"outcome": found, "message": f"{type(error).__name__}: {error}"[:300]}
    return {"outcome": "exact" if off <= bound else "wrong", "error": float(f"{off:.2e}")}


def layout_of(law: Law, sizes: tuple[int, ...], size: int) -> str:
    """A layout in words."""
    if law.dim is None:
        return "shared"
    where = "first" if law.dim == 0 else "later"
    if sizes[law.dim] == size:
        return f"{where}, one entry"
    return f"{where}, neighbours" if law.before == 1 else f"{where}, other"


def row_of(subject: Subject) -> Row:
    """What each rule comes to on a network, or why it was not run."""
    row: Row = {"group": subject.group}
    try:
        problem = made(subject)
        want = states(problem, seeded(undivided(problem)))
        bound = bound_of(subject, problem, want)
    except Exception as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        return row | {"skipped": first[:160]}
    row |= {"bound": float(f"{bound:.2e}"), "rules": {}}
    for name in reversed(RULES):
        if name not in ("shape", OWN) and not row["trials"]:
            row["rules"][name] = row["rules"][OWN]
            continue
        steps: list[SharedDraws] = []
        calls: list[int] = []
        trials: list[int] = []
        with rule(name), watched(steps, calls, trials):
            found = outcome(problem, want, bound)
        row["rules"][name] = found | {"forwards": len(calls)}
        if name != OWN:
            continue
        row["trials"] = len(trials)
        if found["outcome"] == "exact":
            size = steps[-1].size
            words = [layout_of(one.law, one.full.sizes, size) for one in steps[-1].draws]
            row["draws"] = dict(Counter(words))
            if not words:
                return row
    row["rules"] = {name: row["rules"][name] for name in RULES}
    return row


def answer(name: str) -> Row:
    """The row of a network, by its name."""
    if name not in FOUND:
        register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return row_of(FOUND[name])


def draws(row: Row) -> bool:
    """Whether a network was run and draws."""
    return "rules" in row and (row.get("draws", {"refused": 1}) != {})


def summary(table: dict[str, Row]) -> dict[str, dict[str, dict[str, int]]]:
    """Networks that draw, by group, rule and outcome."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for row in table.values():
        if draws(row):
            for name, one in row["rules"].items():
                group = found.setdefault(row["group"], {})
                group.setdefault(name, Counter())[one["outcome"]] += 1
    return {group: {name: dict(c) for name, c in by.items()} for group, by in found.items()}


def main(
    *,
    only: Annotated[str, typer.Option(help="networks whose name holds this; no file")] = "",
    show: Annotated[bool, typer.Option("--show", help="print each network")] = False,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Run every network under every rule and write results.json."""
    torch.set_num_threads(1)
    register()
    names = [name for name in FOUND if only in name][:: 25 if quick else 1]
    table: dict[str, Row] = {}
    for name, found in track(answers(answer, names), "draws", total=len(names), console=console):
        table[name] = {"group": FOUND[name].group, "skipped": str(found)} if isinstance(
            found, Died) else found  # fmt: skip
        if show:
            console.print(name, table[name], highlight=False)
    console.print(summary(table))
    if not only:
        results = {"seed": SEED, "environment": environment(), "rows": ROWS}
        results |= {"micro_batch": MICRO_BATCH, "networks": table, "groups": summary(table)}
        write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
