"""Store of forecasts by signature, in which a larger batch's forecast bounds smaller batches.

A person's lengths and image sizes change from batch to batch, and a rehearsal for each would cost
seconds. A kind of batch whose rows are all at least as large holds no less, so its forecast will
do; and what is rehearsed anew is rounded up, so that it bounds the next ones too.

    lengths 300, 410, 120, 500, 31 ...      rehearsed: 300, 512, 32

A number that comes with the rows may decide what is held (how many tokens are kept), or nothing at
all (a count of steps). Two numbers that hold the same show that it is the latter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from anybatch.core import accelerator
from anybatch.core.absent import absent
from anybatch.core.tree import tensors
from anybatch.errors import AnybatchError
from anybatch.execution.case import MICRO_BATCHES, Case, stretched
from anybatch.execution.kinds import Kind, bytes_of
from anybatch.planner.budget import on_absent, on_cuda, other_tensors
from anybatch.planner.forecast import Forecast
from anybatch.planner.ladder import FAKE, FARTHER, forecast

LOOSE = 4
"""How many times as many elements a known case may have to bound another one."""

MANY = 8
"""Numbers that are told apart; of others the forecast with the most bytes stands in."""


class Foreseen:
    """Forecasts made so far, by signature of the mini-batch.

    Attributes:
        rehearsed: how many were made.
    """

    def __init__(self) -> None:
        self.rehearsed = 0
        self._known: list[tuple[Kind, Forecast]] = []
        self._same: set[Any] = set()
        self._more = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without forecasts, which hold fakes."""
        return vars(self) | {"_known": []}

    def plain(self, kind: Kind) -> Kind:
        """Return the signature without its numbers, where these have no effect on memory."""
        return replace(kind, numbers=()) if _but_numbers(kind) in self._same else kind

    def knows(self, kind: Kind) -> bool:
        """Return whether exactly this signature has a forecast."""
        return any(
            replace(known, before=kind.before, everyone=kind.everyone, most=kind.most) == kind
            and (known.everyone == kind.everyone or _same_ranks(known, forecast, kind))
            for known, forecast in self._known
        )

    def hold_more(self, count: int) -> None:
        """Add `count` bytes to every forecast: a step has held more than was foreseen.

        Where there is none, because a plan was obeyed, to those that come.
        """
        self._more += 0 if self._known else count
        self._known = [(known, f.with_more("activations", count)) for known, f in self._known]

    def bound(self, kind: Kind) -> Forecast | None:
        """Return a forecast that bounds this signature and is not many times larger; or None."""
        above = [
            (known.elements, forecast)
            for known, forecast in self._known
            if known.bounds(kind) and known.size >= kind.size
            if known.everyone >= kind.everyone > 0 or _same_ranks(known, forecast, kind)
        ]
        if not above:
            return self._stand_in(kind)
        elements, found = min(above, key=lambda pair: pair[0])
        return found if elements <= LOOSE * kind.elements else None

    def foresee(
        self,
        kind: Kind,
        case: Case,
        optimizer: torch.optim.Optimizer | None,
        room: int,
        *,
        rounded: bool,
    ) -> Forecast:
        """Make and store the forecast of a signature, or of one that bounds it and others."""
        self.rehearsed += 1
        bound = self._rounded(kind) if rounded else kind
        found = _at(case, bound, optimizer, room) if bound != kind else None
        if found is None:
            bound = kind
            found = _forecast(case, optimizer, room, kind.size)
        elif not accelerator.of(case.device).host:
            others = other_tensors(case, optimizer)
            found = on_cuda(found, case=case, others=others, budget=room, size=kind.size)
        found = found.with_more("activations", self._more) if self._more else found
        self._known.append((bound, found))
        self._compare(bound, found)
        return found

    def _rounded(self, kind: Kind) -> Kind:
        """Return the signature with its changing sizes rounded up, so that it bounds others."""
        first = next((known for known, _ in self._known if known.tensors == kind.tensors), None)
        if first is None:
            return kind
        shapes = tuple(
            tuple(a if a == b else _power(b) for a, b in zip(before, now, strict=True))
            for before, now in zip(first.shapes, kind.shapes, strict=True)
        )
        size = kind.size if kind.size <= first.size else _power(kind.size)
        most = max(known.everyone for known, _ in self._known)
        everyone = _power(kind.everyone) if kind.everyone > most > 0 else kind.everyone
        return replace(kind, shapes=shapes, size=size, everyone=everyone)

    def _compare(self, kind: Kind, found: Forecast) -> None:
        """Remember where another number has held the same."""
        sizes = {1, kind.size}
        peaks = [found.peak(n, kind.size) for n in sizes]
        for known, other in self._known:
            alike = _but_numbers(known) == _but_numbers(kind) and known.shapes == kind.shapes
            if known.numbers == kind.numbers or not alike:
                continue
            if known.size == kind.size and peaks == [other.peak(n, kind.size) for n in sizes]:
                self._same.add(_but_numbers(kind))
        self._known = [(self.plain(known), forecast) for known, forecast in self._known]

    def _stand_in(self, kind: Kind) -> Forecast | None:
        """Return the largest forecast of many that differ in numbers; None where they are few."""
        others = [
            forecast
            for known, forecast in self._known
            if replace(known, numbers=kind.numbers).bounds(kind) and known.size >= kind.size
            if known.everyone >= kind.everyone > 0 or _same_ranks(known, forecast, kind)
        ]
        if len(others) < MANY:
            return None
        return max(others, key=lambda forecast: forecast.peak(kind.size, kind.size))


