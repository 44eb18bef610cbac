"""Heads of a vocabulary and their cross-entropy, at once and in chunks of rows.

u-cuDNN divides convolutions, and its conclusion asks for other layers. The widest kernel of a
language model is the product with its vocabulary. Each shape is a head and a cross-entropy of rows,
forward and backward, in turn at once, in chunks of several sizes, in those that `chunked_losses`
chooses, and by torch's own `linear_cross_entropy` with its default chunks. Seconds are the median
of a few rounds, relative to all logits at once; bytes are those at the peak, as a meter counts.

Then a block of a transformer with a head, one sample of a batch of four: the least budget with
which an engine runs it, and the peak and the seconds of its steps there.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, chunked_losses
from anybatch.errors import BudgetError
from anybatch.memory.meter import Meter
from anybatch.planner import planner
from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
Found = dict[str, Any]
Shape = tuple[int, int, int]

SHAPES: list[Shape] = [
    (32_000, 64, 2048),
    (32_000, 512, 1024),
    (50_257, 768, 512),
    (128_256, 256, 512),
]
"""Vocabulary, features, rows."""
QUICK: list[Shape] = [(1000, 8, 64)]
ROWS = (16, 32, 64, 128, 256, 512)
ROUNDS = 7
BLOCKS = [(512, 64), (2048, 64), (512, 512)]
"""Tokens of a sample, features."""
VOCABULARY, SAMPLES = 32_000, 4
CPU = torch.device("cpu")

Ways = dict[str, Callable[[], None]]


def ways(vocabulary: int, features: int, rows: int) -> tuple[nn.Linear, Tensor, Ways]:
    """Return a head, its rows, and a forward and backward in each way."""
    torch.manual_seed(0)
    head = nn.Linear(features, vocabulary, bias=False)
    h = torch.randn(rows, features, requires_grad=True)
    y = torch.randint(vocabulary, (rows,))

    def ours(context: Callable[[], AbstractContextManager[Any]]) -> None:
        with context():
            F.cross_entropy(head(h), y).backward()  # type: ignore[no-untyped-call]

    found: Ways = {"at once": partial(ours, nullcontext), "chosen": partial(ours, chunked_losses)}
    found |= {str(n): partial(ours, partial(chunked_losses, n)) for n in ROWS if n <= rows}
    if hasattr(F, "linear_cross_entropy"):
        found["torch"] = lambda: F.linear_cross_entropy(h, head.weight, y).backward()  # type: ignore[no-untyped-call]
    return head, h, found


def measured(shape: Shape, rounds: int) -> Found:
    """Return the seconds and the peak of each way."""
    head, h, every = ways(*shape)
    seconds: dict[str, list[float]] = {name: [] for name in every}
    peaks = {}
    for name, run in every.items():
        head.weight.grad = h.grad = None
        with Meter(CPU, {"there": [head.weight, h]}) as meter:
            run()
        peaks[name] = int(meter.peak)
    for _ in range(rounds):
        for name, run in every.items():
            head.weight.grad = h.grad = None
            start = perf_counter()
            run()
            seconds[name].append(perf_counter() - start)
    return {
        "shape": shape,
        "seconds": {name: statistics.median(found) for name, found in seconds.items()},
        "peaks": peaks,
    }


class Block(nn.Module):
    """Tokens, one layer of a transformer, and a head with the weight of the embedding."""

    def __init__(self, features: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.layer = nn.TransformerEncoderLayer(
            features, 4, 4 * features, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(features, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        z = self.head(self.layer(self.embedding(x)))
        return F.cross_entropy(z.flatten(0, 1), y.flatten())


@contextmanager
def chunks(*, allowed: bool) -> Iterator[None]:
    """Let engines compute in chunks, or not."""
    before = planner.CHUNKS
    setattr(planner, "CHUNKS", before if allowed else ())  # noqa: B010
    try:
        yield
    finally:
        planner.CHUNKS = before


def least(tokens: int, features: int, vocabulary: int, *, allowed: bool, steps: int) -> Found:
    """Return the least budget of a block, and the peak and the seconds of steps with it."""
    torch.manual_seed(0)
    shape = SAMPLES, tokens
    batch = torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)
    budget = 1 << 10
    while True:
        try:
            with chunks(allowed=allowed):
                return at(budget, Block(features, vocabulary), batch, steps)
        except BudgetError as error:
            budget = max(budget + 1024, -(-error.needed // 1024) * 1024)


def at(budget: int, model: Block, batch: tuple[Tensor, Tensor], steps: int) -> Found:
    """Return the peak and the seconds of steps with a budget.

    Raises:
        BudgetError: it is too small.
    """
    engine = Engine(model, memory=budget, cache=None, tune="off")
    engine.backward(batch)
    peaks, seconds = [], []
    for _ in range(steps):
        model.zero_grad()
        with Meter(CPU, {"there": [*model.parameters()]}) as meter:
            engine.backward(batch)
        peaks.append(int(meter.peak))
        model.zero_grad()
        start = perf_counter()
        engine.backward(batch)
        seconds.append(perf_counter() - start)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    return {
        "budget": budget,
        "peak": max(peaks),
        "seconds": statistics.median(seconds),
        "micro_batch": engine.plan.micro_batch,
        "chunk": engine.plan.memory.chunked,
        "offloads": engine.plan.offload is not None,
    }


def main(
    *, quick: bool = False, out: Annotated[Path, typer.Option(help="folder of results")] = HERE
) -> None:
    """Run all of them, and write results.json."""
    shapes, blocks = (QUICK, [(8, 4)]) if quick else (SHAPES, BLOCKS)
    vocabulary, steps = (500, 1) if quick else (VOCABULARY, 3)
    heads = [
        measured(shape, 1 if quick else ROUNDS) for shape in track(shapes, "heads", console=console)
    ]
    floors = [
        {
            "tokens": tokens,
            "features": features,
            "at once": least(tokens, features, vocabulary, allowed=False, steps=steps),
            "chunks": least(tokens, features, vocabulary, allowed=True, steps=steps),
        }
        for tokens, features in track(blocks, "blocks", console=console)
    ]
    found = {"environment": environment(), "vocabulary": vocabulary, "samples": SAMPLES}
    write(out / "results.json", {**found, "heads": heads, "floors": floors})


if __name__ == "__main__":
    typer.run(main)
