"""Store of forecasts by signature, in which a larger batch's forecast bounds smaller batches.

Lengths and image sizes may change from batch to batch, and a dry run for each would cost seconds. A
batch whose rows are all at least as large holds no less, so its forecast suffices; and the shapes
of a new dry run are rounded up, so that it bounds the next ones too.

    lengths 300, 410, 120, 500, 31 ...      rehearsed: 300, 512, 32

A number in a batch may decide the held bytes (a number of selected tokens), or nothing at all (a
count of steps). Two numbers that hold the same show that it is the latter.
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
from anybatch.execution.signature import Signature, bytes_of
from anybatch.planner.budget import on_absent, on_cuda, other_tensors
from anybatch.planner.forecast import Forecast
from anybatch.planner.ladder import FAKE, FARTHER, forecast

LOOSE = 4
"""How many times as many elements a stored case may have to bound another one."""

MANY = 8
"""Numbers that are distinguished; of others the forecast with the most bytes stands in."""


class Foreseen:
    """Forecasts made so far, by signature of the mini-batch.

    Attributes:
        rehearsed: how many were made.
    """

    def __init__(self) -> None:
        self.rehearsed = 0
        self._stored: list[tuple[Signature, Forecast]] = []
        self._same: set[Any] = set()
        self._more = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without forecasts, which hold fakes."""
        return vars(self) | {"_stored": []}

    def plain(self, signature: Signature) -> Signature:
        """Return the signature without its numbers, where these have no effect on memory."""
        return (
            replace(signature, numbers=()) if _but_numbers(signature) in self._same else signature
        )

    def knows(self, signature: Signature) -> bool:
        """Return whether exactly this signature has a forecast."""
        return any(
            replace(
                saved,
                before=signature.before,
                global_samples=signature.global_samples,
                most=signature.most,
            )
            == signature
            and (
                saved.global_samples == signature.global_samples
                or _same_ranks(saved, forecast, signature)
            )
            for saved, forecast in self._stored
        )

    def hold_more(self, count: int) -> None:
        """Add `count` bytes to every forecast: a step has held more than was foreseen.

        Where there is none, because a plan was obeyed, to those that come.
        """
        self._more += 0 if self._stored else count
        self._stored = [(saved, f.with_more("activations", count)) for saved, f in self._stored]

    def bound(self, signature: Signature) -> Forecast | None:
        """Return a forecast that bounds this signature and is not many times larger; or None."""
        above = [
            (saved.elements, forecast)
            for saved, forecast in self._stored
            if saved.bounds(signature) and saved.size >= signature.size
            if saved.global_samples >= signature.global_samples > 0
            or _same_ranks(saved, forecast, signature)
        ]
        if not above:
            return self._stand_in(signature)
        elements, found = min(above, key=lambda pair: pair[0])
        return found if elements <= LOOSE * signature.elements else None

    def foresee(
        self,
        signature: Signature,
        case: Case,
        optimizer: torch.optim.Optimizer | None,
        available: int,
        *,
        rounded: bool,
    ) -> Forecast:
        """Make and store the forecast of a signature, or of one that bounds it and others."""
        self.rehearsed += 1
        bound = self._rounded(signature) if rounded else signature
        found = _at(case, bound, optimizer, available) if bound != signature else None
        if found is None:
            bound = signature
            found = _forecast(case, optimizer, available, signature.size)
        elif not accelerator.of(case.device).host:
            others = other_tensors(case, optimizer)
            found = on_cuda(found, case=case, others=others, budget=available, size=signature.size)
        found = found.with_more("activations", self._more) if self._more else found
        self._stored.append((bound, found))
        self._compare(bound, found)
        return found

    def _rounded(self, signature: Signature) -> Signature:
        """Return the signature with its changing sizes rounded up, so that it bounds others."""
        first = next(
            (saved for saved, _ in self._stored if saved.tensors == signature.tensors), None
        )
        if first is None:
            return signature
        shapes = tuple(
            tuple(a if a == b else _power(b) for a, b in zip(before, now, strict=True))
            for before, now in zip(first.shapes, signature.shapes, strict=True)
        )
        size = signature.size if signature.size <= first.size else _power(signature.size)
        most = max(saved.global_samples for saved, _ in self._stored)
        global_samples = (
            _power(signature.global_samples)
            if signature.global_samples > most > 0
            else signature.global_samples
        )
        return replace(signature, shapes=shapes, size=size, global_samples=global_samples)

    def _compare(self, signature: Signature, found: Forecast) -> None:
        """Remember where another number has held the same."""
        sizes = {1, signature.size}
        peaks = [found.peak(n, signature.size) for n in sizes]
        for saved, other in self._stored:
            alike = (
                _but_numbers(saved) == _but_numbers(signature) and saved.shapes == signature.shapes
            )
            if saved.numbers == signature.numbers or not alike:
                continue
            if saved.size == signature.size and peaks == [
                other.peak(n, signature.size) for n in sizes
            ]:
                self._same.add(_but_numbers(signature))
        self._stored = [(self.plain(saved), forecast) for saved, forecast in self._stored]

    def _stand_in(self, signature: Signature) -> Forecast | None:
        """Return the largest forecast of many that differ in numbers; None where they are few."""
        others = [
            forecast
            for saved, forecast in self._stored
            if replace(saved, numbers=signature.numbers).bounds(signature)
            and saved.size >= signature.size
            if saved.global_samples >= signature.global_samples > 0
            or _same_ranks(saved, forecast, signature)
        ]
        if len(others) < MANY:
            return None
        return max(others, key=lambda forecast: forecast.peak(signature.size, signature.size))


