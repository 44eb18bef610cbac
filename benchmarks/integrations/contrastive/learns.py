"""A contrastive training on images and texts: an image of four digits is to find its number.

Images are four of scikit-learn's digits, 8x8 pixels each, beside each other and noisy; texts are
the four labels. Both are made on the spot, from other images for training and for tests. Most
numbers of a batch differ in several digits, a few in one alone: the more there are, the more of
these.
Three ways to the gradient of a batch: at once, by the engine in micro-batches, and accumulated,
where only what is in one micro-batch is told apart. A seed has the same weights, batches and noise
in all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from benchmarks.integrations.contrastive.ways import pair

TEMPERATURE, DIGITS, WIDTH = 0.1, 4, 64
Pairs = tuple[Tensor, Tensor]
Step = Callable[[Pairs], Any]
ARMS = ("undivided", "anybatch", "accumulated")


@dataclass(frozen=True)
class Recipe:
    """How one training goes."""

    batch: int = 512
    micro_batch: int = 16
    steps: int = 160
    every: int = 16  # steps between two looks at the tests
    lr: float = 2e-3
    tests: int = 1000


def digits() -> tuple[Pairs, Pairs]:
    """Images [n, 64] in 0..1 and labels [n], for training and for tests, which are every fifth."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    labels, tests = torch.tensor(found.target), torch.arange(len(images)) % 5 == 0
    return (images[~tests], labels[~tests]), (images[tests], labels[tests])


def numbers(of: Pairs, rows: Tensor, rng: torch.Generator) -> Pairs:
    """Images [n, 4, 64] and texts [n, 4] of the digits at `rows`, [n, 4]."""
    images = of[0][rows]
    return images + 0.2 * torch.randn(images.shape, generator=rng), of[1][rows]


class Image(nn.Module):
    """[n, 4, 64] pixels -> [n, d], of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, 32), nn.GELU())
        self.head = nn.Sequential(nn.Linear(32 * DIGITS, WIDTH), nn.GELU(), nn.Linear(WIDTH, 32))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4, 64] -> [n, 32]."""
        return F.normalize(self.head(self.digit(x).flatten(1)), dim=1)


class Text(nn.Module):
    """[n, 4] labels -> [n, d], of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(10, 32)
        self.head = nn.Sequential(nn.Linear(32 * DIGITS, WIDTH), nn.GELU(), nn.Linear(WIDTH, 32))

    def forward(self, labels: Tensor) -> Tensor:
        """[n, 4] -> [n, 32]."""
        return F.normalize(self.head(self.digit(labels).flatten(1)), dim=1)


def both_ways(out: Pairs) -> Tensor:
    """The mean of both directions, as it is written by hand."""
    logits = out[0] @ out[1].T / TEMPERATURE
    places = torch.arange(len(logits))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


def stepper(arm: str, model: nn.Module, n: int) -> Step:
    """What adds the gradient of a batch to ``.grad``, by arm."""
    if arm == "undivided":
        return lambda batch: both_ways(model(*batch)).backward()  # type: ignore[no-untyped-call]
    if arm == "anybatch":
        loss = anybatch.contrastive(temperature=TEMPERATURE, symmetric=True)
        return anybatch.Engine(model, loss, micro_batch=n).backward

    def accumulated(batch: Pairs) -> None:
        for part in zip(*(torch.split(rows, n) for rows in batch), strict=True):
            loss = both_ways(model(*part)) * (len(part[0]) / len(batch[0]))
            loss.backward()  # type: ignore[no-untyped-call]

    return accumulated


def batches(of: Pairs, recipe: Recipe, seed: int) -> Iterator[Pairs]:
    """Yield the batches of a training."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(recipe.steps):
        rows = torch.randint(len(of[0]), (recipe.batch, DIGITS), generator=rng)
        yield numbers(of, rows, rng)


def tested(of: Pairs, count: int) -> Pairs:
    """Return pairs for tests, no number twice."""
    rng = torch.Generator().manual_seed(1234)
    rows = torch.randint(len(of[0]), (4 * count, DIGITS), generator=rng)
    places = torch.tensor([1000, 100, 10, 1])
    first = {int(n): at for at, n in reversed(list(enumerate((of[1][rows] * places).sum(1))))}
    return numbers(of, rows[sorted(first.values())[:count]], rng)


def looked(model: nn.Module, tests: Pairs) -> tuple[float, float]:
    """Loss, and share of images that find their number among all tests."""
    with torch.no_grad():
        z, w = model(*tests)
        found = (z @ w.T).argmax(1) == torch.arange(len(z))
        return float(both_ways((z, w))), float(found.float().mean())


def train(arm: str, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Train once; loss and share on tests, before the first step and every few."""
    torch.set_num_threads(1)
    images, others = digits()
    tests = tested(others, recipe.tests)
    torch.manual_seed(seed)
    model = pair(Image(), Text())
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    step, curve = stepper(arm, model, recipe.micro_batch), [(0, *looked(model, tests))]
    for done, batch in enumerate(batches(images, recipe, seed), 1):
        optimizer.zero_grad()
        step(batch)
        optimizer.step()
        if done % recipe.every == 0:
            curve.append((done, *looked(model, tests)))
    steps, losses, shares = (list(found) for found in zip(*curve, strict=True))
    return {"arm": arm, "seed": seed, "steps": steps, "loss": losses, "found": shares}
