"""Forecast of a full batch only, without one of its micro-batches.

A batch that fits undivided runs so, and needs no forecast of smaller sizes. On a host it is run
once on fakes; where fakes cannot run it, a real step of one row, or of four, gives an estimate. The
first step is stopped at the budget, so an estimate that was too low costs a part of a step.

    fits by a tenth ──> undivided, with no other forecast      else: `anybatch.planner.ladder`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from anybatch.core import accelerator
from anybatch.core.modules import tensors_of
from anybatch.core.optimizers import allocated, resident_state_bytes, rounded, rounding, state_bytes
from anybatch.core.pytree import tensors
from anybatch.distributed.buckets import copied_bytes
from anybatch.execution.signature import Case, Claiming, as_fakes, bytes_of, few
from anybatch.memory.fakes import OWNER
from anybatch.memory.ledger import AffineTimeline, Timeline
from anybatch.memory.meter import storages
from anybatch.planner import probe, rehearsal
from anybatch.planner.forecast import SHARDS, Forecast
from anybatch.planner.rehearsal import Inspection, unharmed

MARGIN = 1.1
"""Factor of what samples were measured to hold: events may move."""

FIXED = ("parameters", "buffers", "gradients", "rounding")
"""Owners whose bytes do not depend on the samples."""

PEAKS = "measured steps of few samples, in proportion, and a tenth"
UNDIVIDED = "a dry run of the full batch, since the model takes no fewer samples"
FULL_BATCH = "a dry run of the full batch, which fits"

GUESSED = 1, 4
"""Rows of the real steps by which all rows are guessed, if fakes cannot run."""

UNKNOWN_STATE = 2
"""Copies of its parameters that an unknown optimizer is assumed to hold, as Adam does."""

COLLECTIVES = 16384
"""Bytes of the numbers that ranks exchange."""

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
        peak = bound_of([of_all(as_fakes(case), case.size)], (case.size,))
    except Exception:  # the step raises what there is to say
        return None
    found = _constant(case, state, UNDIVIDED, peak.at(case.size), as_fakes(case))
    return replace(found, indivisible=True, full_batch=False)


def of_one_host(case: Case) -> bool:
    """Say whether the full batch only, or few real rows, may tell of a step: in one process."""
    grows = case.lazy or case.draws or case.global_samples or case.paged or case.sharded
    return not grows and accelerator.of(case.device).host


def of_full_batch(
    case: Case, state: State, available: int, suffices: Suffices, step: Timeline
) -> Forecast | None:
    """Return the forecast of an undivided `step` on fakes that fits by a tenth, if that suffices.

    Nothing is known of smaller micro-batches then.
    """
    most = int((available - sum(state[1].values()) - buffer_bytes(case)) / MARGIN)
    if step.peak > most:
        return None
    found = _constant(case, state, FULL_BATCH, step, as_fakes(case))
    return found if suffices(found) else None


def guess(case: Case, state: State, available: int, suffices: Suffices) -> Forecast | None:
    """Return a guess of an undivided step, from a real one of few rows, if that suffices.

    One row, and a few more where these fit and one has shown up to twice the bytes there are.
    """
    for n in GUESSED:
        try:
            step, entries = rehearsal.full_batch(unharmed(few(case, n), n, writes=True), n)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # the model takes no so few, or the step raises what there is to say
            return None
        line = bound_of([step], (n,), entries)
        found = _constant(case, state, PEAKS, line.at(case.size), few(case, n), n)
        if suffices(found):
            return found
        held = found.peak(case.size, case.size) - line.at(case.size).peak
        if line.at(case.size).peak > 2 * available or held + line.at(max(GUESSED)).peak > available:
            return None
    return None


def of_all(fakes: Case, size: int) -> Timeline:
    """Return the timeline of an undivided step of `size` samples on fakes."""
    return rehearsal.full_batch(replace(fakes, size=size), size)[0]


def _constant(
    case: Case, state: State, how: str, step: Timeline, runs: Case, n: int = 0
) -> Forecast:
    """Return the forecast of an undivided step, which bounds a smaller one.

    `runs` is a case that shows the bytes of outputs by `n` samples, where the engine stores them; 0
    is all.
    """
    line = AffineTimeline(step.owners, step.events, step.live, 0 * step.live)
    return Forecast(
        how=how,
        looked=line,
        divided=line,
        undivided=line,
        update=state[0],
        constant=state[1],
        copied=buffer_bytes(case),
        gradients=gradient_bytes(case),
        inspection=Inspection((), copies=False),
        case=None,
        full_batch=True,
        shown=_outputs(runs, n or case.size) if case.outputs else 0,
        grain=rounding(case.device),
    )


def _outputs(case: Case, n: int) -> int:
    """Return the bytes of the outputs of a sample, of a forward of `n`."""
    case = replace(case, size=n)
    with rehearsal.metered(case, undivided=True) as (meter, _), torch.no_grad():
        step = rehearsal.make_step(case, Claiming(case.device, meter), n, None, 1)
        (micro,) = step.feed()
        return -(-sum(bytes_of(t) for _, t in tensors(step.forward(micro))) // n)


def state_of(case: Case, optimizer: torch.optim.Optimizer | None) -> State:
    """Return the update of an optimizer, and owner -> bytes that a step has in addition."""
    update, held = _of_optimizer(case, optimizer)
    if case.global_samples:
        sent = rounded(copied_bytes(case.leaves), case.device) if case.trains else 0
        held["transfer buffers"] = sent + COLLECTIVES
    paged = {OWNER: case.page_bytes} if case.page_bytes else {}
    if case.sharded is not None:
        count = case.sharded.bytes + case.trains * case.sharded.bytes_of_gradients
        held |= {SHARDS: count} if count else {}
    return update, held | paged


def _of_optimizer(case: Case, optimizer: torch.optim.Optimizer | None) -> State:
    if optimizer is None:
        return None, {}
    update = probe.update(optimizer, [module for _, module in case.modules], case.sharded)
    there = state_bytes(optimizer)
    coming = update.final().get("optimizer", 0) if update is not None else 0
    if update is None and not there:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        coming = UNKNOWN_STATE * sum(map(allocated, stepped))
        coming = min(coming, resident_state_bytes(optimizer) or coming)
    count = max(there, coming)
    return update if case.trains else None, {"optimizer": count} if count else {}


def buffer_bytes(case: Case) -> int:
    """Return the bytes of the buffers, which a step copies."""
    buffers = {id(b): b for b in tensors_of((m for _, m in case.modules), "_buffers")}.values()
    return sum(rounded(part.nbytes(), b.device) for b in buffers for part in storages(b))


def gradient_bytes(case: Case) -> int:
    """Return the bytes of a set of gradients, if any, without those that are paged."""
    # Frozen parameters have none (test_a_plan_for_adapters_holds_and_a_run_with_them_goes_on).
    leaves = case.leaves if case.trains else ()
    return sum(allocated(p) for p in leaves if p.requires_grad and id(p) not in case.paged)


def bound_of(steps: list[Timeline], sizes: tuple[int, ...], growing: int = 0) -> AffineTimeline:
    """Return a bound of larger steps: at each event samples hold in proportion, and a tenth more.

    Where few samples hold most is not where many do: gradients weigh less there
    (test_a_guess_of_one_row_counts_each_event). A sample adds `growing` bytes to sparse gradients.
    """
    base, slope = [], []
    for step, n in zip(steps, sizes, strict=True):
        held = {owner: step.live[:, i] for i, owner in enumerate(step.owners)}
        fixed = sum(
            (held[owner] for owner in FIXED if owner in held), np.zeros_like(step.live[:, 0])
        )
        if "gradients" in held:
            fixed -= np.minimum(held["gradients"], growing * n)
        base.append(fixed)
        slope.append(np.ceil(MARGIN * (step.live.sum(1) - fixed) / n).astype(np.int64))
    events = tuple(event for step in steps for event in step.events)
    column = np.concatenate(base)[:, None]
    return AffineTimeline(("all",), events, column, np.concatenate(slope)[:, None])