def _forecast(
    case: Case, optimizer: torch.optim.Optimizer | None, available: int, size: int
) -> Forecast:
    """Return the forecast, compared with a small real step where its device is there to run it."""
    device = absent()
    foresee = partial(forecast, case, optimizer, available=available)
    if device is None and accelerator.of(case.device).host:
        return foresee(verify=True)
    if device is None:
        others = other_tensors(case, optimizer)
        there = partial(on_cuda, case=case, others=others, budget=available, size=size)
        return foresee(verify=True, others=others, on_device=there)
    try:
        found = foresee(verify=False)
    except (AnybatchError, MemoryError):
        raise
    except Exception:  # a value is read: the next rung, on the host
        found = foresee(verify=True)
    return on_absent(found, case, device)


def _at(
    case: Case, signature: Signature, optimizer: torch.optim.Optimizer | None, available: int
) -> Forecast | None:
    """Return the forecast of the case with other shapes; None where the model cannot take them.

    On CUDA nothing is run: an index beyond a table ends all work on the device.
    """
    count = MICRO_BATCHES * max(FARTHER)
    rows = stretched(case.rows, signature.shapes, count)
    larger = replace(case, size=signature.size, rows=rows, global_samples=signature.global_samples)
    try:
        found = forecast(
            larger, optimizer, available=available, verify=accelerator.of(case.device).host
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # longer than its table of positions, or whatever else
        return None
    if found.how == FAKE:
        return found
    if found.inspection.coupled:  # what all outputs need was not seen
        return None
    # The dry run counted a few targets of those over which a loss counts
    # (test_a_loss_that_counts_over_all_targets_has_room_for_them_at_other_lengths).
    row = sum(bytes_of(t[:1]) for _, t in tensors(larger.rows.targets) if t.dim())
    return found.with_more("activations", row * signature.size)


def _same_ranks(saved: Signature, forecast: Forecast, signature: Signature) -> bool:
    """Say whether samples of other ranks make no difference: there are none, or they hold none."""
    if saved.global_samples == 0 or signature.global_samples == 0:
        return saved.global_samples == signature.global_samples
    return not forecast.meets_ranks


def _but_numbers(signature: Signature) -> Any:
    return signature.tensors, signature.modes, signature.lanes, signature.trains


def _power(count: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (count - 1).bit_length() if count > 0 else 0
