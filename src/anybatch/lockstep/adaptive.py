"""AGBN's policy for the steps in which BatchNorm of the full batch is worth its price.

Meeting in every layer costs time, and early in training statistics of a part do as well; a part
that is large enough does always. So normalisation is local until training converges, and global
from there on, unless the batch is so large that it need not be.

    local  ── converged, and the batch is smaller than max_batch ──>  global

The criterion uses the loss of the full batch, which all ranks share: all change in the same step.

Source: AGBN, section 4.3.
"""

from __future__ import annotations

import math
from typing import Any, Protocol


class Criterion(Protocol):
    """Says whether training has converged, from a metric that falls."""

    def converged(self, value: float) -> bool:
        """Take in the next value of the metric."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the criterion, in plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember that."""


class Plateau:
    """Converged when a metric has not improved for a while, and from then on for ever.

    Args:
        patience: values without an improvement, at least 1. Default 3.
        least: an improvement is a fall by this share of the best value. Default 0.01.

    Raises:
        ValueError: `patience` < 1 or `least` < 0.
    """

    def __init__(self, patience: int = 3, least: float = 0.01) -> None:
        if patience < 1 or not least >= 0:
            raise ValueError(
                f"patience must be >= 1 and least >= 0, and they are {patience!r} and {least!r}"
            )
        self.patience, self.least = patience, least
        self._best, self._waited = math.inf, 0

    def converged(self, value: float) -> bool:
        """Take in the next value, and return whether training has converged.

        Args:
            value: value of the metric; NaN is no improvement.

        Returns:
            Whether training has converged, now or before.
        """
        if self._waited >= self.patience:
            return True
        if value < self._best - self.least * abs(self._best) or self._best == math.inf > value:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self._waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the number of values since then."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: the result of `state_dict`.
        """
        self._best, self._waited = state["best"], state["waited"]


class Fixed:
    """One mode for ever.

    Args:
        mode: "exact" or "local".
    """

    def __init__(self, mode: str) -> None:
        self.now = mode

    def choose(self, batch_size: int) -> None:
        """Choose nothing."""

    def step(self, loss: Any) -> None:
        """Learn nothing."""


class Adaptive:
    """``Engine(batchnorm=Adaptive(...))``: local until converged or while the batch is large.

    Args:
        max_batch: samples over all ranks from which on BatchNorm is always local. Default None: no
            batch is that large.
        criterion: says when training has converged. Default ``Plateau()``.
        every: steps whose mean loss is one value of the metric, at least 1. Default 100. If
            `measured` is called, its values are the metric instead.

    Attributes:
        is_converged: the last result of the criterion.
        now: "exact" or "local", as chosen for the last step.

    Raises:
        ValueError: `every` or `max_batch` < 1.

    Source: AGBN, section 4.3: BZ_max and IsConverged.
    """

    def __init__(
        self,
        *,
        max_batch: int | None = None,
        criterion: Criterion | None = None,
        every: int = 100,
    ) -> None:
        if every < 1 or (max_batch is not None and max_batch < 1):
            raise ValueError(
                f"every and max_batch must be >= 1, and they are {every!r} and {max_batch!r}"
            )
        self.max_batch, self.every = max_batch, every
        self.criterion: Criterion = Plateau() if criterion is None else criterion
        self.is_converged = False
        self.now = "local"
        self._losses: list[float] = []
        self._by_hand = False

    def choose(self, batch_size: int) -> None:
        """Choose the mode of the next step; the engine calls this.

        Args:
            batch_size: samples over all ranks.
        """
        small = self.max_batch is None or batch_size < self.max_batch
        self.now = "exact" if self.is_converged and small else "local"

    def step(self, loss: Any) -> None:
        """Take in the loss of a step; the engine calls this.

        Args:
            loss: the loss over all ranks, a number or a 0-dim tensor.
        """
        if self._by_hand or self.is_converged:
            return
        self._losses.append(float(loss))
        if len(self._losses) == self.every:
            mean = sum(self._losses) / self.every
            self._losses.clear()
            self.is_converged = self.criterion.converged(mean)

    def measured(self, value: float) -> None:
        """Take in a metric that falls, such as the validation loss.

        Args:
            value: value of the metric, the same on all ranks.
        """
        self._by_hand = True
        self.is_converged = self.is_converged or self.criterion.converged(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed training needs, in plain values."""
        return {
            "is_converged": self.is_converged,
            "losses": list(self._losses),
            "by_hand": self._by_hand,
            "criterion": self.criterion.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: the result of `state_dict`.
        """
        self.is_converged, self._by_hand = state["is_converged"], state["by_hand"]
        self._losses = list(state["losses"])
        self.criterion.load_state_dict(state["criterion"])
