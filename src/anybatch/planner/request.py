"""Planning request: one mini-batch, its signature, and the queries about it.

A planner gets questions, not answers: rehearsing a case, trying whether a batch may be divided and
timing a step in lanes all cost something, so each is done when a decision hangs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from anybatch.errors import NotExactError, NotYetError
from anybatch.execution.case import Case
from anybatch.execution.signature import Signature
from anybatch.planner.contest import StepTimer


@dataclass(frozen=True)
class PlanningRequest:
    """Planning request for one mini-batch.

    Attributes:
        signature: of the batch.
        case: returns the case of a dry run.
        optimizer: its state counts, as it will be.
        refuse_division: raises where the batch must not be divided.
        time_step: times a full step of it.
    """

    signature: Signature
    case: Callable[[], Case]
    optimizer: torch.optim.Optimizer | None
    refuse_division: Callable[[], None]
    time_step: StepTimer

    @cached_property
    def full_batch(self) -> bool:
        """Whether micro-batches that know nothing of each other would be another training."""
        return self.signature.lanes or self.undivided

    def streamed(self, n: int) -> float | None:
        """Return the seconds of a resident step in micro-batches of `n`, one after another."""
        return self.time_step(n, None, None)

    @property
    def spread(self) -> bool:
        """Whether the parameters are, over ranks."""
        return self.signature.global_samples > 0 and self.case().sharded is not None

    def refuse_spread(self) -> None:
        """Refuse to offload saved tensors where parameters are sharded over ranks.

        Raises:
            NotYetError: they are.
        """
        if self.spread:
            raise NotYetError(
                "saved tensors cannot be offloaded today where parameters are sharded over ranks: "
                'plan with offload="off", or without sharding'
            )

    @cached_property
    def undivided(self) -> bool:
        """Whether the batch must not be divided."""
        try:
            self.refuse_division()
        except NotExactError:
            return True
        return False
