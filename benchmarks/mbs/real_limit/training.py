"""The training that a limit is put on: ResNet-20 with GroupNorm on digits scaled to 32x32.

All that it holds before its first step (model, optimizer, every mini-batch, and the libraries
that a first small step loads) is made by `ready`, so that a limit set after it bounds the steps
alone. The step is a seam: a `Make` gets model, loss, optimizer and budget, and returns what
adds the gradients of one mini-batch. Nothing here knows what stands behind the seam.

float32 leaves room for two trainings to part. A ReLU whose input rounding moves across zero
changes a gradient that is a sum of many terms of either sign: the first float32 gradient is
1e-4 from the float64 one, and with softplus in ReLU's place 8e-7 (batch 64, norms over all).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from benchmarks.mbs.models import ResNet

Step = Callable[[Tensor, Tensor], Tensor]  # inputs, targets -> detached loss of the mini-batch
Make = Callable[[nn.Module, nn.Module, Optimizer, int | None], Step]
SEED = 0
SIDE = 32  # pixels; digits have 8
WARM = 2  # samples of the step that loads libraries


@dataclass(frozen=True)
class Run:
    """One training: its sizes, its type, and in which order a mini-batch holds its rows."""

    batch: int = 256
    steps: int = 20
    dtype: str = "float32"
    order: int = 0  # 0 as drawn, else the seed of a shuffle inside each mini-batch
    blocks: tuple[int, ...] = (3, 3, 3)


@dataclass
class Trained:
    """What a training leaves: the loss of every step that it reached, and its last weights."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def digest(self) -> str:
        """The SHA-256 of the weights, in the order of their names."""
        found = hashlib.sha256()
        for name in sorted(self.weights):
            found.update(name.encode() + self.weights[name].contiguous().numpy().tobytes())
        return found.hexdigest()


def digits() -> tuple[Tensor, Tensor]:
    """The images of scikit-learn at 32x32, [1797, 1, 32, 32] in float64, and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.tensor(found.images)[:, None] / 16
    large = functional.interpolate(small, size=(SIDE, SIDE), mode="bilinear")
    return large, torch.tensor(found.target)


def mini_batches(run: Run) -> list[tuple[Tensor, Tensor]]:
    """The mini-batch of every step, [batch, 3, 32, 32] and [batch]; drawn alike in every type."""
    images, targets = digits()
    draw, shuffle = (torch.Generator().manual_seed(seed) for seed in (SEED, run.order))
    found = []
    for _ in range(run.steps):
        chosen = torch.randint(len(images), (run.batch,), generator=draw)
        if run.order:
            chosen = chosen[torch.randperm(run.batch, generator=shuffle)]
        inputs = images[chosen].repeat(1, 3, 1, 1).to(getattr(torch, run.dtype))
        found.append((inputs, targets[chosen]))
    return found


def ready(run: Run, make: Make, budget: int | None) -> tuple[Trained, Callable[[], None]]:
    """Everything that a training holds before its first step.

    Returns:
        What the training will leave, filled step by step, and the training itself.
    """
    torch.manual_seed(SEED)
    model = ResNet(blocks=run.blocks).double().to(getattr(torch, run.dtype))
    loss_fn, data = nn.CrossEntropyLoss(), mini_batches(run)
    inputs, targets = data[0]
    loss_fn(model(inputs[:WARM]), targets[:WARM]).backward()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer.zero_grad(set_to_none=True)
    trained = Trained()

    def train() -> None:
        step = make(model, loss_fn, optimizer, budget)
        for inputs, targets in data:
            optimizer.zero_grad(set_to_none=True)
            loss = step(inputs, targets)
            optimizer.step()
            trained.losses.append(float(loss))
        trained.weights = {
            name: value.detach().clone() for name, value in model.state_dict().items()
        }

    return trained, train
