"""Losses of a `transformers.Trainer` for the engine: traced, label-smoothed or user-defined.

A Trainer has three. The model returns its own (`OfModel` traces its terms); a label smoother is
computed on the logits, and is a sum divided by the labels that are not ignored; a
``compute_loss_func`` is a user's function, which divides by the items of the full batch.

    smoothed = ((1 - eps) * sum nll + eps * sum mean_v nll_v) / labels that count

Source: transformers 5.23, ``LabelSmoother`` and ``Trainer.compute_loss``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from anybatch.lockstep.coupled import coupled
from anybatch.loss.base import Loss


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


# Experts that are to be used evenly: a loss inside the model in which the tokens of a batch meet.
#
# A mixture of experts adds to its loss how unevenly the experts were chosen, which is a product of
# two means over tokens and so no sum over micro-batches. transformers has one function for it in
# each such model's file; while the engine runs, that function is `anybatch.coupled`:
#
#     loss = cross entropy + c * load_balancing_loss_func(router logits of the full batch, mask)
#
# Tokens, not samples, are its rows: micro-batches may be padded to different lengths. Source:
# transformers 5.23, ``load_balancing_loss_func``; Fedus et al. 2022 (Switch Transformer), Eq. 4-6.

NAME = "load_balancing_loss_func"
"""Name of the function in every module."""

TAKES = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Its parameters. Another one of the same name is not replaced, and so refused."""


@contextmanager
def evenly_over_all(model: nn.Module) -> Iterator[None]:
    """Compute the load-balancing loss of a model's experts over the full batch in the body.

    Args:
        model: any; without experts nothing is done.
    """
    there = [(module, vars(module)[NAME]) for module in _with_experts(model)]
    for module, own in there:
        vars(module)[NAME] = _over_all(own)
    try:
        yield
    finally:
        for module, own in there:
            vars(module)[NAME] = own


def _with_experts(model: nn.Module) -> list[ModuleType]:
    """Return the files of a model's classes and their bases that have the balancing function."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    files = (sys.modules.get(name) for name in {one.__module__ for one in classes})
    return [file for file in files if file is not None and _is_balancing_loss(vars(file).get(NAME))]


@cache
def _is_balancing_loss(function: Any) -> bool:
    return callable(function) and tuple(inspect.signature(function).parameters) == TAKES


@cache
def _over_all(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the load-balancing function for the tokens of the full batch."""

    @coupled
    @wraps(own)
    def of_tokens(gates: tuple[Tensor, ...], experts: Any, top: Any, mask: Tensor | None) -> Tensor:
        found: Tensor = own(gates, experts, top, None if mask is None else mask[None])
        return found

    @wraps(own)
    def over_all(
        gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None
    ) -> Any:
        flat = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        if not isinstance(gate_logits, tuple) or not (flat or attention_mask is None):
            return own(gate_logits, num_experts, top_k, attention_mask)
        mask = attention_mask.reshape(-1) if flat else None
        return of_tokens(gate_logits, num_experts, top_k, mask)

    return over_all
