"""Forecasts of steps on a GPU, beside the most bytes that its allocator had given to tensors.

Every model is planned at four budgets: its floor, what it holds undivided, and two between. A batch
comes from the host, or is on the device; precision is float32, or bfloat16 by autocast. Three
steps run by each plan, and the largest peak counts. A budget below what a plan needs is refused,
and so is a second step whose first held more than was foreseen and that then does not fit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.errors import BudgetError
from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED, STEPS, CLASSES, WORDS, WIDTH = 0, 3, 5, 32000, 256
SHARES = (0.0, 0.3, 0.6, 1.0)


class Recurrent(nn.Module):
    """An LSTM, and a layer on what it says last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.LSTM(64, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, 64] -> [n, classes]."""
        scores: Tensor = self.last(self.inner(x)[0][:, -1])
        return scores


class Language(nn.Module):
    """Scores of all words at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """[n, T] -> [n, words, T]."""
        scores: Tensor = self.last(self.table(x))
        return scores.transpose(1, 2)


class Recomputed(nn.Module):
    """Residual layers that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        widths = nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)
        self.layers = nn.ModuleList(nn.Sequential(*widths) for _ in range(4))
        self.last = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 512] -> [n, classes]."""
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        scores: Tensor = self.last(x)
        return scores


def dense() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Linear(1024, CLASSES))


def images(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Two convolutions, each with a norm."""
    first = [nn.Conv2d(3, 64, 3, padding=1), norm(64), nn.ReLU()]
    more = [nn.Conv2d(64, 64, 3, padding=1), norm(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*first, *more, nn.Flatten(), nn.Linear(4 * 64, CLASSES))


def transformer() -> nn.Module:
    """Two layers of an encoder."""
    layer = nn.TransformerEncoderLayer(128, 4, WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32 * 128, CLASSES)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (WIDTH,)),
    "GroupNorm": (lambda: images(lambda count: nn.GroupNorm(2, count)), (3, 32, 32)),
    "BatchNorm": (lambda: images(nn.BatchNorm2d), (3, 32, 32)),
    "LSTM": (Recurrent, (12, 64)),
    "transformer": (transformer, (32, 128)),
    "recomputed": (Recomputed, (512,)),
    "language model": (Language, (32,)),
}


def batch_of(name: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on the host."""
    shape = MODELS[name][1]
    if name == "language model":
        return torch.randint(WORDS, (64, *shape)), torch.randint(WORDS, (64, *shape))
    return torch.randn(256, *shape), torch.randint(CLASSES, (256,))


def one(name: str, place: str, share: float, device: torch.device, *, half: bool) -> dict[str, Any]:
    """Return the forecast and the peak of one plan, or its refusal."""
    torch.manual_seed(SEED)
    gc.collect()
    torch.cuda.empty_cache()
    model, batch = MODELS[name][0]().to(device), batch_of(name)
    if place == "device":
        batch = batch[0].to(device), batch[1].to(device)
    precision = "bfloat16" if half else "float32"
    row: dict[str, Any] = {"model": name, "batch": place, "precision": precision, "share": share}
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        try:
            found = anybatch.plan(model, F.cross_entropy, batch, memory="60GiB", timed=False).memory
            assert found is not None
            assert found.floor is not None
            budget = int(found.floor + share * (found.undivided - found.floor))
            plan = anybatch.plan(model, F.cross_entropy, batch, memory=budget, timed=False)
            engine, peaks = anybatch.Engine(model, F.cross_entropy, plan=plan), []
            for _ in range(STEPS):
                model.zero_grad()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                engine.backward(*batch)
                peaks.append(torch.cuda.max_memory_allocated())
        except BudgetError as error:
            return row | {"refused": str(error)}
    assert plan.memory is not None
    planned = {"mechanism": plan.mechanism, "micro_batch": plan.micro_batch, "budget": budget}
    return row | planned | {"predicted": plan.memory.predicted, "peak": max(peaks)}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Measure every model and write results.json."""
    if not torch.cuda.is_available():
        console.print("no CUDA device here: no forecast was compared")
        return
    names, shares = (["dense"], (0.6,)) if quick else ([*MODELS], SHARES)
    rows = []
    for name, place, half, share in product(names, ("host", "device"), (False, True), shares):
        rows.append(one(name, place, share, torch.device("cuda"), half=half))
        console.print(rows[-1])
    write(out / "results.json", {"seed": SEED, "environment": environment(), "rows": rows})


if __name__ == "__main__":
    typer.run(main)
