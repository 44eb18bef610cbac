"""Steps whose memory depends on the values of their batch, within a budget.

Networks send tokens through a wider part: by a mask, by places, behind a branch, by a selection of
numbers, or in as many rounds as each token needs. Few tokens go there in the first three steps, and
60 % of them from then on: an undivided step then holds about twice the budget. A meter around each
step, which knows nothing of the engine's, shows what it holds; the gradient is compared with that
of the undivided batch. The cost is that of a step with a budget, in pairs with a step of the same
micro-batch without one.
"""

import copy
import statistics
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import BudgetError
from anybatch.memory.meter import Meter
from benchmarks.environment import environment
from benchmarks.guide.values.networks import WAYS, Values, batch
from benchmarks.results import console, write

HERE = Path(__file__).parent
BUDGET, FEW, MANY, STEPS, PAIRS = 1400 << 10, 0.02, 0.6, 12, 40
CHANGE = 3
"""The first step with many tokens."""
Found = dict[str, Any]


def shares(count: int) -> list[float]:
    """Return the share of each step."""
    return [FEW if number < CHANGE else MANY for number in range(count)]


def error(model: Values, twin: Values) -> float:
    """Return the largest difference of two gradients, relative to the largest of the second."""
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    most = max(float(b.abs().max()) for _, b in pairs if b is not None)
    found = [float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None]
    return max(found) / most


def steps(name: str, count: int) -> list[Found]:
    """Return what each step held, what was foreseen of it, and its error."""
    torch.manual_seed(0)
    model = Values(WAYS[name]).double()
    found: list[Found] = []
    engine = Engine(model, F.cross_entropy, memory=BUDGET, cache=None)
    for number, share in enumerate(shares(count)):
        x, y = batch(share, number)
        twin = copy.deepcopy(model)
        F.cross_entropy(twin(x), y).backward()  # type: ignore[no-untyped-call]
        try:
            with Meter(torch.device("cpu"), {"there": [*model.parameters()]}) as meter:
                engine.backward(x, y)
        except BudgetError as refused:
            found.append({"refused": str(refused)})
            break
        last = engine.last
        assert last is not None
        found.append(
            {
                "held": int(meter.peak),
                "predicted": last.predicted_bytes,
                "micro_batch": last.micro_batch,
                "retries": last.retries,
                "error": error(model, twin),
            }
        )
        model.zero_grad()
    return found


def cost(name: str, pairs: int) -> float:
    """Return the median of seconds with a budget by seconds without one."""
    torch.manual_seed(0)
    model = Values(WAYS[name]).double()
    within = Engine(model, F.cross_entropy, memory=16 * BUDGET, cache=None)
    x, y = batch(MANY, 0)
    for _ in range(CHANGE + 9):
        within.backward(x, y)
    assert within.last is not None
    without = Engine(model, F.cross_entropy, micro_batch=within.last.micro_batch)
    without.backward(x, y)
    ratios = []
    for _ in range(pairs):
        seconds = []
        for engine in (within, without):
            start = perf_counter()
            engine.backward(x, y)
            seconds.append(perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def main(
    *, quick: bool = False, out: Annotated[Path, typer.Option(help="folder of results")] = HERE
) -> None:
    """Run all of them, and write results.json."""
    torch.set_num_threads(1)
    names = list(WAYS)[:1] if quick else list(WAYS)
    rows = []
    for name in track(names, "networks", console=console):
        found = steps(name, CHANGE + 3 if quick else STEPS)
        rows.append({"way": name, "steps": found, "cost": cost(name, 3 if quick else PAIRS)})
    write(out / "results.json", {"environment": environment(), "budget": BUDGET, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
