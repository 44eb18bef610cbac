"""Interface of a step to the mini-batch over all ranks, with a single-process version.

A step needs the same with and without other ranks: the denominators of the loss, all outputs, the
sums of gradients. `LocalBatch` returns them for one process, at no cost; `Ranks`
(`anybatch.distributed.global_batch`) by collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

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


class Moved(Protocol):
    """Buffers that forward moves, alike on every rank that has samples."""

    def on_host(self) -> dict[str, Tensor]:
        """Return them by path, on the host."""

    def receive(self, buffers: Mapping[str, Tensor]) -> None:
        """Take those of another rank."""


class GlobalBatch(Protocol):
    """The ranks of a step, as one of them sees them."""

    several: bool
    """Whether there are others."""

    size: int
    """N_B over all ranks."""

    begin: int
    """The place of the first sample of this rank among them."""

    micro_batch: int
    """Samples in a micro-batch: the smallest of all ranks."""

    lanes: bool
    """Whether samples meet in BatchNorm, on any rank."""

    coupled: bool
    """Whether any rank knows that the loss needs all outputs at once."""

    settled: bool
    """Whether every rank has planned for so many samples; else all have to, once more."""

    @property
    def sending(self) -> bool:
        """Whether gradients are being sent: all ranks run again after a failure from here on."""

    def offer(self, parameters: Sequence[Tensor]) -> None:
        """Offer to send gradients before the last backward has ended, where `totals` is next.

        Args:
            parameters: the same in the same order on every rank, and as `gradients` gets them.
        """

    def during(self, take: Take) -> AbstractContextManager[None]:
        """Return the context of the last backward, which sends completed gradients.

        Args:
            take: returns this rank's sums for some parameters, and lets go of them.
        """

    def totals(self, totals: list[Total] | None) -> list[Total] | None:
        """Return the denominators of the full batch; None where the loss couples samples.

        Args:
            totals: of this rank's samples; None where the loss couples them.
        """

    def sum_of(self, what: str, value: float | Tensor) -> float | Tensor:
        """Return the sum over all ranks."""

    def loss(self, here: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor for the loss of all samples, which is filled when the step ends.

        Args:
            here: this rank's share.
            dtype: of the result.
        """

    def rows(self, outputs: Any, targets: Any, layout: Layout, size: int) -> Rows:
        """Return all outputs and targets, in the order of the ranks."""

    def reduce(self, key: Any, part: Any, add: Callable[[Any, Any], Any]) -> Any:
        """Return the sum of the parts of all ranks."""

    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:
        """Return the rows of all ranks, and where these begin among them."""

    def gradients(self, sums: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
        """Return the sums over all ranks, for (parameter, this rank's sum).

        Some may be amended at the `end`.
        """

    def agree(self, devices: Sequence[torch.device]) -> None:
        """Check that all ranks have one RNG state, and copy it to those without samples.

        Args:
            devices: accelerators of the model.
        """

    def refuse_smaller(self) -> None:
        """Refuse to run a smaller step, where other ranks are about to end theirs."""

    def moves(self, buffers: Moved) -> None:
        """Copy buffers that forward moved to ranks without samples, when the step ends."""

    def end(self) -> Amended:
        """Wait until all ranks have ended the step; return the amended sums."""


class LocalBatch:
    """One process: everything is here.

    Args:
        size: N_B.
        micro_batch: samples in a micro-batch.
        lanes: samples meet in BatchNorm.
        coupled: the loss needs all outputs at once.
    """

    several = False
    settled = True
    begin = 0
    sending = False

    def __init__(
        self,
        size: int = 0,
        micro_batch: int = 0,
        lanes: bool = False,  # noqa: FBT001, FBT002
        coupled: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        self.size, self.micro_batch = size, micro_batch
        self.lanes, self.coupled = lanes, coupled

    def offer(self, parameters: Sequence[Tensor]) -> None:
        """Offer nothing."""

    def during(self, take: Take) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a body that sends nothing."""
        return nullcontext()

    def totals(self, totals: list[Total] | None) -> list[Total] | None:
        """Return them."""
        return totals

    def sum_of(self, what: str, value: float | Tensor) -> float | Tensor:  # noqa: ARG002
        """Return it."""
        return value

    def loss(self, here: Tensor, dtype: torch.dtype) -> Tensor:
        """Return it."""
        return here.to(dtype)

    def rows(self, outputs: Any, targets: Any, layout: Layout, size: int) -> Rows:  # noqa: ARG002
        """Return them."""
        return Rows(outputs, targets, size, 0, leads=True, here=size)

    def reduce(self, key: Any, part: Any, add: Callable[[Any, Any], Any]) -> Any:  # noqa: ARG002
        """Return it."""
        return part

    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:  # noqa: ARG002
        """Return them."""
        return rows, 0

    def gradients(self, sums: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
        """Return them."""
        return [total for _, total in sums]

    def agree(self, devices: Sequence[torch.device]) -> None:
        """Check nothing: there is one RNG state."""

    def refuse_smaller(self) -> None:
        """Refuse nothing."""

    def moves(self, buffers: Moved) -> None:
        """Copy nothing."""

    def end(self) -> Amended:
        """Return no amended sums, without a wait."""
        return []


class AbsentRanks(LocalBatch):
    """The ranks of a rehearsal, of which this one is the first and the others are not there.

    Args:
        size: N_B over all ranks.
    """

    several = True

    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:  # noqa: ARG002
        """Return as many rows as all ranks have, with nothing in them."""
        return rows.new_zeros((self.size, *rows.shape[1:])), 0
