"""Interface of a step to the mini-batch over all ranks, as a single process has it.

A step needs the same with and without other ranks: the denominators of the loss, all outputs, the
sums of gradients. `LocalBatch` returns them for one process, at no cost; `Ranks`
(`anybatch.distributed.global_batch`) by collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.loss.base import Total

Layout = tuple[int | None, ...]
Take = Callable[[list[Tensor]], list[Tensor | None]]
Amended = list[tuple[Tensor, Tensor | None]]


class Rows(NamedTuple):
    """Outputs and targets of the full batch, and the first row of this rank.

    Attributes:
        outputs: of all ranks.
        targets: of all ranks.
        size: N_B over all ranks.
        begin: the first row of this rank.
        leads: this rank delivers the gradients of the loss's own parameters.
        here: samples of this rank.
    """

    outputs: Any
    targets: Any
    size: int
    begin: int
    leads: bool
    here: int


class LocalBatch:
    """The ranks of a step, as one of them sees them; here one process has everything.

    Args:
        size: N_B over all ranks.
        micro_batch: samples in a micro-batch: the smallest of all ranks.
        lanes: samples meet in BatchNorm, on any rank.
        coupled: any rank knows that the loss needs all outputs at once.

    Attributes:
        several: there are other ranks.
        settled: every rank has planned for so many samples; else all have to, once more.
        begin: the place of the first sample of this rank among those of all.
    """

    several = False
    settled = True
    begin = 0

    def __init__(
        self,
        size: int = 0,
        micro_batch: int = 0,
        lanes: bool = False,  # noqa: FBT001, FBT002
        coupled: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        self.size, self.micro_batch = size, micro_batch
        self.lanes, self.coupled = lanes, coupled

    @property
    def sending(self) -> bool:
        """Whether gradients are being sent: all ranks run again after a failure from here on."""
        return False

    def offer(self, parameters: Sequence[Tensor]) -> None:
        """Offer to send gradients before the last backward has ended, where `totals` is next.

        Args:
            parameters: the same in the same order on every rank, and as `gradients` gets them.
        """

    def during(self, take: Take) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context of the last backward, which sends completed gradients.

        Args:
            take: returns this rank's sums for some parameters, and lets go of them.
        """
        return nullcontext()

    def totals(self, totals: list[Total] | None) -> list[Total] | None:
        """Return the denominators of the full batch; None where the loss couples samples."""
        return totals

    def sum_of(self, what: str, value: float | Tensor) -> float | Tensor:  # noqa: ARG002
        """Return the sum over all ranks."""
        return value

    def loss(self, here: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor for the loss of all samples, which is filled when the step ends."""
        return here.to(dtype)

    def rows(self, outputs: Any, targets: Any, layout: Layout, size: int) -> Rows:  # noqa: ARG002
        """Return all outputs and targets, in the order of the ranks."""
        return Rows(outputs, targets, size, 0, leads=True, here=size)

    def reduce(self, key: Any, part: Any, add: Callable[[Any, Any], Any]) -> Any:  # noqa: ARG002
        """Return the sum of the parts of all ranks."""
        return part

    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:  # noqa: ARG002
        """Return the rows of all ranks, and where these begin among them."""
        return rows, 0

    def gradients(self, sums: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
        """Return the sums over all ranks, for (parameter, this rank's sum).

        Some may be amended at the `end`.
        """
        return [total for _, total in sums]

    def agree(self, devices: Sequence[torch.device]) -> None:
        """Check that all ranks have one RNG state, and copy it to those without samples."""

    def refuse_smaller(self) -> None:
        """Refuse to run a smaller step, where other ranks are about to end theirs."""

    def moves(self, buffers: Any) -> None:
        """Copy the `ForwardBuffers` that moved to ranks without samples, when the step ends."""

    def end(self) -> Amended:
        """Wait until all ranks have ended the step; return the amended sums."""
        return []


class AbsentRanks(LocalBatch):
    """The ranks of a rehearsal, of which this one is the first and the others are not there."""

    several = True

    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:  # noqa: ARG002
        """Return as many rows as all ranks have, with nothing in them."""
        return rows.new_zeros((self.size, *rows.shape[1:])), 0
