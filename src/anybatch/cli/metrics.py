"""Accuracy and intersection over union, exact over an epoch.

The mean of per-batch figures is wrong as soon as batches differ in size, and for IoU always. These
count, and divide once at the end. They are fed by the engine's `observe`, micro-batch by
micro-batch, so that no output is stored.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Metric(Protocol):
    """A figure in [0, 1] made of counts: two integers and their quotient."""

    name: str

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the counts of one micro-batch."""

    def value(self) -> float:
        """Return the figure over all samples so far."""

    def counts(self) -> tuple[int, int]:
        """Return the two integers."""

    def go_on_from(self, counts: tuple[int, int]) -> None:
        """Restore the two integers that `counts` returned."""


class Accuracy:
    """Fraction of samples with the largest logit at the true class.

    Takes logits [N, C] and classes [N]. Without any sample it is 0.
    """

    name = "accuracy"

    def __init__(self) -> None:
        self.hits: Tensor | int = 0
        self.samples = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one micro-batch."""
        self.hits = self.hits + (outputs.argmax(dim=1) == targets.to(outputs.device)).sum()
        self.samples += len(targets)

    def value(self) -> float:
        """Return hits / samples."""
        return int(self.hits) / self.samples if self.samples else 0.0

    def counts(self) -> tuple[int, int]:
        """Return hits and samples."""
        return int(self.hits), self.samples

    def go_on_from(self, counts: tuple[int, int]) -> None:
        """Go on from these hits and samples."""
        self.hits, self.samples = counts


class IoU:
    """Intersection over union of the foreground: pixels in both masks / pixels in either.

    Takes logits and masks (0 or 1) of one shape; a logit above 0 is foreground. When neither has
    a foreground pixel it is 1.
    """

    name = "iou"

    def __init__(self) -> None:
        self.both: Tensor | int = 0
        self.either: Tensor | int = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one micro-batch."""
        predicted, true = outputs > 0, targets.to(outputs.device) > 0.5
        self.both = self.both + (predicted & true).sum()
        self.either = self.either + (predicted | true).sum()

    def value(self) -> float:
        """Return both / either."""
        return int(self.both) / int(self.either) if int(self.either) else 1.0

    def counts(self) -> tuple[int, int]:
        """Return the pixels in both masks, and those in either."""
        return int(self.both), int(self.either)

    def go_on_from(self, counts: tuple[int, int]) -> None:
        """Go on from these pixels."""
        self.both, self.either = counts


def make_metric(task: str) -> Metric:
    """Return an empty metric: accuracy for "classification", IoU for "segmentation"."""
    return Accuracy() if task == "classification" else IoU()
