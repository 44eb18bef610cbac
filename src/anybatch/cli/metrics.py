"""Accuracy and intersection over union, exact over an epoch.

The mean of per-batch figures is wrong as soon as batches differ in size, and for IoU always. These
count, and divide once at the end. They are fed by the engine's `observe`, micro-batch by
micro-batch, so that no output is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch import Loss
from anybatch.cli.faults import SettingsError


class Metric:
    """A figure in [0, 1] that is the quotient of two integers; `empty` where both are 0."""

    name: str
    empty: float

    def __init__(self) -> None:
        self.part: Tensor | int = 0
        self.full: Tensor | int = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the counts of one micro-batch."""
        raise NotImplementedError

    def value(self) -> float:
        """Return the figure over all samples so far."""
        part, full = self.counts()
        return part / full if full else self.empty

    def counts(self) -> tuple[int, int]:
        """Return the two integers."""
        return int(self.part), int(self.full)

    def go_on_from(self, counts: tuple[int, int]) -> None:
        """Restore the two integers that `counts` returned."""
        self.part, self.full = counts


class Accuracy(Metric):
    """Fraction of samples with the largest logit at the true class.

    Takes logits [N, C] and classes [N]. Without any sample it is 0.
    """

    name, empty = "accuracy", 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one micro-batch."""
        self.part = self.part + (outputs.argmax(dim=1) == targets.to(outputs.device)).sum()
        self.full += len(targets)


class IoU(Metric):
    """Intersection over union of the foreground: pixels in both masks / pixels in either.

    Takes logits and masks (0 or 1) of one shape; a logit above 0 is foreground. When neither has
    a foreground pixel it is 1.
    """

    name, empty = "iou", 1.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one micro-batch."""
        predicted, true = outputs > 0, targets.to(outputs.device) > 0.5
        self.part = self.part + (predicted & true).sum()
        self.full = self.full + (predicted | true).sum()


def make_metric(task: str) -> Metric:
    """Return an empty metric: accuracy for "classification", IoU for "segmentation"."""
    return Accuracy() if task == "classification" else IoU()


# Losses of the command: cross-entropy, binary cross-entropy (BCE), and BCE + Dice loss.
#
# torch has the first two. Dice is a ratio of sums, and its value for a batch depends on the range
# of the sums. Eq. 18 speaks of one ground truth A and one prediction B and does not say how a batch
# is reduced:
#
# - `bce_dice` takes A and B as all pixels of the mini-batch. The samples meet in its sums, so the
#   engine computes it on the full batch (a coupled loss, exact, at the price of a second forward).
#   It is the default, because an image without foreground is no special case in it.
# - `bce_dice_per_image` takes A and B as one image and averages over images: the literal reading of
#   the equation. Declared by `Loss.per_sample`, it needs no second forward.
#
# Both take probabilities for the binary image, as a step has no gradient, and add one pixel to
# numerator and denominator, so that nothing is divided by zero.
#
# Source: MBS, section 4.2.4, Eq. 18-20.

SMOOTH = 1.0  # pixels
SEGMENTATION_LOSSES = ("bce", "bce+dice", "bce+dice-per-image")


def dice_coefficient(probabilities: Tensor, masks: Tensor) -> Tensor:
    """Return 2 |A B| / (|A| + |B|) of [..., pixels]: one figure for each leading index (Eq. 18)."""
    both = (probabilities * masks).sum(dim=-1)
    return (2 * both + SMOOTH) / (probabilities.sum(dim=-1) + masks.sum(dim=-1) + SMOOTH)


def bce_dice(logits: Tensor, masks: Tensor) -> Tensor:
    """Return BCE + Dice loss of all pixels of the batch, a 0-dim tensor (Eq. 18-20).

    `logits` and `masks` (0 or 1) are [N, 1, H, W].
    """
    coefficient = dice_coefficient(torch.sigmoid(logits).flatten(), masks.flatten())
    return F.binary_cross_entropy_with_logits(logits, masks) + 1 - coefficient


def bce_dice_per_image(logits: Tensor, masks: Tensor) -> Tensor:
    """Return BCE + Dice loss of each image, [N]; the loss of a batch is the mean (Eq. 18-20)."""
    bce = F.binary_cross_entropy_with_logits(logits, masks, reduction="none").flatten(1).mean(1)
    return bce + 1 - dice_coefficient(torch.sigmoid(logits).flatten(1), masks.flatten(1))


def plain_loss(name: str) -> Callable[..., Tensor]:
    """Return the loss called `name` as a loop without an engine calls it, on the full batch."""
    if name == "bce+dice-per-image":
        return lambda logits, masks: bce_dice_per_image(logits, masks).mean()
    losses: dict[str, Callable[..., Tensor]] = {
        "cross-entropy": F.cross_entropy,
        "bce": F.binary_cross_entropy_with_logits,
        "bce+dice": bce_dice,
    }
    return losses[name]


def make_loss(name: str, task: str) -> Callable[..., Tensor] | Loss:
    """Return the loss called `name` for `task`, as the engine takes it.

    Raises:
        SettingsError: when the loss belongs to the other task.
    """
    if (name in SEGMENTATION_LOSSES) != (task == "segmentation"):
        fitting = SEGMENTATION_LOSSES if task == "segmentation" else ("cross-entropy",)
        raise SettingsError(f"loss for {task} must be one of {', '.join(fitting)}; got {name!r}.")
    if name == "bce+dice-per-image":
        return Loss.per_sample(bce_dice_per_image)
    return plain_loss(name)
