"""Micro-batches in sequence, each with saved tensors offloaded as far as its budget requires.

`anybatch.offload` has one step and a budget for all bytes. Here the ledger has counted the other
bytes, so a micro-batch has a limit for its own; and there are several signatures of them: the first
finds no sums of gradients, the last may be smaller.

    mu_0  recorded      mu_1  recorded      mu_2, mu_3 ...  planned      mu_k smaller: recorded
    next step: all of them planned

One that differs from the recording offloads everything, which is right for any, and the next of its
signature is recorded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from anybatch.memory.stores import Store
from anybatch.offload.execute import StepHooks
from anybatch.offload.hooked import Hooked
from anybatch.offload.mover import Mover
from anybatch.offload.recording import Recording
from anybatch.offload.schedule_cache import Recorded, ScheduleCache, link_of
from anybatch.offload.watch import StepRecorder


class Keeping:
    """Runs micro-batches within their limits.

    Args:
        make: returns a store.
        device: whose tensors are offloaded.

    Attributes:
        capacity: bytes that the first micro-batch of a step may make, and any other.
        moved: bytes that were copied out and back since `begin`.
        remade: bytes that were dropped, and recomputed from other saved tensors.
        waited: seconds in which a micro-batch waited for copies.
        recorded: micro-batches that were recorded.
    """

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        self._device, self._mover = device, Mover(make, device)
        self._caches: dict[tuple[bool, int], ScheduleCache] = {}
        self.begin((0, 0))

    def begin(self, capacity: tuple[int, int]) -> None:
        """Begin a step, and count from nothing."""
        self.capacity, self.waited = capacity, 0.0
        self.moved = self.remade = self.recorded = 0

    def close(self) -> None:
        """Release the file or the host memory that is reused from step to step."""
        self._mover.close()

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of `size` samples.

        Raises:
            StoreError: there is no space in the store, or a write or a read has failed.
        """
        cache = self._caches.setdefault((first, size), ScheduleCache())
        limit = self.capacity[0 if first else 1]
        watch = StepRecorder(self._device, limit, None) if cache.to_record else None
        found = {} if watch else {cut: one.course(limit) for cut, one in cache.recorded.items()}
        courses = {cut: course for cut, course in found.items() if course is not None}
        mover = self._mover
        mover.begin()
        step = StepHooks(mover, self._device, watch, courses)
        with Hooked(step, mover, watch):
            mover.ready()
            work()
        self.moved += mover.out + mover.back
        self.remade += step.remade
        self.waited += mover.waited
        if watch is not None:
            self.recorded += 1
            cache.learn(Recorded(without_outside(watch), link_of(mover)))
        elif step.missed and courses:
            cache.missed()


def without_outside(watch: StepRecorder) -> Recording:
    """Return the recording of a micro-batch without the bytes that were resident before it."""
    recording = watch.recording()
    return replace(recording, outside=0, peak=recording.peak - recording.outside)
