"""`Retry`, the only way in which a step is run again, and the only loop that does so.

A step that has begun can find that it must be another one. It then ends like one that failed: its
transaction restores all state, and other ranks learn of it. Nothing of it is left but the findings,
and the next attempt begins with them:

    reason      what is learned                                 how often in a step
    memory      half the samples at once                        until one sample is too much
    rows        the larger rows of a lazy batch                 once for each larger row
    meeting     samples meet in a function, without a module    once for each of two kinds
    coupled     the loss needs all outputs at once              once
    inspection  the earlier inspection does not hold            twice, then it is refused
    sites       the lanes meet elsewhere than in earlier steps  twice, then it is refused
    draws       the layout of a full-batch draw                 once for each draw
    size        a size or place that cannot be run              once for each of them
    recompute   saved tensors are moved, not computed again     once
    ranks       what another rank has learned                   as often as on the others
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol, TypeVar

Reason = Literal[
    "memory",
    "rows",
    "meeting",
    "coupled",
    "inspection",
    "sites",
    "draws",
    "size",
    "recompute",
    "ranks",
]
T = TypeVar("T")


class Retry(Exception):  # noqa: N818 - no error: it begins the next attempt
    """Request to run the step again.

    Args:
        reason: one of the table above.
        learned: what the next attempt has to know, by name.
    """

    def __init__(self, reason: Reason, **learned: Any) -> None:
        super().__init__(f"the step is run again: {reason}")
        self.reason, self.learned = reason, learned


class Learner(Protocol):
    """Something that the next attempt of a step depends on."""

    def learn(self, retry: Retry) -> None:
        """Take in why an attempt ended, or raise where there is no next one."""


def until_complete(attempt: Callable[[], T], *learners: Learner, beyond: Collection[str] = ()) -> T:
    """Run attempts of a step until one is complete; return its result.

    Args:
        attempt: runs one.
        learners: each learns why one has ended.
        beyond: reasons that the caller handles. Default: none.

    Raises:
        Retry: for one of these.
    """
    while True:
        try:
            return attempt()
        except Retry as retry:
            if retry.reason in beyond:
                raise
            for learner in learners:
                learner.learn(retry)
