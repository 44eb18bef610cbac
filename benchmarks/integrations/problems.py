"""Problems on which a trainer's accumulation is judged: each a model, rows, and the person's loss.

One process has `BATCH` samples a step, in micro-batches of `MICRO_BATCH`; of a ragged tail fewer
are left, and the last micro-batch is not full. Two processes have twice as many.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, MICRO_BATCH, TAIL = 16, 4, 11
WORDS, LONGEST, CLASSES = 23, 9, 5
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
        name: in the table.
        model: makes it, with the same weights each time.
        rows: count and seed -> inputs and targets.
        loss: of outputs and targets, a mean as people write it.
        total: the same as a sum over what counts, where there is one.
        counts: targets -> how many count.
        samples: of a step on one process.
    """

    name: str
    model: Callable[[], nn.Module]
    rows: Callable[[int, int], Rows]
    loss: Callable[[Tensor, Tensor], Tensor]
    total: Callable[[Tensor, Tensor], Tensor] | None = None
    counts: Callable[[Tensor], Tensor] = lambda y: torch.tensor(len(y))
    samples: int = BATCH


class View(nn.Module):
    """Two views of each sample, as unit vectors: [n, 2, 12] -> [n, 2, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors."""
        return F.normalize(self.body(x), dim=-1)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def reader() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, 12), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, WORDS)
    )


def classes(count: int, seed: int) -> Rows:
    """Samples of classes that come unequally often."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=draw).double()
    odds = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0])
    return x, torch.multinomial(odds, count, replacement=True, generator=draw)


def texts(count: int, seed: int) -> Rows:
    """Tokens of uneven lengths, padded; every third text has a prompt that does not count."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(3, WORDS, (count, LONGEST), generator=draw)
    lengths = torch.randint(2, LONGEST + 1, (count, 1), generator=draw)
    place = torch.arange(LONGEST)
    prompt = torch.where(torch.arange(count) % 3 == 0, lengths[:, 0] // 2, 0)[:, None]
    return x, torch.where((place < lengths) & (place >= prompt), x, -100)


def views(count: int, seed: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 12, generator=draw) + 0.3 * torch.randn(count, 2, 12, generator=draw)
    return x.double(), torch.zeros(count)


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


def summed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1), reduction="sum")


def weights(out: Tensor) -> Tensor:
    return torch.tensor([0.2, 0.4, 1.0, 2.0, 3.0], dtype=out.dtype)


def weighted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=weights(out))


def weighted_sum(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=weights(out), reduction="sum")


def dice(out: Tensor, y: Tensor) -> Tensor:
    found, wanted = out.softmax(1), F.one_hot(y, CLASSES)
    return 1 - (2 * (found * wanted).sum(0) / (found.sum(0) + wanted.sum(0) + 1)).mean()


def info_nce(out: Tensor, y: Tensor) -> Tensor:
    one, other = out[:, 0], out[:, 1]
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(y), device=y.device))


def not_ignored(y: Tensor) -> Tensor:
    return (y != -100).sum()


PROBLEMS = [
    Problem("an even split", plain, classes, cross_entropy, summed),
    Problem("a ragged tail", plain, classes, cross_entropy, summed, samples=TAIL),
    Problem("padded tokens", reader, texts, cross_entropy, summed, not_ignored),
    Problem("class weights", plain, classes, weighted, weighted_sum),
    Problem("BatchNorm", normed, classes, cross_entropy, summed),
    Problem("Dice", plain, classes, dice),
    Problem("InfoNCE", View, views, info_nce),
]


def made(problem: Problem) -> nn.Module:
    """A model in float64, with the same random weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return problem.model().double()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def truth(problem: Problem, rows: Rows) -> dict[str, Tensor]:
    """The gradient of one forward of all rows, by torch alone."""
    model = made(problem)
    problem.loss(model(rows[0]), rows[1]).backward()  # type: ignore[no-untyped-call]
    return gradients(model)
