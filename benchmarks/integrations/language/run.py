"""A language model on rows of uneven length: the cost of the mean of micro-batches' means.

A small transformer, float32, learns the paragraphs of the help that Python ships, a byte a token,
at batch 64. They have 1 to 128 tokens. The undivided batch is the reference. *anybatch* divides it
into micro-batches of 4. *By hand* divides the mean of each by their number. *By length* also sorts
the rows of each mini-batch first, so that micro-batches are padded less. A seed has the same
weights and the same mini-batches in all of them. The learning rate was not tuned.

The validation loss is the mean over all tokens of the held-out paragraphs. The error of a gradient
is its distance from the undivided one, relative to that one's norm, on the first mini-batch and on
one after the undivided training.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import nn

from benchmarks.environment import environment
from benchmarks.integrations.language.arms import ARMS, Arm, backward_of, error_of, loss_of
from benchmarks.integrations.language.curves import draw
from benchmarks.integrations.language.text import (
    IGNORED,
    LENGTH,
    VOCABULARY,
    batch_of,
    batches,
    paragraphs,
)
from benchmarks.mbs.models import TransformerLM
from benchmarks.results import console, write

HERE = Path(__file__).parent
Found = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is run."""

    steps: int = 300
    batch: int = 64
    micro_batch: int = 4
    lr: float = 3e-3
    rise: int = 30
    every: int = 20
    seeds: tuple[int, ...] = (0, 1, 2)


QUICK = Size(steps=4, batch=8, every=2, rise=1, seeds=(0,))


def initial(seed: int) -> nn.Module:
    """Return a network; the same one each time."""
    torch.manual_seed(seed)
    return TransformerLM(VOCABULARY, 64, 2, 4, LENGTH)


def held_out(model: nn.Module, rows: list[bytes]) -> float:
    """Return the mean loss of a token."""
    total, count = 0.0, 0
    with torch.no_grad():
        for at in range(0, len(rows), 64):
            tokens, targets = batch_of(rows[at : at + 64])
            there = int((targets != IGNORED).sum())
            total, count = total + there * float(loss_of(model(tokens), targets)), count + there
    return total / count


def trained(arm: Arm, seed: int, size: Size) -> tuple[Found, nn.Module]:
    """Train one arm; return its validation loss as it goes, and the network."""
    rows, held = paragraphs()
    model = initial(seed)
    backward = backward_of(arm, model, size.micro_batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr)
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / size.rise))
    losses = [held_out(model, held)]
    for step, rows_of in zip(range(size.steps), batches(rows, size.batch, seed), strict=False):
        optimizer.zero_grad()
        backward(rows_of)
        optimizer.step()
        rise.step()
        if (step + 1) % size.every == 0:
            losses.append(held_out(model, held))
    return {"arm": arm, "seed": seed, "losses": losses}, model


def errors(model: nn.Module, seed: int, size: Size) -> dict[str, float]:
    """Return the error of each arm's gradient of one mini-batch."""
    rows = next(batches(paragraphs()[0], size.batch, seed))
    return {arm: error_of(arm, model, rows, size.micro_batch) for arm in ARMS[1:]}


def main(
    *, quick: bool = False, out: Annotated[Path, typer.Option(help="folder of results")] = HERE
) -> None:
    """Train all arms, and write results.json and curves.png."""
    torch.set_num_threads(1)
    size = QUICK if quick else Size()
    jobs = [(arm, seed) for seed in size.seeds for arm in ARMS]
    runs, first, last = [], [], []
    for arm, seed in track(jobs, "trainings", console=console):
        found, model = trained(arm, seed, size)
        runs.append(found)
        if arm == "undivided":
            first.append(errors(initial(seed), seed, size))
            last.append(errors(model, seed, size))
    results = {
        "environment": environment(),
        "size": asdict(size),
        "runs": runs,
        "errors": {"first": first, "last": last},
    }
    write(out / "results.json", results)
    draw(results, out / "curves.png")


if __name__ == "__main__":
    typer.run(main)
