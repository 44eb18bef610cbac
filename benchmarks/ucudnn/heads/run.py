"""Heads of a vocabulary and their cross-entropy, at once and in chunks of rows.

u-cuDNN divides convolutions, and its conclusion asks for other layers. The widest kernel of a
language model is the product with its vocabulary. Each shape is a head and a cross-entropy of rows,
forward and backward, in turn at once, in chunks of several sizes, in those that `chunked_losses`
chooses, and by torch's own `linear_cross_entropy` with its default chunks. Seconds are the median
of a few rounds, relative to all logits at once; bytes are those at the peak, as a meter counts.

On a GPU heads are those of language models, with parameters in bfloat16, or in float32 under
autocast. Beside them run the kernels of Liger and of cut cross-entropy, where they are installed.
Errors are those of the weight's gradient, relative to float64; bytes are the allocator's.

Then a block of a transformer with a head, one sample of a batch of four: the least budget with
which an engine runs it, and the peak and the seconds of its steps there.

Last, blocks and batches that must be divided: steps of two engines in turn, of which one may
compute in chunks, once both have settled.
"""

import copy
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, chunked_losses, plan
from anybatch.errors import BudgetError
from anybatch.memory.meter import Meter
from benchmarks.environment import environment
from benchmarks.results import console, read, write
from benchmarks.ucudnn.device import finish, seconds

HERE = Path(__file__).parent
Found = dict[str, Any]
Shape = tuple[int, int, int]

SHAPES: dict[str, list[Shape]] = {
    "cpu": [(32_000, 64, 2048), (32_000, 512, 1024), (50_257, 768, 512), (128_256, 256, 512)],
    "cuda": [
        (32_000, 4096, 16_384),
        (50_257, 768, 16_384),
        (128_256, 4096, 8192),
        (151_936, 1024, 16_384),
    ],
}
"""Vocabulary, features, rows."""
QUICK: list[Shape] = [(1000, 8, 64)]
ROWS = {"cpu": (16, 32, 64, 128, 256, 512), "cuda": (64, 256, 512, 1024, 2048, 4096, 8192)}
PRECISIONS = {"cpu": ("float32",), "cuda": ("bfloat16", "autocast")}
ROUNDS = 7
BLOCKS = {"cpu": [(512, 64), (2048, 64), (512, 512)], "cuda": [(2048, 512), (16_384, 512)]}
"""Tokens of a sample, features."""
VOCABULARY, SAMPLES = 32_000, 4
DIVIDED, SHARES = [(128, 128), (128, 512), (512, 256)], (0.3, 0.45, 0.7)
"""Tokens of a sample, features; shares of the undivided bytes that are budgets."""
BATCH, SETTLED = 16, 10

Ways = dict[str, Callable[[], None]]


