"""Seconds of a micro-batch: a candidate is run on the device, and everything is put back.

A model of time would have to know caches, allocators and kernels. So each size is run: once to warm
up (kernels are chosen, pages are mapped), then a few times, and the median counts. What a long one
takes is told well enough by a single run.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

from anybatch.batch import MicroBatch
from anybatch.case import Case, few
from anybatch.device import link_to
from anybatch.discover import discoverer
from anybatch.gradients import Gradients
from anybatch.memory_errors import out_of_memory
from anybatch.rehearse import Look, make_step, put_back, unharmed
from anybatch.step import Away, Step

RUNS = 3
"""Timed runs of which the median counts."""

RECORDED = 2
"""Micro-batches that are recorded: one that finds no sums of gradients, and one that does."""

LONG = 0.5
"""Seconds after which a first run is taken as it is."""


def seconds(
    case: Case, seen: Look, n: int, *, apart: bool = False, away: Away | None = None
) -> float | None:
    """Time forward and backward of one micro-batch, as one of many or as the whole batch.

    Args:
        case: the real one; its model, gradients and dice are put back.
        seen: what the first look found out.
        n: samples in the micro-batch.
        apart: its gradients are added to an accumulator, which small micro-batches pay for more
            often. Default False.
        away: where its saved tensors may go; the first of each kind are recorded, and not timed.

    Returns:
        Seconds; None where it ran out of memory.
    """
    try:
        alone = n >= case.size
        case = unharmed(few(case, n), n, seen)
        with put_back(case) as before, torch.set_grad_enabled(case.trains):
            apart = apart and not alone
            gradients = Gradients(case.leaves, wide=not alone, apart=apart) if case.trains else None
            step = make_step(case, link_to(case.device), n, gradients, 1)
            step.layout, step.copies = seen.layout, seen.copies
            step.discover = discoverer(step, before)
            step.away = away
            (micro,) = step.feed()
            for _ in range(0 if away is None else RECORDED):
                _timed(step, micro)
            first = _timed(step, micro)
            if first > LONG:
                return first
            times = []
            for _ in range(RUNS):
                for leaf in case.leaves if alone else ():
                    leaf.grad = None  # nothing is beside a batch that is not divided
                times.append(_timed(step, micro))
            return median(times)
    except Exception as error:
        if not out_of_memory(error):
            raise
    return None


def workspace(case: Case, seen: Look, n: int, grown: int) -> int:
    """Return what CUDA's allocator takes in a micro-batch beyond the tensors that are known.

    Args:
        case: the real one.
        seen: what the first look found out.
        n: samples in the micro-batch.
        grown: bytes of tensors that it allocates at its peak.

    Returns:
        Bytes of workspace and of rounding up; 0 on a device that does not tell.
    """
    if case.device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(case.device)
    torch.cuda.reset_peak_memory_stats(case.device)
    seconds(case, seen, n)
    return max(0, torch.cuda.max_memory_allocated(case.device) - before - grown)


def _timed(step: Step, micro: MicroBatch) -> float:
    """Run one micro-batch, and return its seconds; its gradients stay."""
    _finish(step)
    start = perf_counter()

    def train(micro: MicroBatch) -> None:
        loss = step.loss.whole(step.forward(micro), micro)
        step.backward([loss], [torch.ones_like(loss)])

    step.under(train)(micro)
    _finish(step)
    return perf_counter() - start


def _finish(step: Step) -> None:
    """Wait for a device that computes on its own."""
    parameter = next(step.model.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        torch.cuda.synchronize(parameter.device)
