"""Micro-batches one after another, each with its saved tensors away as far as its room asks for it.

`anybatch.offload` knows one step and a budget for all that is there. Here the ledger has counted
what is there beside a micro-batch, so a micro-batch has room for what it makes itself; and there
are several kinds of them: the first finds no sums of gradients, the last may be smaller.

    mu_0  recorded      mu_1  recorded      mu_2, mu_3 ...  planned      mu_k smaller: recorded
    next step: all of them planned

One that does not do what was recorded sends everything away, which is right for any, and the next
of its kind is recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.errors import BudgetError
from anybatch.look import eager
from anybatch.outofcore.course import Course, set_course
from anybatch.outofcore.execute import Step
from anybatch.outofcore.mover import Mover
from anybatch.outofcore.recording import Cut, Recording
from anybatch.outofcore.simulate import Link
from anybatch.outofcore.watch import Watch
from anybatch.stores import Store
from anybatch.undo import uninterrupted

FAST = 1e12
"""Bytes a second of a link that nothing has gone over."""

MOST = 8
"""Micro-batches of a kind that are recorded in a row, at most, while shapes change."""

KNOWN = 16
"""Recorded micro-batches of a kind that are known at a time."""


@dataclass
class _Kind:
    """What is known of micro-batches of one size, the first ones or the others."""

    found: dict[Cut, _Known]
    to_record: int = 1
    misses: int = 0


class Keeping:
    """Runs micro-batches within their rooms.

    Args:
        make: returns a store.
        device: whose tensors leave.

    Attributes:
        rooms: bytes that the first micro-batch of a step may make, and any other.
        moved: bytes that were copied out and back since `begin`.
        waited: seconds in which a micro-batch waited for copies.
        recorded: micro-batches that were recorded.
    """

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        self._device, self._mover = device, Mover(make, device)
        self._kinds: dict[tuple[bool, int], _Kind] = {}
        self.begin((0, 0))

    def begin(self, rooms: tuple[int, int]) -> None:
        """Begin a step, and count from nothing."""
        self.rooms, self.moved, self.waited, self.recorded = rooms, 0, 0.0, 0

    def close(self) -> None:
        """Give up the file or the host memory that is kept from step to step."""
        self._mover.close()

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of `size` samples.

        Raises:
            StoreError: there is no room where tensors go, or a write or a read has failed.
        """
        kind = self._kinds.setdefault((first, size), _Kind({}))
        watch = Watch(self._device) if kind.to_record else None
        room = self.rooms[0 if first else 1]
        courses = {} if watch else {cut: one.course(room) for cut, one in kind.found.items()}
        mover = self._mover
        mover.begin()
        step = Step(mover, self._device, watch, {c: one for c, one in courses.items() if one})
        with within(step, mover, watch):
            work()
        self.moved += mover.out + mover.back
        self.waited += mover.waited
        if watch is not None:
            self._learn(kind, watch)
        elif step.missed:
            kind.misses += 1
            kind.to_record = min(kind.misses, MOST) if any(courses.values()) else 0

    def _learn(self, kind: _Kind, watch: Watch) -> None:
        self.recorded += 1
        kind.to_record -= 1
        recording = alone(watch)
        if recording.cuts:
            if len(kind.found) == KNOWN:
                del kind.found[next(iter(kind.found))]
            kind.found[recording.cuts[0]] = _Known(recording, link_of(self._mover))


class _Known:
    """A recorded micro-batch, and the courses that were set for it."""

    def __init__(self, recording: Recording, link: Link) -> None:
        self._recording, self._link = recording, link
        self._courses: dict[int, Course | None] = {}

    def course(self, room: int) -> Course | None:
        """Return its course; None where not even with everything away there is room."""
        if room not in self._courses:
            try:
                self._courses[room] = set_course(self._recording, room, self._link)
            except BudgetError:
                self._courses[room] = None
        return self._courses[room]


@contextmanager
def within(step: Step, mover: Mover, watch: Watch | None) -> Iterator[None]:
    """Run the body under the hooks of a step; afterwards hooks and threads are gone.

    Args:
        step: what the hooks do.
        mover: moves storages; after a failure what it has kept is lost.
        watch: records the body; None where it is not recorded.
    """
    entered: list[Any] = []
    failed = True
    try:
        with uninterrupted():
            hooks = torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack)
            for mode in (hooks, *(() if watch is None else (eager(), watch))):
                mode.__enter__()
                entered.append(mode)
        yield
        failed = False
    finally:
        try:
            with uninterrupted(once=True):
                _leave(entered)
                _end(step, mover, failed=failed)
        except BaseException:
            _leave(entered)
            step.fail()
            mover.close()
            raise


def _leave(entered: list[Any]) -> None:
    while entered:
        entered.pop().__exit__(None, None, None)


def _end(step: Step, mover: Mover, *, failed: bool) -> None:
    if failed:
        step.fail()
        mover.close()
    else:
        mover.rest()
        step.end()


def alone(watch: Watch) -> Recording:
    """Return what was recorded, without what was there before."""
    recording = watch.recording()
    return replace(recording, outside=0, peak=recording.peak - recording.outside)


def link_of(mover: Mover) -> Link:
    """Return how fast storages have gone so far."""
    rates = [size / spent if spent else FAST for size, spent in mover.rates]
    return Link(out=rates[0], back=rates[1])
