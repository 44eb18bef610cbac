"""The bytes that a real step holds at its peak, as the device or the meter counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from anybatch.core import accelerator
from anybatch.core.modules import Modules, eager, tensors_of
from anybatch.core.undo import Before
from anybatch.memory.meter import FOREIGN, Meter
from anybatch.memory.paged import paged, uncounted
from anybatch.planner.updates import state_tensors


@contextmanager
def read_peak(device: torch.device, *, anew: bool = False) -> Iterator[Callable[[], int | None]]:
    """Read the most bytes that a device's allocator has handed out in the body.

    Its statistic is the user's, too, and cannot be restored after a reset. It shows this peak if it
    grows in the body, or if it was no more than the allocated bytes at the beginning.

    Args:
        device: without such a statistic, the peak is unknown.
        anew: reset the statistic if it would not show the peak. Default False.

    Yields:
        A function that returns the bytes; None if unknown.
    """
    counts = accelerator.of(device)
    if not counts.peaks:
        yield lambda: None
        return
    before = counts.peak(device)
    recorded = before == counts.allocated(device)
    if anew and not recorded:
        counts.reset_peak(device)
        recorded = True

    def peak() -> int | None:
        found = counts.peak(device)
        return found if recorded or found > before else None

    yield peak


@contextmanager
def live_peak(
    device: torch.device, existing: Mapping[str, Iterable[Tensor]]
) -> Iterator[Callable[[], int]]:
    """Count the most bytes of tensors that are live on a device in the body.

    Args:
        device: its allocator counts where it reports a peak; elsewhere every kernel is intercepted.
        existing: owner -> tensors that are live before and count.

    Yields:
        A function that returns the bytes so far; it may be called after the body.
    """
    if accelerator.of(device).peaks:
        with read_peak(device, anew=True) as peak:
            yield lambda: peak() or 0
        return
    with Meter(device, existing) as meter:
        yield lambda: int(meter.peak)


@contextmanager
def measured(
    device: torch.device,
    modules: Modules,
    optimizer: torch.optim.Optimizer | None,
    before: Before,
    shards: list[Tensor],
) -> Iterator[Callable[[], int]]:
    """Count the peak bytes of the body, with the tensors that were live before it.

    Args:
        device: its allocator's peak, if it records one; else the body runs under the meter.
        modules: their tensors are there.
        optimizer: and its state.
        before: and the gradients that were there.
        shards: with remains of gathered parameters.

    Yields:
        A function that returns the bytes after the body.
    """
    if accelerator.of(device).peaks:
        with live_peak(device, {}) as peak:
            yield peak
        return
    every = [module for _, module in modules]
    pages = paged()
    there = [*tensors_of(every, "_parameters"), *shards]
    gradients = [gradient for _, gradient in before.gradients if gradient is not None]
    owned = {
        FOREIGN: [t for t in (*there, *gradients) if pages.holds(t)],
        "parameters": there,
        "buffers": [
            *tensors_of(every, "_buffers"),
            *(b.values for b in before.buffers if b.values is not None),
        ],
        "optimizer": [] if optimizer is None else state_tensors(optimizer),
        "gradients": gradients,
    }
    leaves = [leaf for leaf, _ in before.gradients]
    with (
        eager(),
        Meter(device, owned) as meter,
        uncounted(meter, leaves, pages.ids(leaves)),
    ):
        yield lambda: int(meter.peak) + pages.most
