"""Sites of a forward where samples meet, recorded for a comparison with later steps.

State that lanes share has been compared at every barrier, and is either the same or separate for
each lane (`anybatch.lockstep.slots`). A model that reaches another barrier in a later step (a flag
that is switched on) was not inspected there: it is inspected again.

    recorded:  A B C, A C     a lane reaches  A ─> C ─> the end: recorded    A ─> D: inspect again
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

Site = tuple[str, int, int]
"""A place where samples meet: the called function, the channels and the dimensions."""

Way = tuple[Site, ...]
"""All places of one forward, in order."""

END: Site = ("the end", 0, 0)


class OtherSitesError(Exception):
    """Error at a barrier that earlier steps did not have: the model is inspected again."""


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
            OtherSitesError: no recorded way goes there.
        """
        at, self._at = self._at, self._at + 1
        self._left = [way for way in self._left if at < len(way) and way[at] == site]
        if not self._left:
            raise OtherSitesError
