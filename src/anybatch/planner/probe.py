"""Seconds of a micro-batch: a candidate is run on the device, and all state is restored.

A model of time would have to include caches, allocators and kernels. So each size is run: once to
warm up (kernels are chosen, pages are mapped), then a few times, and the median counts. For a long
one a single run is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from anybatch.core import accelerator, accelerators, tree
from anybatch.core.batch import MicroBatch
from anybatch.core.memory_errors import out_of_memory
from anybatch.execution.case import Case, few
from anybatch.execution.device import link_to
from anybatch.execution.discover import discoverer
from anybatch.execution.gradients import Gradients
from anybatch.execution.parts import Parts
from anybatch.execution.step import MicroBatchOffloader, Step
from anybatch.planner.measure import read_peak
from anybatch.planner.rehearse import Inspection
from anybatch.planner.stage import make_step, put_back, unharmed

RUNS = 3
"""Timed runs of which the median counts."""

RECORDED = 2
"""Micro-batches that are recorded: one that finds no sums of gradients, and one that does.

Of a size that a batch has once it is one. The next one plans its offloading, which takes longer
than to run it, so it is not timed either."""

LONG = 0.5
"""Seconds after which a first run is taken as it is."""


def seconds(
    case: Case,
    inspection: Inspection,
    n: int,
    *,
    accumulator: bool = False,
    offload: MicroBatchOffloader | None = None,
    enough: float = LONG,
) -> float | None:
    """Time forward and backward of one micro-batch, as one of many or as the only one of its size.

    Args:
        case: the real one; its model, gradients and RNG state are restored.
        inspection: findings of the first inspection.
        n: samples in the micro-batch.
        accumulator: its gradients are added to one, a cost for each micro-batch. Default False.
        offload: where its saved tensors may go; the first of each sort are recorded, and one more
            is planned: these are not timed.
        enough: seconds after which a first run is taken as it is. Default: those of a long one.

    Returns:
        Seconds; None where it ran out of memory.
    """
    try:
        single, once_only = n >= case.size, 2 * n > case.size
        case = unharmed(few(case, n), n, writes=inspection.copies)
        with put_back(case) as before, torch.set_grad_enabled(case.trains):
            accumulator = accumulator and not single
            gradients = (
                Gradients(case.leaves, wide=not single, accumulator=accumulator)
                if case.trains
                else None
            )
            step = make_step(case, link_to(case.device), n, gradients, 1)
            step.layout, step.copies = inspection.layout, inspection.copies
            step.discover = discoverer(step, before)
            step.offloader, step.coupled = offload, inspection.coupled and not single
            (micro,) = step.feed()

            def once() -> float:
                if once_only and step.gradients is not None:
                    step.gradients.restart()  # it comes first, and finds no sums
                return _timed(step, micro)

            for _ in range(0 if offload is None else 2 if once_only else RECORDED + 1):
                once()
            return median_seconds(once, enough)
    except Exception as error:
        if not out_of_memory(error):
            raise
    return None


def median_seconds(once: Callable[[], float], enough: float = LONG) -> float:
    """Return the median seconds of a few runs, or those of the first if it is long.

    Args:
        once: runs it, and returns its seconds.
        enough: seconds after which the first are taken as they are.
    """
    first = once()
    return first if first > min(LONG, enough) else median(once() for _ in range(RUNS))


def workspace(case: Case, inspection: Inspection, n: int, held: int) -> int | None:
    """Return the bytes that CUDA's allocator adds to a micro-batch's forecast tensors.

    Args:
        case: the real one.
        inspection: findings of the first inspection.
        n: samples in the micro-batch.
        held: bytes of tensors that it holds at its peak, in addition to those allocated before.

    Returns:
        Bytes of workspace; 0 on a device without a statistic, None if memory runs out.
    """
    there = accelerator.of(case.device)
    if not there.peaks:
        return 0
    accelerators.clear_workspaces()
    before = there.allocated(case.device)
    with read_peak(case.device, anew=True) as peak:
        ran = seconds(case, inspection, n)
    if ran is None:
        return None
    # Bytes that remain are exact; those at the peak are foreseen, and may be less
    # (test_the_peak_of_a_step_is_what_was_foreseen).
    stays = max(0, there.allocated(case.device) - before)
    return stays + max(0, (peak() or 0) - before - stays - held)


def _timed(step: Step, micro: MicroBatch) -> float:
    """Run one micro-batch, and return its seconds; its gradients remain."""
    finish(step.device)
    start = perf_counter()

    def train(micro: MicroBatch) -> None:
        parts = Parts(step, micro.inputs)
        if step.coupled:  # such a loss is never called with a part of the batch
            _train_in_parts(step, parts, micro)
            return
        loss = step.loss.full_batch(step.forward(micro), micro)
        step.backward([loss], [torch.ones_like(loss)])

    step.under(train)(micro)
    finish(step.device)
    return perf_counter() - start


def _train_in_parts(step: Step, parts: Parts, micro: MicroBatch) -> None:
    """Run each part, and backward from it: where a loss of all outputs begins is another matter."""
    for at in range(len(parts)):
        roots = [t for _, t in tree.tensors(parts.forward(micro, at)) if t.requires_grad]
        step.pull(roots, [torch.ones_like(root) for root in roots])
        del roots


def finish(device: torch.device) -> None:
    """Wait for a device that computes on its own."""
    accelerator.of(device).synchronise(device)