def _forecast(
    case: Case, optimizer: torch.optim.Optimizer | None, room: int, size: int
) -> Forecast:
    """Return the forecast, compared with a small real step where its device is there to run it."""
    device = absent()
    foresee = partial(forecast, case, optimizer, room=room)
    if device is None and accelerator.of(case.device).host:
        return foresee(verify=True)
    if device is None:
        others = other_tensors(case, optimizer)
        there = partial(on_cuda, case=case, others=others, budget=room, size=size)
        return foresee(verify=True, others=others, on_device=there)
    try:
        found = foresee(verify=False)
    except (AnybatchError, MemoryError):
        raise
    except Exception:  # a value is read: the next rung, on the host
        found = foresee(verify=True)
    return on_absent(found, case, device)


def _at(
    case: Case, kind: Kind, optimizer: torch.optim.Optimizer | None, room: int
) -> Forecast | None:
    """Return the forecast of the case with other shapes; None where the model cannot take them.

    On CUDA nothing is run: an index beyond a table ends all work on the device.
    """
    count = MICRO_BATCHES * max(FARTHER)
    rows = stretched(case.rows, kind.shapes, count)
    larger = replace(case, size=kind.size, rows=rows, everyone=kind.everyone)
    try:
        found = forecast(larger, optimizer, room=room, verify=accelerator.of(case.device).host)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # longer than its table of positions, or whatever else
        return None
    if found.how == FAKE:
        return found
    if found.look.coupled:  # what all outputs need was not seen
        return None
    # What a loss counts over all targets was counted over a few.
    row = sum(bytes_of(t[:1]) for _, t in tensors(larger.rows.targets) if t.dim())
    return found.with_more("activations", row * kind.size)


def _same_ranks(known: Kind, forecast: Forecast, kind: Kind) -> bool:
    """Say whether samples of other ranks make no difference: there are none, or they hold none."""
    if known.everyone == 0 or kind.everyone == 0:
        return known.everyone == kind.everyone
    return not forecast.meets_ranks


def _but_numbers(kind: Kind) -> Any:
    return kind.tensors, kind.modes, kind.lanes, kind.trains


def _power(count: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (count - 1).bit_length() if count > 0 else 0
