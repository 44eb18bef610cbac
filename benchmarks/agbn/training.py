"""One training by a recipe: SGD whose learning rate grows with the batch, and what is recorded.

The recipe is that of He et al. for ResNet-20 (section 4.2: momentum 0.9, weight decay 1e-4, a
learning rate of 0.1 at batch 128) with the two changes that other batch sizes need (Goyal et al.
2017, section 2): the rate is in proportion to the batch, and rises from zero in the first epochs.
It falls again to zero by a cosine, because a short training has no plateaus to step down at.

How a step gets its gradients is a seam: nothing here knows of lanes or of groups.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.cli.models.resnet import resnet20
from benchmarks.agbn.images import Images, mini_batches

Observe = Callable[[Tensor, Tensor], None]
Backward = Callable[[Tensor, Tensor, Observe], Tensor]  # adds gradients, returns the batch's loss
Outcome = dict[str, Any]
AT = 128  # the batch size of the published learning rate
CURVES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")


@dataclass(frozen=True)
class Recipe:
    """All that decides a training but its seed and where its gradients come from.

    `lr` is the highest learning rate at batch 128; `rise` the epochs in which it is reached; the
    test images are looked at every `look` epochs.
    """

    batch: int
    epochs: int
    rise: int
    samples: int = 2000
    tests: int = 1000
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    look: int = 1

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.samples // self.batch

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 over the whole training."""
        highest, rise = self.lr * self.batch / AT, self.rise * self.steps
        if step < rise:
            return highest * (step + 1) / rise
        share = (step - rise) / (self.epochs * self.steps - rise)
        return highest * (1 + math.cos(math.pi * share)) / 2

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """Return SGD on the model's parameters."""
        return torch.optim.SGD(
            model.parameters(),
            lr=self.rate(0),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )


class Count:
    """Counts the samples whose largest output is their class."""

    def __init__(self) -> None:
        self.right = self.total = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in outputs [N, classes] and targets [N]."""
        self.right += int((outputs.argmax(1) == targets).sum())
        self.total += len(targets)

    @property
    def share(self) -> float:
        """The share of them."""
        return self.right / self.total


def initial(seed: int) -> nn.Module:
    """Return ResNet-20 with BatchNorm, float32, with the weights of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return resnet20(norm="batch")


def undivided_step(model: nn.Module) -> Backward:
    """Return torch's own step: the full mini-batch through the model at once."""

    def backward(inputs: Tensor, targets: Tensor, observe: Observe) -> Tensor:
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets)
        torch.autograd.backward(loss)
        observe(outputs.detach(), targets)
        return loss.detach()

    return backward


def evaluate(model: nn.Module, images: Images) -> tuple[float, float]:
    """Return loss and accuracy in eval mode, so with the running statistics; then train mode."""
    count, total = Count(), 0.0
    model.eval()
    with torch.no_grad():
        parts = (torch.split(tensor, 250) for tensor in (images.inputs, images.targets))
        for inputs, targets in zip(*parts, strict=True):
            outputs = model(inputs)
            count(outputs, targets)
            total += float(F.cross_entropy(outputs, targets, reduction="sum"))
    model.train()
    return total / len(images), count.share


def train(
    model: nn.Module, backward: Backward, recipe: Recipe, data: tuple[Images, Images], seed: int
) -> Outcome:
    """Train a model, and return its curves and the seconds of its median step.

    The training figures are those of the steps themselves, so of train mode and a model that
    moves, by epoch; the test figures are of eval mode, after each epoch that is looked at.
    """
    train_images, test_images = data
    optimizer, seconds = recipe.optimizer(model), list[float]()
    found: Outcome = {name: [] for name in CURVES}
    for epoch in range(recipe.epochs):
        count, losses = Count(), list[float]()
        for inputs, targets in mini_batches(train_images, recipe.batch, seed, epoch):
            start = perf_counter()
            optimizer.param_groups[0]["lr"] = recipe.rate(len(seconds))
            optimizer.zero_grad()
            losses.append(float(backward(inputs, targets, count)))
            optimizer.step()
            seconds.append(perf_counter() - start)
        figures = [sum(losses) / len(losses), count.share]
        if (epoch + 1) % recipe.look == 0:
            figures += evaluate(model, test_images)
        for name, figure in zip(CURVES, figures, strict=False):
            found[name].append(figure)
    return found | {"step_seconds": statistics.median(seconds)}
