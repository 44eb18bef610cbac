"""Barriers where samples meet: a value of the full batch, while only a part of it is here.

BatchNorm, a coupled loss or a gather need every sample. Code that needs them passes its part, and a
function that combines all parts. It need not distinguish whether the others are micro-batches in
this process, other ranks, or absent.

    lane 0: part_0 ──┐
    lane 1: part_1 ──┼──> combine([part_0, part_1, part_2]) ──> result_0, result_1, result_2
    lane 2: part_2 ──┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from anybatch.core.retry import Retry

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


Where = tuple[Meeting | None, int, bool, bool, bool]


def where() -> Where:
    """Return where this thread is."""
    return _HERE.meeting, _HERE.samples, _HERE.standalone, _HERE.forward, _HERE.looks


def back_to(place: Where) -> None:
    """Restore this thread's recorded state: an interrupt may have skipped a context's exit."""
    _HERE.meeting, _HERE.samples, _HERE.standalone, _HERE.forward, _HERE.looks = place


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


class Placed:
    """Change the place of this thread in the body.

    An interrupt between the entry of a generator and its body would leave this to whoever frees the
    generator, later and in any order, so it is a class (test_an_interrupted_inspection_is_over).

    Args:
        place: values of `_Here`, by name.
    """

    __slots__ = ("_before", "_place")

    def __init__(self, **place: Any) -> None:
        self._place = place
        self._before = {name: getattr(_HERE, name) for name in place}

    def __enter__(self) -> None:
        vars(_HERE).update(self._place)

    def __exit__(self, *_: object) -> None:
        vars(_HERE).update(self._before)


def as_it_is() -> Placed:
    """Treat the inputs of the body as the full batch."""
    return Placed(meeting=None, standalone=False, samples=-1)


def looking() -> Placed:
    """Run the body as an inspection of the model: its outputs are compared and dropped."""
    return Placed(looks=True)


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


def meeting_in(meeting: Meeting | None) -> Placed:
    """Run the body of this thread with `meeting` as its barrier; None is for no barrier."""
    return Placed(meeting=meeting)


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


# Arithmetic on a few numbers past all modes, which would cost most of its time.
#
# A dispatch mode intercepts every kernel, at ten times the cost of one that adds up the channels of
# a layer. Tensors computed here must be plain and resident.

PLAIN = (Tensor, Parameter)


class Unseen:
    """Compute in the body past all modes; with subclasses of tensors as ever.

    Args:
        tensors: that are computed with. The body makes none that needs a gradient.
    """

    __slots__ = ("_dispatch", "_function")

    def __init__(self, *tensors: Tensor) -> None:
        plain = all(type(tensor) in PLAIN for tensor in tensors)
        self._dispatch = torch._C._DisableTorchDispatch() if plain else None
        self._function = torch._C.DisableTorchFunction() if plain else None

    def __enter__(self) -> None:
        if self._dispatch is not None and self._function is not None:
            self._dispatch.__enter__()  # type: ignore[no-untyped-call]
            self._function.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._dispatch is not None and self._function is not None:
            self._function.__exit__(exc_type, error, trace)
            self._dispatch.__exit__(exc_type, error, trace)


# Sites of a forward where samples meet, recorded for a comparison with later steps.
#
# State that lanes share has been compared at every barrier, and is either the same or separate for
# each lane (`anybatch.lockstep.scheduler`). A model that reaches another barrier in a later step (a
# flag that is switched on) was not inspected there: it is inspected again.
#
#     recorded:  A B C, A C     a lane reaches  A ─> C ─> the end: recorded    A ─> D: inspect again

Site = tuple[str, int, int]
"""A place where samples meet: the called function, the channels and the dimensions."""

Way = tuple[Site, ...]
"""All places of one forward, in order."""

END: Site = ("the end", 0, 0)


def site_of(x: Tensor) -> Site:
    """Return the place where `x` is normalised."""
    return "batch_norm", x.shape[1], x.dim()


class Route:
    """Tracker of a forward along the recorded sequences of barriers.

    Args:
        recorded: all of them.
    """

    def __init__(self, recorded: Iterable[Way]) -> None:
        self._left = [(*way, END) for way in recorded]
        self._at = 0

    def comes_to(self, site: Site) -> None:
        """Take in the next place.

        Raises:
            Retry: no recorded way goes there.
        """
        at, self._at = self._at, self._at + 1
        self._left = [way for way in self._left if at < len(way) and way[at] == site]
        if not self._left:
            raise Retry("sites")
