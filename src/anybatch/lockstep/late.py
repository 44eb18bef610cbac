"""Batch normalisation that a model begins to call in a later step, detected without a mode.

The inspection traces the calls of the first forward. A bare ``F.batch_norm`` behind a flag that is
switched on later would normalise each micro-batch by itself. A mode would find that, at a cost for
every call. But ``F.batch_norm``, however a model has imported it, looks ``torch.batch_norm`` up
when it is called: while a divided step runs, that attribute is replaced, which costs a comparison,
and no compiled model is compiled anew for it.

    F.batch_norm, nn.BatchNorm ──> torch.batch_norm ──> training, with a part of the batch: found
                                                    └─> torch's own

Not found are references to ``torch.batch_norm`` itself from before the step (``from torch
import``), calls from C++ (a scripted model), and code compiled outside of a divided step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from anybatch.core.meeting import forwards_here, samples_here, standalone_here
from anybatch.core.norm.counters import BatchStatisticsError, refuse
from anybatch.core.undo import Before, uninterrupted

TRAINING = {"batch_norm": 5, "native_batch_norm": 5}
"""Functions of torch, and where they take their training flag."""


SINGLE = "Expected more than 1 value per channel when training"
"""Error of ``F.batch_norm`` for a single sample, before it calls anything."""


class _ThreadStep(threading.local):
    step: Listening | None = None


_HERE = _ThreadStep()
_LOCK = threading.Lock()
_LISTENING: WeakSet[Listening] = WeakSet()
_OWN: dict[str, Any] = {}


class Singles:
    """How often a forward has normalised each of several samples by itself, at most.

    That is one row of n * C channels (AdaIN); for a single sample it equals a batch of one.
    """

    def __init__(self) -> None:
        self._most = self._forward = self._calls = 0

    def takes(self, x: Tensor) -> bool:
        """Say whether `x` is such a row, among all of the present forward."""
        if x.shape[0] != 1:
            return False
        if self._forward != forwards_here():
            self._forward, self._calls = forwards_here(), 0
        self._calls += 1
        if samples_here() != 1:
            self._most = max(self._most, self._calls)
        return self._calls <= self._most


class Listening:
    """A step that listens; several may, in threads of their own.

    Args:
        singles: of its model.
        outer: the step of this thread that it is within; None where there is none.

    Attributes:
        called: the called function; "" where none was.
    """

    def __init__(self, singles: Singles, outer: Listening | None) -> None:
        self.called = ""
        self.singles, self._outer = singles, outer

    def begin(self) -> None:
        """Put something in the place of torch's functions, unless that is done."""
        _HERE.step = self
        with _LOCK:
            _LISTENING.add(self)
            for name, at in TRAINING.items():
                if name not in _OWN:
                    own = _OWN[name] = getattr(torch, name)
                    setattr(torch, name, _listens(name, own, at))

    def end(self) -> None:
        """Restore torch's functions where no other step listens."""
        _HERE.step = self._outer
        with _LOCK:
            _LISTENING.discard(self)
            while _OWN and not _LISTENING:
                name, own = _OWN.popitem()
                setattr(torch, name, own)


def _listens(name: str, own: Callable[..., Any], at: int) -> Callable[..., Any]:
    def stands_in(*args: Any, **kwargs: Any) -> Any:
        if args[at] if len(args) > at else kwargs.get("training"):
            _hear(name, args[0] if args else kwargs["input"])
        return own(*args, **kwargs)

    return stands_in


def _hear(name: str, x: Tensor) -> None:
    """Refuse to normalise samples of a part of the batch.

    Raises:
        BatchStatisticsError: it is, and records that, even if the error is caught.
    """
    step = _HERE.step
    if step is not None and standalone_here() and not step.singles.takes(x):
        step.called = name
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    refuse(f"{name} called in forward")


@contextmanager
def listening(before: Before, singles: Singles) -> Iterator[None]:
    """Notice training-mode batch normalisation of a part of a batch in the body.

    Args:
        before: the step; it undoes a replacement that an interrupt has left.
        singles: of the model.

    Raises:
        BatchStatisticsError: from the call, and from the end of the body at the latest.
    """
    step = Listening(singles, _HERE.step)
    before.patched.append(step.end)
    try:
        with uninterrupted():  # or the lock would be left
            step.begin()
        yield
    except BatchStatisticsError:
        raise
    except Exception as error:  # of a compiler, perhaps, that has tried to trace the call
        if step.called or (isinstance(error, ValueError) and str(error).startswith(SINGLE)):
            _refuse(step.called or "batch_norm")
        raise
    else:
        if step.called:
            _refuse(step.called)
    finally:
        with uninterrupted():
            step.end()
