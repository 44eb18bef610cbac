"""Micro-batches in sequence, each with saved tensors offloaded as far as its budget requires.

`anybatch.offload` knows one step and a budget for all that is there. Here the ledger has counted
what is there beside a micro-batch, so a micro-batch has room for what it makes itself; and there
are several kinds of them: the first finds no sums of gradients, the last may be smaller.

    mu_0  recorded      mu_1  recorded      mu_2, mu_3 ...  planned      mu_k smaller: recorded
    next step: all of them planned

One that does not do what was recorded sends everything away, which is right for any, and the next
of its kind is recorded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from anybatch.memory.stores import Store
from anybatch.offload.execute import Step
from anybatch.offload.hooked import Hooked
from anybatch.offload.known import Known, Recorded, link_of
from anybatch.offload.mover import Mover
from anybatch.offload.recording import Recording
from anybatch.offload.watch import Watch


class Keeping:
    """Runs micro-batches within their rooms.

    Args:
        make: returns a store.
        device: whose tensors leave.

    Attributes:
        rooms: bytes that the first micro-batch of a step may make, and any other.
        moved: bytes that were copied out and back since `begin`.
        remade: bytes that were dropped, and computed again from what was saved beside them.
        waited: seconds in which a micro-batch waited for copies.
        recorded: micro-batches that were recorded.
    """

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        self._device, self._mover = device, Mover(make, device)
        self._kinds: dict[tuple[bool, int], Known] = {}
        self.begin((0, 0))

    def begin(self, rooms: tuple[int, int]) -> None:
        """Begin a step, and count from nothing."""
        self.rooms, self.waited = rooms, 0.0
        self.moved = self.remade = self.recorded = 0

    def close(self) -> None:
        """Release the file or the host memory that is reused from step to step."""
        self._mover.close()

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of `size` samples.

        Raises:
            StoreError: there is no room where tensors go, or a write or a read has failed.
        """
        known = self._kinds.setdefault((first, size), Known())
        room = self.rooms[0 if first else 1]
        watch = Watch(self._device, room, None) if known.to_record else None
        found = {} if watch else {cut: one.course(room) for cut, one in known.recorded.items()}
        courses = {cut: course for cut, course in found.items() if course is not None}
        mover = self._mover
        mover.begin()
        step = Step(mover, self._device, watch, courses)
        with Hooked(step, mover, watch):
            mover.ready()
            work()
        self.moved += mover.out + mover.back
        self.remade += step.remade
        self.waited += mover.waited
        if watch is not None:
            self.recorded += 1
            known.learn(Recorded(alone(watch), link_of(mover)))
        elif step.missed and courses:
            known.missed()


def alone(watch: Watch) -> Recording:
    """Return the recording of a micro-batch without the bytes that were resident before it."""
    recording = watch.recording()
    return replace(recording, outside=0, peak=recording.peak - recording.outside)
