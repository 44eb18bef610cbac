"""Language models of which one sample is too long: the least budget of a step, and its seconds.

Each is as Llama: two layers of causal attention and SwiGLU behind RMSNorm, and a head. A batch has
one sample. First with enough memory; then with the least budget of what an engine may do: chunks of
the head and its loss, offloading of saved tensors, both, chunks beside tiles of the tokens, and all
three. Peaks are the meter's, seconds the median of a few steps: those of the processor, because
others may use the machine, and those of the clock.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import BudgetError
from anybatch.memory.meter import Meter
from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
Shape = tuple[int, int, int, int]

SHAPES: list[Shape] = [(2048, 256, 1024, 8000), (4096, 128, 1024, 1000)]
"""Tokens of a sample, features, width of an MLP, vocabulary."""
QUICK: list[Shape] = [(128, 16, 64, 200)]
WAYS = {
    "chunks": ["chunks"],
    "offload": ["offload"],
    "chunks, offload": ["chunks", "offload"],
    "chunks, tiles": ["chunks", "tiles"],
    "all": ["chunks", "tiles", "offload"],
}
HEADS, ENOUGH = 4, "64GiB"


class Layer(nn.Module):
    """A layer of Llama, without positions."""

    def __init__(self, features: int, wide: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(features) for _ in range(2))
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.mlp = SwiGLU(features, wide)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after both parts."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        met = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(met.transpose(1, 2).flatten(2))
        found: Tensor = x + self.mlp(self.norms[1](x))
        return found


class SwiGLU(nn.Module):
    """The MLP of Llama."""

    def __init__(self, features: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(features, wide), nn.Linear(features, wide)
        self.down = nn.Linear(wide, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated product, mapped back."""
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


def model_of(shape: Shape) -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    _, features, wide, vocabulary = shape
    layers = [Layer(features, wide) for _ in range(2)]
    head = nn.Linear(features, vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(vocabulary, features), *layers, nn.RMSNorm(features), head)


def loss(z: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of tokens."""
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def steps(shape: Shape, memory: str | int, rungs: list[str], count: int) -> dict[str, Any]:
    """Return the plan of a step with a budget, its peak, and its seconds.

    Raises:
        BudgetError: it is too small.
    """
    model, rows = model_of(shape), [torch.randint(shape[3], (1, shape[0])) for _ in range(2)]
    engine = Engine(model, loss, memory=memory, cache=None, tune="off", rungs=rungs)
    start = time.perf_counter()
    engine.backward(*rows)
    first, taken, busy = time.perf_counter() - start, [], []
    for _ in range(count):
        model.zero_grad()
        start, used = time.perf_counter(), time.process_time()
        engine.backward(*rows)
        taken.append(time.perf_counter() - start)
        busy.append(time.process_time() - used)
    model.zero_grad()
    with Meter(torch.device("cpu"), {"parameters": [*model.parameters()]}) as meter:
        engine.backward(*rows)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    return {
        "budget": engine.plan.memory.budget,
        "peak": meter.peak,
        "predicted": engine.plan.memory.predicted,
        "first": first,
        "seconds": statistics.median(taken),
        "processor": statistics.median(busy),
        "tile": engine.plan.memory.tile,
        "chunk": engine.plan.memory.chunked,
        "offloads": engine.plan.offload is not None,
    }


def least(shape: Shape, rungs: list[str], count: int) -> dict[str, Any]:
    """Return the steps with the least budget."""
    budget = 1 << 10
    while True:
        try:
            return steps(shape, budget, rungs, count)
        except BudgetError as error:
            budget = max(budget + 1024, -(-error.needed // 1024) * 1024)


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Run all of them, and write results.json."""
    found = []
    for shape in QUICK if quick else SHAPES:
        count = 1 if quick else 3
        every = {"memory": steps(shape, ENOUGH, [], count)}
        for way, rungs in WAYS.items():
            every[way] = least(shape, rungs, count)
            console.print(shape, way, f"{every[way]['peak'] / 2**20:.1f} MiB")
        found.append({"shape": shape, "ways": every})
    write(out / "results.json", {"environment": environment(), "models": found})


if __name__ == "__main__":
    typer.run(main)
