"""Blocks that are computed again: a budget, beside checkpoints written by hand.

``torch.utils.checkpoint`` around each block is what people write when a batch does not fit, and on
a GPU ``save_on_cpu`` is the other one. Here `anybatch.offload` has the bytes that a step with
checkpoints holds, and no model is changed: first all saved tensors may only move, then they may be
computed again, too. Other budgets are shares of the peak in memory.

A step in memory and one in another way run back to back, the order alternating: `wall` is the
median of time(way) / time(in memory), with its quartiles. Bytes are those at the peak, weights,
gradients and rows among them: live ones on a CPU, the allocator's on a GPU. Gradients are compared
bit for bit with those in memory. On a GPU the same step has other bits when it is run again, and
its torch was too old to show the values of hooks, so recipes were read as `shown` does.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.cli.models.resnet import resnet
from benchmarks.environment import environment
from benchmarks.mbs.problem import Problem
from benchmarks.outofcore.blocks.shown import shown
from benchmarks.outofcore.offload.steps import WARM_UP, Anew, Step, floor
from benchmarks.results import console, write

HERE = Path(__file__).parent
Found = dict[str, Any]
SEED = 0
SHARES = (0.5, 0.75, 0.35)
"""Of the peak in memory, the budgets beside that of the checkpoints; on a GPU the first one."""

TELLS = hasattr(torch._C._autograd.SavedTensor, "data")
"""Whether this torch shows the values of hooks."""


class Decoder(nn.Module):
    """Blocks of attention and a feed-forward part: tokens [n, t] -> logits [n, t, vocabulary].

    Attributes:
        again: each block is checkpointed.
    """

    def __init__(self, features: int, heads: int, layers: int, vocabulary: int = 512) -> None:
        super().__init__()
        self.again = False
        self.embed = nn.Embedding(vocabulary, features)
        self.blocks = nn.ModuleList(Block(features, heads) for _ in range(layers))
        self.head = nn.Linear(features, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of all tokens."""
        return self.head(run(self.blocks, self.embed(tokens), again=self.again))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a normalisation and beside a sum."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.other = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, t, features] of [n, t, features]."""
        n, t, d = x.shape
        q, k, v = (
            part.view(n, t, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(d, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.other(x))))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """ResNet-50: images -> logits.

    Attributes:
        again: each block is checkpointed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.again = False
        every = list(resnet(50, norm="batch", num_classes=100).children())
        begin, end = nn.Sequential(*every[:4]), nn.Sequential(*every[-3:])
        self.blocks = nn.ModuleList([begin, *every[4:-3], end])

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return run(self.blocks, x, again=self.again)


def run(blocks: nn.ModuleList, x: Tensor, *, again: bool) -> Tensor:
    """Return the output of blocks one after another."""
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if again else block(x)
    return x


def tokens(features: int, heads: int, layers: int, length: int, n: int, device: str) -> Problem:
    """A language model and its tokens; in bfloat16 on a GPU."""
    model = Decoder(features, heads, layers).to(device)
    rows = torch.randint(512, (n, length + 1), device=device)
    model = model.bfloat16() if device == "cuda" else model
    return Problem(model, _next_token, None, rows[:, :-1], rows[:, 1:], n)


def _next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def images(pixels: int, n: int, device: str) -> Problem:
    """A ResNet-50 and images."""
    x, y = torch.randn(n, 3, pixels, pixels, device=device), torch.randint(100, (n,), device=device)
    return Problem(Residual().to(device), nn.CrossEntropyLoss(), None, x, y, n)


PROBLEMS: dict[str, dict[str, Callable[[], Problem]]] = {
    "cpu": {
        "decoder": partial(tokens, 256, 4, 6, 256, 8, "cpu"),
        "resnet50": partial(images, 96, 8, "cpu"),
    },
    "cuda": {
        "decoder": partial(tokens, 2048, 16, 8, 2048, 8, "cuda"),
        "resnet50": partial(images, 224, 96, "cuda"),
    },
}
QUICK = partial(tokens, 64, 2, 3, 128, 4, "cpu")


class Again:
    """A context in which a model checkpoints its blocks."""

    def __init__(self, model: Any, inside: AbstractContextManager[Any] | None = None) -> None:
        self._model, self._inside = model, inside or nullcontext()

    def __enter__(self) -> None:
        self._model.again = True
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        self._model.again = False


def held(step: Step, around: Any) -> int:
    """Return the most bytes of a step."""
    if step.device.type != "cuda":
        return step.peak(around)
    step.model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    step.run(around)
    return torch.cuda.max_memory_allocated()


def measured(step: Step, around: Any, rounds: int) -> Found:
    """Return the seconds of a way over those in memory, in pairs, and its bytes."""
    plain, ratios = nullcontext(), []
    for _ in range(WARM_UP):
        step.run(plain)
        step.run(around)
    for index in range(rounds):
        pair = [step.run(one) for one in ((plain, around) if index % 2 else (around, plain))]
        memory, other = pair if index % 2 else pair[::-1]
        ratios.append(other / memory)
    same = map(torch.equal, step.gradients(plain), step.gradients(around))
    found: Found = {
        "wall": [round(cut, 4) for cut in quantiles(ratios, n=4)],
        "peak": held(step, around),
        "exact": all(same),
    }
    if isinstance(around, anybatch.reports.Offload) and around.last is not None:
        last = around.last
        found |= {"budget": around.memory, "predicted": last.predicted_bytes, "mode": last.mode}
        found |= {"out": last.out_bytes, "again": last.remade_bytes, "waited": last.waited}
    return found


def ways(step: Step, rounds: int, shares: tuple[float, ...]) -> Found:
    """Measure a step in every way: name -> its figures."""
    cuda = step.device.type == "cuda"
    by_hand: dict[str, Any] = {"checkpoint": Again(step.model)}
    if cuda:
        away = partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
        by_hand["save_on_cpu"] = Anew(away)
        by_hand["checkpoint, save_on_cpu"] = Again(step.model, Anew(away))
    step.run(nullcontext())
    in_memory, least = held(step, nullcontext()), floor(step, None)
    found: Found = {"in memory": {"peak": in_memory}, "floor": {"peak": least}}
    for name, around in by_hand.items():
        found[name] = measured(step, around, rounds)
        console.print(name, found[name])
    budgets = {"checkpoint": found["checkpoint"]["peak"]}
    budgets |= {f"{share:g}": int(share * in_memory) for share in shares}
    for name, budget in budgets.items():
        for recompute in (False, True) if budget >= least else ():
            gc.collect()
            off = anybatch.offload(memory=budget, device=step.device, recompute=recompute)
            words = "moved or computed again" if recompute else "moved"
            found[f"{name}: {words}"] = measured(step, off, rounds)
            console.print(f"{name}: {words}", found[f"{name}: {words}"])
            off.close()
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path | None, typer.Option(help="folder of results.json")] = None,
    rounds: Annotated[int, typer.Option(help="pairs of timings")] = 10,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Measure every step and write results.json."""
    torch.set_num_threads(1)
    problems = {"decoder": QUICK} if quick else PROBLEMS[device]
    found: Found = {}
    with nullcontext() if TELLS else shown():
        for name, make in problems.items():
            console.print(name)
            torch.manual_seed(SEED)
            shares = SHARES[:1] if quick or device == "cuda" else SHARES
            found[name] = ways(Step(make()), 2 if quick else rounds, shares)
    results = {"environment": environment(), "seed": SEED, "rounds": rounds, "steps": found}
    folder = out or (HERE if device == "cpu" else HERE / device)
    write(folder / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
