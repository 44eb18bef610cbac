"""What has been foreseen, and what it says of other batches: smaller ones are bounded by larger.

A person's lengths and image sizes change from batch to batch, and a rehearsal for each would cost
seconds. A kind of batch whose rows are all at least as large holds no less, so its forecast will
do; and what is rehearsed anew is rounded up, so that it bounds the next ones too.

    lengths 300, 410, 120, 500, 31 ...      rehearsed: 300, 512, 32
"""

from __future__ import annotations

from dataclasses import replace

import torch

from anybatch.budget import on_cuda
from anybatch.case import Case
from anybatch.forecast import Forecast
from anybatch.kinds import Kind
from anybatch.ladder import FAKE, forecast

LOOSE = 4
"""How many times as many elements a known case may have to bound another one."""


class Foreseen:
    """The forecasts made so far, by the kind of batch.

    Attributes:
        rehearsed: how many were made.
    """

    def __init__(self) -> None:
        self.rehearsed = 0
        self._known: list[tuple[Kind, Forecast]] = []

    def knows(self, kind: Kind) -> bool:
        """Say whether just this kind has been foreseen."""
        return any(replace(known, before=kind.before) == kind for known, _ in self._known)

    def hold_more(self, count: int) -> None:
        """Add `count` bytes to every forecast: a step has held more than was foreseen."""
        self._known = [(known, f.with_more("activations", count)) for known, f in self._known]

    def bound(self, kind: Kind) -> Forecast | None:
        """Return what is known of a kind that holds no less, and not many times as much."""
        above = [
            (known.elements, forecast)
            for known, forecast in self._known
            if known.bounds(kind) and known.size >= kind.size
        ]
        if not above:
            return None
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
        """Return the forecast of a kind, or of one that bounds it and others, and remember it."""
        self.rehearsed += 1
        bound = self._rounded(kind) if rounded else kind
        if bound != kind:
            found = _at(case, bound, optimizer, room)
            if found is not None:
                self._known.append((bound, found))
                return found
        found = forecast(case, optimizer, room=room, verify=True)
        if case.device.type == "cuda":
            found = on_cuda(found, case, optimizer)
        self._known.append((kind, found))
        return found

    def _rounded(self, kind: Kind) -> Kind:
        """Return the kind with what has changed before rounded up, so that it bounds others."""
        alike = [pair for pair in self._known if pair[0].names[0] == kind.names[0]]
        if not alike or alike[0][1].how != FAKE:
            return kind
        first = alike[0][0]
        shapes = tuple(
            tuple(a if a == b else _power(b) for a, b in zip(before, now, strict=True))
            for before, now in zip(first.shapes, kind.shapes, strict=True)
        )
        size = kind.size if kind.size <= first.size else _power(kind.size)
        return replace(kind, shapes=shapes, size=size)


def _at(
    case: Case, kind: Kind, optimizer: torch.optim.Optimizer | None, room: int
) -> Forecast | None:
    """Return the forecast of the case with other shapes; None where the model cannot take them."""
    paths = [str(name[0]) for name in kind.names[0]]
    shapes: dict[str, tuple[int, ...]] = dict(zip(paths, kind.shapes, strict=True))
    larger = replace(case, size=kind.size)

    def reshape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shapes.get(path, shape)

    try:
        return forecast(larger, optimizer, room=room, reshape=reshape, verify=False)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # longer than its table of positions, or whatever else
        return None


def _power(count: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (count - 1).bit_length() if count > 0 else 0
