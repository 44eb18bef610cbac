"""The gradients of all ranks, summed once a step.

Half precision was summed in float32 before, and is not divided by the number of ranks: every rank's
share was weighted by the denominator of the full batch. Dense gradients are sent in pieces
(`anybatch.distributed.buckets`), some of them already before backward has ended.

Ring all-reduce sends 2 M (N - 1) / N bytes a rank (AGBN, section 4.1); it is the library's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.core.retry import Retry
from anybatch.distributed.buckets import Pieces
from anybatch.distributed.coordinator import SUMS, Coordinator

OVERLAP = True
"""Whether gradients may be sent while the last backward of a step still runs."""

NONE, DENSE, SPARSE, TWICE = 0.0, 1.0, 2.0, 3.0


class GradientSums:
    """The sums of a step over all ranks.

    Which parameters have a gradient, and of which type, is exchanged once: before the sums, or at
    the end of the step if pieces were agreed on in advance; a gradient in none of them is summed
    only if some rank has it.

    Args:
        coordinator: the collectives of the step.
        sums: (parameter, this rank's sum), the same parameters in the same order on every rank.
        early: pieces of which some are on their way; None where nothing was agreed on.

    Attributes:
        parameters: those of `sums`.
        kinds: the code of this rank's gradient, a number for each parameter.
        place: key of the exchange, for `Coordinator.gather`.
        dense: places of those that some rank had dense, once `receive` has run.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        sums: Sequence[tuple[Tensor, Tensor | None]],
        early: Pieces | None,
    ) -> None:
        self._coordinator, self.parameters = coordinator, [parameter for parameter, _ in sums]
        self._early = early
        self._contributed: dict[int, bool] = {} if early is None else dict(early.contributed)
        totals = [total for _, total in sums]
        self.kinds = [
            TWICE if at in self._contributed and total is not None else _gradient_type(total)
            for at, total in enumerate(totals)
        ]
        self.place = f"{SUMS} {len(sums)} gradients"
        self.dense: tuple[int, ...] = ()
        self._there: list[set[float]] = []
        if early is not None:
            early.send(totals)
            self._contributed = dict(early.contributed)
        for at, some in self._contributed.items():
            self.kinds[at] = DENSE if some and self.kinds[at] != TWICE else self.kinds[at]
        self._late = [None if at in self._contributed else total for at, total in enumerate(totals)]

    def early(self) -> list[Tensor | None]:
        """Return the agreed sums, as if some rank had each; None for other gradients."""
        assert self._early is not None
        found: list[Tensor | None] = [None] * len(self._late)
        with torch.no_grad():
            for at, total in self._early.sums():
                found[at] = total
        return found

    def receive(self, rows: Sequence[Tensor]) -> bool:
        """Record the gradient types of all ranks; return whether sums are missing.

        Raises:
            Retry: one was added twice on some rank: of a checkpointed layer that is called twice,
                for example.
        """
        self._there = [set(column) for column in torch.stack([*rows]).T.tolist()]
        if any(TWICE in found for found in self._there):
            raise Retry("ranks", dense=None)
        self.dense = tuple(at for at, found in enumerate(self._there) if DENSE in found)
        return any(
            found - {NONE} and at not in self._contributed for at, found in enumerate(self._there)
        )

    def late(self) -> list[tuple[int, Tensor | None]]:
        """Return (place, sum) of other gradients; sum None for an agreed one that no rank has.

        All ranks must reach this call.
        """
        found: dict[int, Tensor | None] = {
            at: None for at in self._contributed if at not in self.dense
        }
        totals, self._late = self._late, []
        with self._coordinator.raw(), torch.no_grad():
            places = [at for at in self.dense if at not in self._contributed]
            pieces = Pieces(self._coordinator.group, self.parameters, places)
            pieces.send(totals)
            for at, parameter in enumerate(self.parameters):
                if SPARSE in self._there[at] and at not in {*places, *self._contributed}:
                    found[at] = _sparse(self._coordinator, parameter, totals[at])
            del totals
            found |= dict(pieces.sums())
        return [*found.items()]


def _gradient_type(total: Tensor | None) -> float:
    if total is None:
        return NONE
    return SPARSE if total.is_sparse else DENSE


def _sparse(coordinator: Coordinator, parameter: Tensor, total: Tensor | None) -> Tensor:
    """Return the sum of gradients of which each rank has some rows."""
    part = None
    if total is not None:
        own = total.coalesce()
        part = own.indices().cpu(), own.values().cpu()
    parts = [one for one in coordinator.group.objects(part) if one is not None]
    return torch.sparse_coo_tensor(
        torch.cat([indices for indices, _ in parts], 1),
        torch.cat([values for _, values in parts]),
        parameter.shape,
        device=parameter.device,
    ).coalesce()
