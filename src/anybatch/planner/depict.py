"""A plan as the step it stands for: a forecast at the micro-batch that was chosen, as it passes.

A plan has the peak and its owners. Why it is the peak, and how far below it the rest of a step is,
follows from the lines of its forecast:

    inspection │ mu_0  mu_1  mu_2 │ update        at n: a_t + b_t * n bytes after every event

The peak of it is the plan's. Bytes that the plan counts in addition to the lines have no position
in time: those found by another dry run are drawn from beginning to end, and the bytes of waiting
micro-batches as long as there are any.
"""

from __future__ import annotations

from dataclasses import replace

from anybatch.execution.case import MICRO_BATCHES
from anybatch.execution.signature import RunPlan
from anybatch.memory.lockstep_budget import WAITING
from anybatch.memory.step_timeline import Phase, StepTimeline
from anybatch.memory.timeline import joined
from anybatch.planner.forecast import DIVIDED, Forecast
from anybatch.planner.touching import lane_of, step_of


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
    title = _title(n, size, lanes=planned.lanes)
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


def _title(n: int, size: int, *, lanes: bool) -> str:
    if n >= size:
        return f"the batch of {size} undivided"
    count = -(-size // n)
    title = f"{size} samples in {count} micro-batches of {n}"
    if lanes:
        return f"{title}, one of them and the bytes of waiting ones"
    return f"{title}, the first {MICRO_BATCHES}" if count > MICRO_BATCHES else title
