"""Seconds of a step: it is run completely, and all state is restored.

A micro-batch that waits for others has no seconds of its own: its costs are the waits, and the
offloading meanwhile. And with streaming, a step also works between micro-batches. So a full step is
timed, but not the first one: only that one inspects the batch, starts threads and creates files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from statistics import median
from time import perf_counter

import torch

from anybatch.core.batch import Batch
from anybatch.core.memory import Capacity
from anybatch.core.memory_errors import out_of_memory
from anybatch.core.modules import Modules
from anybatch.core.plan import OffloadPlan
from anybatch.engine.inputs import StepInputs
from anybatch.engine.runner import Runner
from anybatch.execution.buffers import put_back_moved
from anybatch.execution.gradients import Gradients
from anybatch.lockstep.lanes import NoThreadError
from anybatch.planner.probe import RECORDED, RUNS, finish
from anybatch.planner.stage import put_back

LONG = 0.5
"""Seconds of a step that is timed once, after the first."""

FOR_EVER = 5.0
"""Seconds of a warm-up step above which its time counts: its start-up is a small part."""


def seconds_of_step(
    inputs: StepInputs,
    batch: Batch,
    modules: Modules,
    n: int,
    lane_bytes: Capacity,
    offload: OffloadPlan | None,
) -> float | None:
    """Time a step, in lanes where it goes in lanes.

    Args:
        inputs: model, loss and optimizer; gradients, buffers and RNG state are restored.
        batch: the mini-batch.
        modules: every module that it runs.
        n: samples in a micro-batch.
        lane_bytes: bytes that waiting lanes may hold on the device; None offloads none of them.
        offload: offloading of the running lane or micro-batch; None limits nothing.

    Returns:
        Seconds, infinitely many where it ran out of memory or threads; None for a batch that is
        loaded on the way, which can be run once only.
    """
    case = inputs.case(batch, modules, trains=True)
    if case.lazy:
        return None
    runner = Runner(inputs)  # of its own: what it finds out is not yet the engine's
    try:
        with put_back(replace(case, lanes=False)) as before, torch.enable_grad():

            def once() -> float:
                put_back_moved(before.buffers)
                before.rng.put_back()
                for leaf in case.leaves:
                    leaf.grad = None
                gradients = Gradients(case.leaves, wide=False)
                step = runner.step(
                    batch, modules, before, gradients, n, lane_bytes=lane_bytes, offload=offload
                )
                step.budgeted = True
                finish(case.device)
                start = perf_counter()
                runner.run(step, modules, before)
                finish(case.device)
                return inf if step.retries else perf_counter() - start

            return _warm(once, 1 if offload is None else RECORDED)
    except Exception as error:
        if not isinstance(error, NoThreadError) and not out_of_memory(error):
            raise
    finally:
        runner.close()
    return inf


def _warm(once: Callable[[], float], steps: int) -> float:
    """Return the seconds of a step after the first ones: the median of a few, or one if it is long.

    Args:
        once: runs a step, and returns its seconds.
        steps: that only get ready.
    """
    for _ in range(steps):
        first = once()
        if first > FOR_EVER:  # out of memory, too
            return first
    return once() if first > LONG else median(once() for _ in range(RUNS))
