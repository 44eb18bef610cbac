"""The gradients of all ranks, summed once a step.

Half precision was summed in float32 before it comes here, and no number of ranks divides it: every
rank's share was weighted by the denominator of the whole batch. What is dense goes in pieces
(`anybatch.ranks.pieces`), some of which may be on their way since before backward had ended.

Ring all-reduce sends 2 M (N - 1) / N bytes a rank (AGBN, section 4.1); it is the library's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anybatch.ranks.pieces import Pieces
from anybatch.ranks.unison import SUMS, RanksAgainError, Unison

OVERLAP = True
"""Whether gradients may be sent while the last backward of a step still runs."""

NONE, DENSE, SPARSE, TWICE = 0.0, 1.0, 2.0, 3.0


class AddedTwiceError(RanksAgainError):
    """Backward has added to a gradient again that was on its way: all ranks run the step again."""

    def __init__(self) -> None:
        super().__init__(coupled=False)


class Summed(NamedTuple):
    """What a step has summed.

    Attributes:
        totals: a tensor for each parameter; None where no rank has one.
        dense: places of those that some rank had dense.
    """

    totals: list[Tensor | None]
    dense: tuple[int, ...]


def summed(
    unison: Unison, sums: Sequence[tuple[Tensor, Tensor | None]], early: Pieces | None = None
) -> Summed:
    """Return the sums over all ranks.

    Args:
        unison: the collectives of the step.
        sums: (parameter, this rank's sum), the same parameters in the same order on every rank.
        early: pieces of which some are on their way; None (default) where nothing was agreed on.

    Raises:
        AddedTwiceError: on some rank, of a checkpointed layer that is called twice for example.
    """
    parameters, totals = [p for p, _ in sums], [total for _, total in sums]
    given = {} if early is None else dict(early.given)
    if early is not None:
        early.send(totals)
    here = [TWICE if at in given and t is not None else _kind(t) for at, t in enumerate(totals)]
    for at, some in ({} if early is None else early.given).items():
        here[at] = DENSE if some and here[at] != TWICE else here[at]
    kinds_here = torch.tensor(here, dtype=torch.float64)
    there = torch.stack(unison.gather(f"{SUMS} {len(sums)} gradients", kinds_here))
    kinds = [set(column) for column in there.T.tolist()]
    if early is not None and any(TWICE in found for found in kinds):
        unison.give_up_early()
        unison.learn_anew()
        raise AddedTwiceError
    places = tuple(at for at, found in enumerate(kinds) if DENSE in found)
    found: list[Tensor | None] = [None] * len(sums)
    with unison.raw(), torch.no_grad():
        sent = set() if early is None else set(early.given)
        late = Pieces(unison.group, parameters, [at for at in places if at not in sent])
        late.send(totals)
        for at, (parameter, total) in enumerate(sums):
            if SPARSE in kinds[at] and at not in {*places, *sent}:
                found[at] = _sparse(unison, parameter, total)
        del totals, total
        for pieces in (early, late):
            for at, whole in () if pieces is None else pieces.sums():
                found[at] = whole if DENSE in kinds[at] else None
    return Summed(found, places)


def _kind(total: Tensor | None) -> float:
    if total is None:
        return NONE
    return SPARSE if total.is_sparse else DENSE


def _sparse(unison: Unison, parameter: Tensor, total: Tensor | None) -> Tensor:
    """Return the sum of gradients of which each rank has some rows."""
    part = None
    if total is not None:
        own = total.coalesce()
        part = own.indices().cpu(), own.values().cpu()
    parts = [one for one in unison.group.objects(part) if one is not None]
    return torch.sparse_coo_tensor(
        torch.cat([indices for indices, _ in parts], 1),
        torch.cat([values for _, values in parts]),
        parameter.shape,
        device=parameter.device,
    ).coalesce()
