"""Losses of a `transformers.Trainer` for the engine: traced, label-smoothed or user-defined.

A Trainer has three. The model returns its own (`OfModel` traces its terms); a label smoother is
computed on the logits, and is a sum divided by the labels that are not ignored; a
``compute_loss_func`` is a user's function, which divides by the items of the full batch.

    smoothed = ((1 - eps) * sum nll + eps * sum mean_v nll_v) / labels that count

Source: transformers 5.23, ``LabelSmoother`` and ``Trainer.compute_loss``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anybatch.loss.declared import Loss


class Items(int):
    """Count of items in a batch, with the tensor methods that loss functions call."""

    def to(self, *_where: Any, **_named: Any) -> Items:
        """Return it: it is on every device."""
        return self

    def item(self) -> int:
        """Return the number."""
        return int(self)


class UserLoss:
    """A user's ``compute_loss_func(outputs, labels, num_items_in_batch=...)``.

    Attributes:
        items: of the full batch, over all ranks; None without a count.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.items: Items | None = None
        self._function = function

    def __call__(self, outputs: Any, labels: Any = None) -> Tensor:
        """Return the loss of outputs and labels."""
        return self._function(outputs, labels, num_items_in_batch=self.items)


def smoothed(smoother: Callable[..., Tensor], *, shifts: bool) -> Loss:
    """Return a label smoother's loss, with the denominator of the full batch.

    Args:
        smoother: transformers' ``LabelSmoother``.
        shifts: labels are those of the next position, as a decoder has them.
    """
    return Loss.ratio(Numerator(smoother, shifts=shifts), Count(smoother, shifts=shifts))


class Numerator:
    """Numerator of a label smoother: the sum of its loss over labels."""

    def __init__(self, smoother: Callable[..., Tensor], *, shifts: bool) -> None:
        self._smoother, self._shifts = smoother, shifts

    def __call__(self, outputs: Any, labels: Tensor) -> Tensor:
        """Return the sum over labels that count."""
        return self._smoother(outputs, labels, shift_labels=self._shifts, num_items_in_batch=1)


class Count:
    """How many labels count."""

    def __init__(self, smoother: Any, *, shifts: bool) -> None:
        self._ignored, self._shifts = smoother.ignore_index, shifts

    def __call__(self, labels: Tensor) -> Tensor:
        """Return how many are not ignored."""
        there = labels[..., 1:] if self._shifts else labels
        count: Tensor = (there != self._ignored).sum()
        return count
