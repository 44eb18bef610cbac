"""Forecast of a full batch only, without one of its micro-batches.

A batch that fits undivided runs so, and no smaller size has to be foreseen. On a host it is run
once on fakes, and stopped at the budget. Where fakes cannot run it, a real step of one row tells
about how much all of them hold, or one of four. Its first step is stopped at the budget too, so a
forecast that was too low costs a part of a step.

    fits by a tenth ──> undivided, with no other forecast      else: `anybatch.planner.ladder`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from anybatch.core import accelerator
from anybatch.core.optimizers import allocated, rounded, rounding
from anybatch.execution.signature import Case, as_fakes, few
from anybatch.memory.ledger import AffineTimeline, Timeline
from anybatch.planner import rehearsal
from anybatch.planner.forecast import Forecast
from anybatch.planner.rehearsal import Inspection, unharmed

MARGIN = 1.1
"""Factor of a line through measured peaks: their events may move."""

FIXED = ("parameters", "buffers", "gradients", "rounding")
"""Owners whose bytes do not depend on the samples."""

PEAKS = "a line through measured peaks, and a tenth"
UNDIVIDED = "a dry run of the full batch, since the model takes no fewer samples"
FULL_BATCH = "a dry run of the full batch, which fits"

GUESSED = 1, 4
"""Rows of the real steps by which all rows are guessed, if fakes cannot run."""

Suffices = Callable[[Forecast], bool]
"""Says whether the forecast of the full batch alone is enough."""

State = tuple[Timeline | None, dict[str, int]]
"""The update of an optimizer, and bytes in addition to a step: its state, a piece that is sent."""


def undivided(case: Case, state: State) -> Forecast | None:
    """Return the forecast of a batch that cannot be divided, from fakes of it; None without.

    A micro-batch of any size holds the bytes of the full batch: that fits undivided, or not at all.
    """
    if case.lazy or case.global_samples:
        return None
    try:
        peak = peak_line([_on_fakes(case)], (case.size,))
    except Exception:  # the step raises what there is to say
        return None
    found = _constant(case, state, UNDIVIDED, peak.at(case.size))
    return replace(found, indivisible=True, full_batch=False)


def may_suffice(case: Case) -> bool:
    """Say whether a step may be foreseen by its full batch only: on a host, in one process."""
    grows = case.lazy or case.draws or case.global_samples or case.paged or case.sharded
    return not grows and accelerator.of(case.device).host


def of_full_batch(case: Case, state: State, available: int, suffices: Suffices) -> Forecast | None:
    """Return the forecast of fakes of an undivided step that fits by a tenth, if that suffices.

    Nothing is known of smaller micro-batches then.

    Raises:
        Exception: whatever fakes cannot do.
    """
    most = int((available - sum(state[1].values()) - buffer_bytes(case)) / MARGIN)
    try:
        step = _on_fakes(case, limit=most)
    except torch.OutOfMemoryError:
        return None
    found = _constant(case, state, FULL_BATCH, step)
    return found if suffices(found) else None


def guess(case: Case, state: State, available: int, suffices: Suffices) -> Forecast | None:
    """Return a guess of an undivided step, from a real one of few rows, if that suffices.

    One row, and a few more where these fit and one has shown up to twice the bytes there are.
    """
    for n in GUESSED:
        try:
            step = rehearsal.full_batch(unharmed(few(case, n), n, writes=True), n)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # the model takes no so few, or the step raises what there is to say
            return None
        line = peak_line([step], (n,))
        found = _constant(case, state, PEAKS, line.at(case.size))
        if suffices(found):
            return found
        held = found.peak(case.size, case.size) - line.at(case.size).peak
        if line.at(case.size).peak > 2 * available or held + line.at(max(GUESSED)).peak > available:
            return None
    return None


def _on_fakes(case: Case, limit: int | None = None) -> Timeline:
    return rehearsal.full_batch(replace(as_fakes(case), size=case.size), case.size, limit=limit)


def _constant(case: Case, state: State, how: str, step: Timeline) -> Forecast:
    """Return the forecast of an undivided step, which bounds a smaller one."""
    line = AffineTimeline(step.owners, step.events, step.live, 0 * step.live)
    return Forecast(
        how=how,
        looked=line,
        divided=line,
        undivided=line,
        accumulated=None,
        update=state[0],
        constant=state[1],
        copied=buffer_bytes(case),
        gradients=gradient_bytes(case) if case.trains else 0,
        inspection=Inspection((), copies=False),
        case=None,
        full_batch=True,
        grain=rounding(case.device),
    )


def buffer_bytes(case: Case) -> int:
    """Return the bytes of the buffers, which a step copies."""
    buffers = {id(b): b for _, m in case.modules for b in m._buffers.values() if b is not None}
    return sum(rounded(b.untyped_storage().nbytes(), b.device) for b in buffers.values())


def gradient_bytes(case: Case) -> int:
    """Return the bytes of a set of gradients, without those that are paged."""
    return sum(allocated(p) for p in case.leaves if id(p) not in case.paged)


def peak_line(found: list[Timeline], sizes: tuple[int, ...]) -> AffineTimeline:
    """Return the line through the peaks of steps, and a tenth."""
    every = [(line.peak, line.at_peak(), n) for line, n in zip(found, sizes, strict=True)]
    fixed = max(sum(held.get(owner, 0) for owner in FIXED) for _, held, _ in every)
    slope = max(math.ceil(MARGIN * max(0, peak - fixed) / n) for peak, _, n in every)
    return AffineTimeline(("all",), ("peak",), np.array([[fixed]]), np.array([[slope]]))
