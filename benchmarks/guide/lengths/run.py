"""Batches of random lengths within a budget, beside a loop by hand at its best size.

A language model trains on 16 rows of 32 to 127 tokens, of another length in every batch. The loop
by hand knows no budget: it divides each batch into 8 or 16 rows, whichever is faster. The
engine begins with nothing kept, so its seconds have all planning in them. Both run in the same
process, the loop first.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F

from anybatch import Engine
from benchmarks.environment import environment
from benchmarks.mbs.models import TransformerLM
from benchmarks.results import console, write

HERE = Path(__file__).parent
ROWS, SHORTEST, LONGEST, WORDS, SEED = 16, 32, 128, 512, 0
COUNTS, BUDGETS, SIZES = (60, 300), (20 << 20, 80 << 20), (8, 16)
Found = dict[str, Any]


def model() -> TransformerLM:
    """Return the network, the same one every time."""
    torch.manual_seed(SEED)
    return TransformerLM(vocabulary=WORDS, width=128, layers=4, heads=4, length=LONGEST)


def loss_fn(out: Tensor, y: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens [rows, length] and the ones that follow."""
    source = torch.Generator().manual_seed(SEED)
    for _ in range(count):
        length = int(torch.randint(SHORTEST, LONGEST, (), generator=source))
        tokens = torch.randint(WORDS, (ROWS, length + 1), generator=source)
        yield tokens[:, :-1], tokens[:, 1:]


def by_hand(count: int, n: int) -> float:
    """Return the seconds of a loop in micro-batches of `n`."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    start = perf_counter()
    for x, y in batches(count):
        optimizer.zero_grad()
        for begin in range(0, len(x), n):
            some, of_some = x[begin : begin + n], y[begin : begin + n]
            (loss_fn(net(some), of_some) * len(some) / len(x)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return perf_counter() - start


def within(count: int, budget: int) -> tuple[list[float], int, int]:
    """Return the seconds of each step, the changes of the size, and the most bytes foreseen."""
    net, seconds, most = model(), list[float](), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    engine = Engine(net, loss_fn, optimizer=optimizer, memory=budget, cache=None)
    decided, before = 0, None
    for x, y in batches(count):
        start = perf_counter()
        optimizer.zero_grad()
        engine.backward(x, y)
        optimizer.step()
        seconds.append(perf_counter() - start)
        assert engine.last is not None
        most = max(most, engine.last.predicted_bytes or 0)
        decided += engine.last.micro_batch != before
        before = engine.last.micro_batch
    return seconds, decided, most


def run(count: int, budget: int) -> Found:
    """Return the seconds of both."""
    by_hand(3, SIZES[-1])
    loops = {n: by_hand(count, n) for n in SIZES}
    seconds, changes, most = within(count, budget)
    return {
        "batches": count,
        "budget": budget,
        "by_hand": {str(n): found for n, found in loops.items()},
        "total": sum(seconds),
        "first": seconds[0],
        "slow": sorted(seconds[1:], reverse=True)[:8],
        "median": statistics.median(seconds),
        "changes": changes,
        "predicted": most,
    }


def main(
    *, quick: bool = False, out: Annotated[Path, typer.Option(help="folder of results")] = HERE
) -> None:
    """Run all of them, and write results.json."""
    torch.set_num_threads(1)
    counts, budgets = ((4,), BUDGETS[1:]) if quick else (COUNTS, BUDGETS)
    every = [(count, budget) for count in counts for budget in budgets]
    rows = [run(*one) for one in track(every, "trainings", console=console)]
    write(out / "results.json", {"environment": environment(), "seed": SEED, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
