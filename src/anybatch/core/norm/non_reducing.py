"""BatchNorm without batch statistics, for inspections of a model and for dry runs.

Whether samples meet *elsewhere* in a model shows only when they do not meet in BatchNorm. And a
rehearsal on one sample must not fail for the want of a variance, nor move running statistics.
So the layer normalises with mean 0 and variance 1, by the kernel that is used between meetings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional as F

from anybatch.core.norm.counters import refuse
from anybatch.core.norm.intercept import Norms
from anybatch.core.norm.moments import accumulated
from anybatch.core.norm.sites import Site, site_of


class NormObserver(Protocol):
    """Protocol of an observer of normalisations while a model is inspected."""

    def record_input(self, x: Tensor) -> None:
        """Record the input of a normalisation."""

    def record_site(self, site: Site) -> None:
        """Record a place of forward where samples meet."""


class RefusedNorms(Norms):
    """While it is on, batch normalisation for training is refused: no module said there would be.

    Raises:
        BatchStatisticsError: from the call.
    """

    def normalise(
        self,
        x: Tensor,  # noqa: ARG002
        running: tuple[Tensor | None, Tensor | None],  # noqa: ARG002
        weight: Tensor | None,  # noqa: ARG002
        bias: Tensor | None,  # noqa: ARG002
        momentum: float,  # noqa: ARG002
        eps: float,  # noqa: ARG002
    ) -> Tensor:
        """Refuse it."""
        return refuse("batch_norm called in forward")

    def by_itself(self, x: Tensor) -> bool:
        """Return whether `x` has one row; of the two forwards of an inspection, one has several."""
        return x.shape[0] == 1

    def counts(self, counter: Tensor) -> bool:  # noqa: ARG002
        """Everything is counted."""
        return True


class NonReducingNorms(Norms):
    """While it is on, batch normalisation for training mixes no samples and moves no statistics.

    Args:
        counters: the ``num_batches_tracked`` of all modules.
        observer: records where samples meet. Default none.
        rows: of the full batch, if gathered tensors shall be as large. Default 0: they are not.

    Attributes:
        gathered: bytes gathered so far.
        called: arguments of functions of the full batch, in order.
        singles: calls that normalise each of several samples by itself.
    """

    def __init__(
        self,
        counters: Iterable[Tensor],
        observer: NormObserver | None = None,
        *,
        rows: int = 0,
    ) -> None:
        super().__init__(counters)
        self._observer, self.rows, self.gathered = observer, rows, 0
        self.called: list[Any] = []
        self.singles = 0

    def normalise(
        self,
        x: Tensor,
        running: tuple[Tensor | None, Tensor | None],  # noqa: ARG002
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Return x, scaled and shifted."""
        if self._observer is not None:
            self._observer.record_input(x)
        self.meets(site_of(x))
        dtype = accumulated(x.dtype) if weight is None else weight.dtype
        mean = x.new_zeros(x.shape[1], dtype=dtype)
        var = x.new_ones(x.shape[1], dtype=dtype)
        return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)

    def meets(self, site: Site) -> None:
        """Record a place of forward where samples meet."""
        if self._observer is not None:
            self._observer.record_site(site)

    def by_itself(self, x: Tensor) -> bool:
        """Say so, and count it; of a single sample, where one of several was."""
        found = super().by_itself(x) or (self.singles > 0 and x.shape[0] == 1)
        self.singles += found
        return found

    def counts(self, counter: Tensor) -> bool:  # noqa: ARG002
        """Return True: momentum may depend on the count. The caller restores the counter."""
        return True
