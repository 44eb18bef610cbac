"""BatchNorm that looks at nobody: for looking at a model, and for rehearsing what it will hold.

Whether samples meet *elsewhere* in a model shows only when they do not meet in BatchNorm. And a
rehearsal on one sample must not fail for the want of a variance, nor move running statistics.
So the layer normalises with mean 0 and variance 1, by the kernel that is used between meetings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from anybatch.batchnorm import refuse
from anybatch.norm.intercept import Norms
from anybatch.norm.moments import accumulated


class HeardNorms(Norms):
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

    def counts(self, counter: Tensor) -> bool:  # noqa: ARG002
        """Everything is counted."""
        return True


class AloneNorms(Norms):
    """While it is on, batch normalisation for training mixes no samples and moves no statistics.

    Args:
        counters: the ``num_batches_tracked`` of all modules.
        heard: told of what is normalised. Default nobody.
        rows: of the whole batch, where what is gathered shall be as large. Default 0: it is not.

    Attributes:
        gathered: bytes of what was gathered so far.
        called: what functions of the whole batch were called with, in order.
    """

    def __init__(
        self,
        counters: Iterable[Tensor],
        heard: Callable[[Tensor], None] | None = None,
        *,
        rows: int = 0,
    ) -> None:
        super().__init__(counters)
        self._heard, self.rows, self.gathered = heard, rows, 0
        self.called: list[Any] = []

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
        if self._heard is not None:
            self._heard(x)
        dtype = accumulated(x.dtype) if weight is None else weight.dtype
        mean = x.new_zeros(x.shape[1], dtype=dtype)
        var = x.new_ones(x.shape[1], dtype=dtype)
        return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)

    def counts(self, counter: Tensor) -> bool:  # noqa: ARG002
        """Everything is counted: momentum may be one by the count. Who uses this puts it back."""
        return True
