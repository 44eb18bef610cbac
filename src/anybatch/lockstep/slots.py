"""State that forward sets on a model while it runs: every lane has its own.

A model may store an activation in an attribute and read it some layers later, put features in a
dict by a hook, or swap its parameters for the time of a call. Run to the end, one forward does not
disturb the next. Lanes stop in the middle, and one would find the state of another. So the
inspection compares, at every barrier, the contents of attributes, parameters and containers with
those before; changed ones are swapped with the token.

Source: found by trying to break lanes; ``threading.local`` of the user's is not carried over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anybatch.core.accelerators import library_switches
from anybatch.core.meeting import forwards_here
from anybatch.core.modules import Modules
from anybatch.core.norm.sites import Site, Way
from anybatch.core.python_state import PythonState, fill
from anybatch.errors import NotExactError
from anybatch.execution.proof.follow import Follow


class LaneInspection:
    """Comparison, wherever samples meet in the first inspection, of state that lanes would share.

    Args:
        modules: of the step.

    Attributes:
        follow: the mode that follows the forward which runs; None where none does.
        forwards: number of forwards of the inspection.
    """

    def __init__(self, modules: Modules) -> None:
        snapshot = PythonState()
        snapshot.modules((module for _, module in modules), attributes=True)
        self._before = [(held, _print(held)) for held in snapshot.held]
        self._settings = _settings()
        self._changed: dict[int, Any] = {}
        self._sites: list[tuple[int, Site]] = []
        self._first = forwards_here() + 1
        self.follow: Follow | None = None
        self.forwards = 0

    def record_input(self, x: Tensor) -> None:
        """Take in a normalisation of `x`."""
        if self.follow is not None:
            self.follow.record_norm(x)

    def record_site(self, site: Site) -> None:
        """Take in a place where samples meet.

        Raises:
            NotExactError: forward has changed a setting that all threads share.
        """
        self._sites.append((forwards_here(), site))
        self._compare()
        if _settings() != self._settings:
            raise NotExactError(
                "settings that belong to the whole process must not change where micro-batches "
                "wait for each other, and forward changes one where they do (a flag of "
                "torch.backends, the default dtype): set it before the step, "
                "or give micro_batch >= the batch size"
            )

    def slots(self) -> list[Any]:
        """Return the attributes and containers that every lane must have of its own."""
        self._compare()
        return list(self._changed.values())

    def way(self) -> Way:
        """Return the places where samples meet in the first forward, in order."""
        return tuple(site for forward, site in self._sites if forward == self._first)

    def _compare(self) -> None:
        for held, before in self._before:
            if id(held) not in self._changed and _print(held) != before:
                self._changed[id(held)] = held


class LaneSlots:
    """Contents of attributes and containers, stored and restored for each lane.

    Args:
        slots: those that change.
        lanes: how many lanes.
    """

    def __init__(self, slots: Iterable[Any], lanes: int) -> None:
        self._slots = list(slots)
        self._start = [held.copy() for held in self._slots]
        self._stored = [self._start] * lanes

    def begin(self, lane: int) -> None:
        """Restore the content that a lane has stored."""
        self._fill(self._stored[lane])

    def store(self, lane: int) -> None:
        """Store the content of a lane."""
        self._stored[lane] = [held.copy() for held in self._slots]

    def finish(self) -> None:
        """Restore the content of the last micro-batch."""
        self._fill(self._stored[-1])

    def put_back(self) -> None:
        """Restore the content from before the step."""
        self._fill(self._start)

    def _fill(self, contents: list[Any]) -> None:
        for held, content in zip(self._slots, contents, strict=True):
            fill(held, content)


def _print(held: Any) -> Any:
    """Return the identity of a container's content: the ids of the objects that it holds."""
    if isinstance(held, dict):
        return tuple(held), tuple(map(id, held.values()))
    return tuple(map(id, held))


def _settings() -> Any:
    backends = torch.backends
    return (
        torch.get_default_dtype(),
        backends.mkldnn.enabled,
        *library_switches(),
        torch.are_deterministic_algorithms_enabled(),
    )