def peers(h: Tensor, w: Tensor, y: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the losses of other packages that are installed, of rows, a weight and labels."""
    found: dict[str, Callable[[], Tensor]] = {}
    if hasattr(F, "linear_cross_entropy"):
        found["torch"] = lambda: F.linear_cross_entropy(h, w, y)
    if not h.is_cuda:
        return found
    if find_spec("liger_kernel"):
        liger = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda: liger(w, h, y)
    if find_spec("cut_cross_entropy"):
        cut = import_module("cut_cross_entropy").linear_cross_entropy
        found["cut"] = lambda: cut(h, w, y)
    return found


def ways(shape: Shape, device: str, precision: str) -> tuple[nn.Linear, Tensor, Tensor, Ways]:
    """Return a head, its rows, their labels, and a forward and backward in each way."""
    torch.manual_seed(0)
    vocabulary, features, rows = shape
    made: Found = {"device": device}
    made["dtype"] = torch.bfloat16 if precision == "bfloat16" else torch.float32
    head = nn.Linear(features, vocabulary, bias=False, **made)
    h = torch.randn(rows, features, requires_grad=True, **made)
    y = torch.randint(vocabulary, (rows,), device=device)

    def run(context: Callable[[], AbstractContextManager[Any]], loss: Callable[[], Tensor]) -> None:
        with context(), torch.autocast(device, torch.bfloat16, enabled=precision == "autocast"):
            found = loss()
        found.backward()  # type: ignore[no-untyped-call]

    def whole() -> Tensor:
        return F.cross_entropy(head(h), y)

    found: Ways = {"at once": partial(run, nullcontext, whole)}
    found["chosen"] = partial(run, chunked_losses, whole)
    found |= {
        str(n): partial(run, partial(chunked_losses, n), whole) for n in ROWS[device] if n <= rows
    }
    found |= {
        name: partial(run, nullcontext, loss) for name, loss in peers(h, head.weight, y).items()
    }
    return head, h, y, found


def measured(shape: Shape, rounds: int, device: str, precision: str) -> Found:
    """Return seconds, peaks and errors by way, and the messages of those that fail."""
    head, h, y, every = ways(shape, device, precision)
    found: Found = {"shape": shape, "precision": precision, "peaks": {}, "errors": {}, "failed": {}}
    for name, run in [*every.items()]:
        head.weight.grad = h.grad = None
        try:
            run()  # kernels are compiled
            head.weight.grad = h.grad = None
            found["peaks"][name] = peak(device, [head.weight, h], run)
        except Exception as error:  # another package's, which the table says
            found["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            del every[name]
    taken: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, run in every.items():
            head.weight.grad = h.grad = None
            taken[name].append(seconds(run, device))
    found["seconds"] = {name: statistics.median(each) for name, each in taken.items()}
    exact = copy.deepcopy(head).double()
    F.cross_entropy(exact(h.detach().double()), y).backward()  # type: ignore[no-untyped-call]
    want = gradient_of(exact)
    for name, run in every.items():
        head.weight.grad = h.grad = None
        run()
        found["errors"][name] = float((gradient_of(head) - want).norm() / want.norm())
    return found


def gradient_of(head: nn.Linear) -> Tensor:
    """Return the gradient of the weight."""
    assert head.weight.grad is not None
    return head.weight.grad


def peak(device: str, there: list[Tensor], run: Callable[[], Any]) -> int:
    """Return the most bytes that a run holds, those of tensors that are there among them."""
    if device == "cpu":
        with Meter(torch.device(device), {"there": there}) as meter:
            run()
        return int(meter.peak)
    finish(device)
    torch.cuda.reset_peak_memory_stats()
    run()
    finish(device)
    return torch.cuda.max_memory_allocated()


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


RUNGS = {"at once": ["offload"], "chunks": ["chunks", "offload"]}


def least(block: tuple[int, int], vocabulary: int, device: str, way: str, *, steps: int) -> Found:
    """Return the least budget of a block, and the peak and the seconds of steps with it."""
    torch.manual_seed(0)
    tokens, features = block
    shape = SAMPLES, tokens
    batch = tuple(torch.randint(vocabulary, shape, device=device) for _ in range(2))
    budget = 1 << 10
    while True:
        try:
            return at(budget, Block(features, vocabulary).to(device), batch, way, steps)
        except BudgetError as error:
            budget = max(budget + 1024, -(-error.needed // 1024) * 1024)


def at(budget: int, model: Block, batch: tuple[Tensor, ...], way: str, steps: int) -> Found:
    """Return the peak and the seconds of steps with a budget.

    Raises:
        BudgetError: it is too small.
    """
    engine = Engine(model, memory=budget, cache=None, tune="off", rungs=RUNGS[way])
    engine.backward(batch)
    peaks, taken, run = [], [], partial(engine.backward, batch)
    device = batch[0].device.type
    for _ in range(steps):
        model.zero_grad()
        peaks.append(peak(device, [*model.parameters()], run))
        model.zero_grad()
        taken.append(seconds(run, device))
    assert engine.plan is not None
    assert engine.plan.memory is not None
    return {
        "budget": budget,
        "peak": max(peaks),
        "seconds": statistics.median(taken),
        "micro_batch": engine.plan.micro_batch,
        "chunk": engine.plan.memory.chunked,
        "offloads": engine.plan.offload is not None,
    }


def divided(
    block: tuple[int, int], share: float, vocabulary: int, device: str, *, steps: int
) -> Found:
    """Return the settled plans of two engines, and the seconds of their steps, in turn.

    Args:
        block: tokens of a sample, features.
        share: of the bytes of the undivided batch, which are the budget.
        vocabulary: of the head.
        device: of the blocks.
        steps: of each engine.
    """
    tokens, features = block
    torch.manual_seed(0)
    shape = BATCH, tokens
    batch = tuple(torch.randint(vocabulary, shape, device=device) for _ in range(2))
    whole = plan(Block(features, vocabulary).to(device), None, (batch, None), timed=False).memory
    assert whole is not None
    assert whole.undivided is not None
    every, found = {}, {}
    for way, rungs in RUNGS.items():
        model = Block(features, vocabulary).to(device)
        engine = Engine(model, memory=int(share * whole.undivided), cache=None, rungs=rungs)
        every[way] = model, engine
        first = seconds(partial(engine.backward, batch), device)
        for _ in range(SETTLED):
            model.zero_grad()
            engine.backward(batch)
        assert engine.plan is not None
        assert engine.plan.memory is not None
        found[way] = {
            "first": first,
            "budget": engine.plan.memory.budget,
            "micro_batch": engine.plan.micro_batch,
            "chunk": engine.plan.memory.chunked,
            "offloads": engine.plan.offload is not None,
        }
    taken: dict[str, list[float]] = {way: [] for way in RUNGS}
    for _ in range(2 * steps):
        for way, (model, engine) in every.items():
            model.zero_grad()
            taken[way].append(seconds(partial(engine.backward, batch), device))
    for way, each in taken.items():
        found[way] |= {"seconds": statistics.median(each)}
    ratios = [a / b for a, b in zip(taken["chunks"], taken["at once"], strict=True)]
    return {**found, "ratio": statistics.median(ratios)}


def main(
    *,
    quick: bool = False,
    device: str = "cpu",
    part: Annotated[str, typer.Option(help="heads, floors or divided; the others stay")] = "",
    out: Annotated[Path, typer.Option(help="folder of results")] = HERE,
) -> None:
    """Run all of them, and write results.json."""
    if device == "cuda" and not torch.cuda.is_available():
        console.print("no CUDA device here: nothing was run")
        return
    shapes, blocks = (QUICK, [(8, 4)]) if quick else (SHAPES[device], BLOCKS[device])
    divide = [(8, 4)] if quick else DIVIDED
    vocabulary, steps = (500, 1) if quick else (VOCABULARY, 3)
    found = (read(out / "results.json") or {}) if part else {}
    found |= {"environment": environment(), "vocabulary": vocabulary, "samples": SAMPLES}
    cells = [(shape, precision) for precision in PRECISIONS[device] for shape in shapes]
    if part in ("", "heads"):
        found["heads"] = [
            measured(shape, 1 if quick else ROUNDS, device, precision)
            for shape, precision in track(cells, "heads", console=console)
        ]
        write(out / "results.json", found)
    if part in ("", "floors"):
        found["floors"] = [
            {"tokens": block[0], "features": block[1]}
            | {way: least(block, vocabulary, device, way, steps=steps) for way in RUNGS}
            for block in track(blocks, "blocks", console=console)
        ]
        write(out / "results.json", found)
    if part in ("", "divided"):
        found["divided"] = [
            {"tokens": block[0], "features": block[1], "share": share}
            | divided(block, share, vocabulary, device, steps=steps)
            for block, share in track([*product(divide, SHARES)], "budgets", console=console)
        ]
        write(out / "results.json", found)


if __name__ == "__main__":
    typer.run(main)
