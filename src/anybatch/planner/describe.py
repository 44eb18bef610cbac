"""Plan of a decided step: bytes by owner at the peak, and the sizes that were not chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isinf

import torch

from anybatch.core.plan_sections import Candidate, Capacity, Memory
from anybatch.core.retry import Retry
from anybatch.execution.signature import MICRO_BATCHES, RunPlan
from anybatch.memory.ledger import Phase, StepTimeline, joined
from anybatch.memory.lockstep_budget import WAITING, least
from anybatch.planner.forecast import DIVIDED, Forecast, total
from anybatch.planner.working_set import lane_of, step_of


def describe(
    foreseen: Forecast,
    n: int,
    size: int,
    seconds: Mapping[int, float],
    *,
    budget: int,
    source: str,
    trains: bool,
    confirmed: bool,
) -> RunPlan:
    """Return how a batch is run, and why.

    Args:
        foreseen: forecast of its steps.
        n: samples in a micro-batch, as was chosen.
        size: N_B, samples in the mini-batch.
        seconds: samples in a micro-batch -> seconds of a step, where some were run.
        budget: bytes.
        source: where these come from, in words.
        trains: with backward; else forward only.
        confirmed: rehearse the size that was chosen, where that costs no memory.
    """
    owners, peak = foreseen.owners(n, size), 0
    accumulator, lanes = False, foreseen.inspection.lanes and n < size
    if trains and n < size and not lanes:
        peak = foreseen.accumulator_peak(n, size, confirmed=confirmed)
        accumulator = peak <= budget
    if not accumulator:  # else that was rehearsed, and holds a set of gradients more
        peak = foreseen.confirm(n, size) if confirmed else sum(owners.values())
    elif by_line := foreseen.accumulator_owners(n, size):
        owners = by_line
    more = peak - sum(owners.values())
    owner = "gradients" if accumulator and more > 0 else "activations"
    owners[owner] = more + owners.get(owner, 0)
    waiting: Capacity = 0
    predicted = peak
    if lanes:
        waiting = _waiting_bytes(budget - peak, owners, -(-size // n))
        shown = _shown(foreseen, n, size, budget, confirmed=confirmed)
        owners, waiting = (owners, waiting) if shown is None else shown
        predicted = min(budget, peak + foreseen.of_samples(size))
        predicted = predicted if shown is None else total(owners)
    memory = Memory(
        budget=budget,
        source=source,
        predicted=predicted,
        waiting_capacity=waiting,
        owners=tuple(sorted(((k, b) for k, b in owners.items() if b), key=lambda pair: -pair[1])),
        floor=_floor(foreseen, size, confirmed=confirmed),
        undivided=foreseen.peak(size, size),
        how=foreseen.how,
        candidates=candidates(foreseen, n, size, seconds, budget),
    )
    coupled = foreseen.inspection.coupled and not lanes
    return RunPlan(n, accumulator, memory, coupled, foreseen.inspection.loss, lanes)


def _floor(foreseen: Forecast, size: int, *, confirmed: bool) -> int | None:
    """Return the bytes of a step in micro-batches of one sample, rehearsed as in an error."""
    if foreseen.full_batch:
        return None
    exact = 0
    if confirmed:
        try:
            exact = foreseen.confirm(1, size)
        except (Retry, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # of a model that takes no such micro-batch, by any error of its own
            exact = 0
    return max(exact, foreseen.peak(1, size))  # which is on no line once it was rehearsed


def _shown(
    foreseen: Forecast, n: int, size: int, budget: int, *, confirmed: bool
) -> tuple[dict[str, int], Capacity] | None:
    """Return owner -> bytes at the peak of a step in lanes, and the budget of waiting lanes.

    None if the bytes that a lane touches are unknown.
    """
    lane = lane_of(foreseen, n, size, rehearsed=confirmed)
    if lane is None:
        return None
    step, waiting = step_of(lane, foreseen, n, size, budget)
    if least(waiting) < 0:
        return None
    return max([step.at_peak(), *foreseen.other_peaks(n, size)], key=total), waiting


SHARED = ("parameters", "buffers", "optimizer", "transfer buffers", "shards")
"""Owners of bytes that exist once for all lanes."""


def _waiting_bytes(left: int, owners: Mapping[str, int], lanes: int) -> int | None:
    """Return the bytes that waiting lanes may hold; None where all that they hold fits.

    Args:
        left: bytes of the budget above a lane at its peak.
        owners: owners and bytes at that peak.
        lanes: how many.
    """
    lane = sum(count for owner, count in owners.items() if owner not in SHARED)
    return None if left >= (lanes - 1) * lane else max(0, left)


def candidates(
    foreseen: Forecast, n: int, size: int, seconds: Mapping[int, float], budget: int
) -> tuple[Candidate, ...]:
    """Return the candidates worth a row: the sizes run, and the first that does not fit."""
    if foreseen.full_batch:
        return (Candidate(size, foreseen.peak(size, size), None),)
    doubling = [1 << k for k in range(size.bit_length()) if 1 << k < size] + [size]
    fits = [k for k in doubling if foreseen.peak(k, size) <= budget]
    too_large = [k for k in doubling if k not in fits][:1]
    return tuple(
        Candidate(k, foreseen.peak(k, size), finite(seconds.get(k)))
        for k in sorted({n, size, *too_large, *(seconds or fits)})
    )


def finite(seconds: float | None) -> float | None:
    """Return the seconds of a step; None where it was not run, or ran out of memory."""
    return None if seconds is None or isinf(seconds) else seconds


# A plan as the step it stands for: a forecast at the micro-batch that was chosen, as it passes.
#
# A plan has the peak and its owners. Why it is the peak, and how far below it the rest of a step
# is, follows from the lines of its forecast:
#
#     inspection │ mu_0  mu_1 │ update        at n: a_t + b_t * n bytes after every event
#
# The peak of it is the plan's. Bytes that the plan counts in addition to the lines have no position
# in time: those found by another dry run are drawn from beginning to end, and the bytes of waiting
# micro-batches as long as there are any.


def depict(foreseen: Forecast, planned: RunPlan, size: int) -> StepTimeline:
    """Return the step of a plan as it passes.

    Args:
        foreseen: the forecast of the plan.
        planned: the plan.
        size: N_B, samples in the mini-batch.

    Returns:
        The step, in the order of its events. Its peak is what the plan predicts, or less where
        micro-batches wait and the peak is not in theirs but in the update. Where saved tensors
        are offloaded it has the seconds that they were planned with, if it was run for that.
    """
    n, memory = min(planned.micro_batch, size), planned.memory
    shown = foreseen.micro_batches if planned.passes is None else MICRO_BATCHES
    title = _title(n, size, lanes=planned.lanes, shown=shown)
    if planned.passes is not None:
        return replace(planned.passes(), title=f"{title}, saved tensors offloaded")
    parts = foreseen.phases(n, size, accumulator=planned.accumulator)
    lane = lane_of(foreseen, n, size, rehearsed=False) if planned.lanes else None
    if lane is not None:
        found, waiting = step_of(lane, foreseen, n, size, memory.budget)
        if waiting == memory.waiting_capacity and found.peak <= memory.predicted:
            parts[DIVIDED] = found
    more = max(0, memory.predicted - joined(list(parts.values())).peak)
    if more and planned.lanes:
        parts[DIVIDED] = parts[DIVIDED].plus({WAITING: more})
    elif more:
        owner = "gradients" if planned.accumulator else "activations"
        parts = {name: part.plus({owner: more}) for name, part in parts.items()}
    phases, first = list[Phase](), 0
    for name, part in parts.items():
        phases.append(Phase(name, first))
        first += len(part.events)
    return StepTimeline(
        title=title,
        ledger=joined(list(parts.values())),
        budget=memory.budget,
        phases=tuple(phases),
    )


def _title(n: int, size: int, *, lanes: bool, shown: int) -> str:
    if n >= size:
        return f"the batch of {size} undivided"
    count = -(-size // n)
    title = f"{size} samples in {count} micro-batches of {n}"
    if lanes:
        return f"{title}, one of them and the bytes of waiting ones"
    return f"{title}, the first of them" if count > shown else title
