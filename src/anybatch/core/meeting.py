"""Where samples meet: a value that depends on all of a batch, while only a part of it is here.

BatchNorm, a coupled loss or a gather need every sample. Code that needs them passes its part, and a
function that combines all parts. It need not distinguish whether the others are micro-batches in
this process, other ranks, or absent.

    lane 0: part_0 ──┐
    lane 1: part_1 ──┼──> combine([part_0, part_1, part_2]) ──> result_0, result_1, result_2
    lane 2: part_2 ──┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

P = TypeVar("P")
R = TypeVar("R")


class Meeting(Protocol):
    """Something that brings parts together."""

    def exchange(self, key: Any, part: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Exchange a part: return this part's result of `combine` on all parts."""

    def reduce(
        self,
        key: Any,
        part: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        finish: Callable[[Any], Any],
    ) -> Any:
        """Reduce a part: return the result of `finish`, computed once on the sum of all parts."""

    def gather(self, key: Any, rows: Any) -> tuple[Any, int]:
        """Hand over rows, and return those of all, and where these begin among them."""


class _Here(threading.local):
    meeting: Meeting | None = None
    samples: int = 0
    forwards: int = 0
    standalone: bool = False
    forward: bool = False
    looks: bool = False


_HERE = _Here()


Where = tuple[Meeting | None, int, bool, bool]


def where() -> Where:
    """Return where this thread is."""
    return _HERE.meeting, _HERE.samples, _HERE.standalone, _HERE.forward


def back_to(place: Where) -> None:
    """Restore this thread's recorded state: an interrupt may have skipped a context's exit."""
    _HERE.meeting, _HERE.samples, _HERE.standalone, _HERE.forward = place


def here() -> Meeting | None:
    """Return the barrier in which this thread takes part; None outside of one."""
    return _HERE.meeting


class ForwardOf:
    """Call the model in the body; a class, which is entered faster than a generator.

    Args:
        samples: that it is called with.
        standalone: these are a part of the batch, and meet no other.
    """

    __slots__ = ("_before", "_samples", "_standalone")

    def __init__(self, samples: int, *, standalone: bool) -> None:
        self._samples, self._standalone = samples, standalone
        self._before = _HERE.samples, _HERE.standalone, _HERE.forward

    def __enter__(self) -> None:
        _HERE.forwards += 1
        _HERE.samples, _HERE.standalone = self._samples, self._standalone and _HERE.meeting is None
        _HERE.forward = True

    def __exit__(self, *_: object) -> None:
        _HERE.samples, _HERE.standalone, _HERE.forward = self._before


@contextmanager
def as_it_is() -> Iterator[None]:
    """Treat the inputs of the body as the full batch."""
    before = _HERE.meeting, _HERE.standalone, _HERE.samples
    _HERE.meeting, _HERE.standalone, _HERE.samples = None, False, -1
    try:
        yield
    finally:
        _HERE.meeting, _HERE.standalone, _HERE.samples = before


@contextmanager
def looking() -> Iterator[None]:
    """Run the body as an inspection of the model: its outputs are compared and dropped."""
    before, _HERE.looks = _HERE.looks, True
    try:
        yield
    finally:
        _HERE.looks = before


def looks_here() -> bool:
    """Say whether this thread inspects a model, or runs it without gradients."""
    return _HERE.looks or not torch.is_grad_enabled()


def samples_here() -> int:
    """Return with how many samples this thread calls the model; -1 where it is all of them."""
    return _HERE.samples


def forwards_here() -> int:
    """Return the number of model calls in this thread, by which forwards are distinguished."""
    return _HERE.forwards


def standalone_here() -> bool:
    """Say whether this thread has a part of the batch, and meets no other."""
    return _HERE.standalone


def in_forward() -> bool:
    """Say whether this thread is inside the model's forward."""
    return _HERE.forward


def in_a_meeting() -> bool:
    """Say whether this thread may meet others."""
    return _HERE.meeting is not None


@contextmanager
def meeting_in(meeting: Meeting | None) -> Iterator[None]:
    """Run the body of this thread with `meeting` as its barrier; None is for no barrier."""
    outer, _HERE.meeting = _HERE.meeting, meeting
    try:
        yield
    finally:
        _HERE.meeting = outer


def exchange(key: Any, part: P, combine: Callable[[list[P]], Sequence[R]]) -> R:
    """Exchange a part: return its result of `combine` on all parts; without a barrier, on this one.

    Args:
        key: identity of the barrier, equal for all parts.
        part: this one's.
        combine: all parts, in order -> the result of each, in the same order.
    """
    found: R
    if _HERE.meeting is None:
        (found,) = combine([part])
    else:
        found = _HERE.meeting.exchange(key, part, combine)
    return found


def reduce(
    key: Any, part: Callable[[], P], add: Callable[[P, P], P], finish: Callable[[P], R]
) -> R:
    """Reduce a part: return the same for all, the result of `finish` on the sum of all parts.

    Only the sum and one part are held: a waiting lane has no reference to its own.

    Args:
        key: identity of the barrier, equal for all parts.
        part: makes this one's.
        add: two parts -> their sum.
        finish: made of the sum, by the last one.
    """
    if _HERE.meeting is None:
        return finish(part())
    found: R = _HERE.meeting.reduce(key, part, add, finish)
    return found
