"""BatchNorm of a run: exact (full batch), local (micro-batch), or adaptive (local, then exact).

With `--batchnorm adaptive` a run begins with the statistics of each micro-batch, which cost
nothing, and continues with those of the full batch once its training loss no longer falls. The
policy is `anybatch.Adaptive`; the command passes it an epoch's training loss, reports its change,
and stores its state in the checkpoint.

Source: AGBN, section 4.3: BZ_max and IsConverged.
"""

from __future__ import annotations

from typing import Any

from anybatch import Adaptive, Plateau
from anybatch.cli.settings import Settings


class BatchNormPolicy:
    """BatchNorm policy of a run with mini-batches of `batch_size` samples, except the last.

    Attributes:
        batchnorm: the argument `batchnorm` of an engine.
        exact_from: the first epoch (from 1) after training had converged; None before.
    """

    def __init__(self, settings: Settings, batch_size: int) -> None:
        self._until = Plateau()
        self._adaptive = Adaptive(max_batch=settings.max_batch, criterion=self._until)
        by_hand = {**self._adaptive.state_dict(), "by_hand": True}
        self._adaptive.load_state_dict(by_hand)  # an epoch's loss counts, and no step's
        self.batchnorm = self._adaptive if settings.batchnorm == "adaptive" else settings.batchnorm
        self.exact_from: int | None = None
        self._batch_size = batch_size

    def choose(self, batch_size: int) -> None:
        """Choose for a mini-batch that is to be planned."""
        self._adaptive.choose(batch_size)

    def measured(self, epoch: int, loss: float) -> str | None:
        """Record the training loss of an epoch; return the change from the next on, or None."""
        if self.batchnorm is not self._adaptive:
            return None
        before = self._adaptive.is_converged
        self._adaptive.measured(loss)
        if before or not self._adaptive.is_converged:
            return None
        self.exact_from = epoch + 1
        change = f"BatchNorm is exact from epoch {self.exact_from} on"
        most = self._adaptive.max_batch
        if most is not None and self._batch_size >= most:
            change = f"BatchNorm stays local where a mini-batch has {most} samples or more"
        return (
            f"{change}: the training loss has not fallen by {self._until.least:.0%} for "
            f"{self._until.patience} epochs"
        ).replace("%", " %")

    def state(self) -> dict[str, Any] | None:
        """Return the state that a resumed run needs; None where nothing changes."""
        if self.batchnorm is not self._adaptive:
            return None
        return {**self._adaptive.state_dict(), "exact_from": self.exact_from}

    def put_back(self, state: dict[str, Any] | None) -> None:
        """Restore the state that `state` returned."""
        if state is not None and self.batchnorm is self._adaptive:
            self._adaptive.load_state_dict(state)
            self.exact_from = state["exact_from"]
