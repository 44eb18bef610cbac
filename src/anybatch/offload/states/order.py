"""In which order things are used, step after step, as the step before has shown.

A training step repeats itself: uses follow each other in the order of the last step. In a step with
another order only the prediction is wrong.
"""

from __future__ import annotations

from bisect import bisect_left

Use = tuple[int, int]
"""A used tensor: its role, and its number."""


class Order:
    """Uses of one step, and those of the step before it.

    Attributes:
        at: how many of the uses of the step before lie behind.
    """

    def __init__(self) -> None:
        self.at = 0
        self._previous: list[Use] = []
        self._places: dict[Use, list[int]] = {}
        self._now: list[Use] = []

    def __len__(self) -> int:
        return len(self._previous)

    def __getitem__(self, place: int) -> Use:
        """Return the use at a place of the step before."""
        return self._previous[place]

    def used(self, item: Use) -> None:
        """Note a use."""
        if self._now and self._now[-1] == item:
            return
        self._now.append(item)
        places = self._places.get(item, [])
        index = bisect_left(places, self.at)
        if index < len(places):
            self.at = places[index] + 1

    def next(self, item: Use) -> int:
        """Return the place of the next use: in this step, else in the one behind it, else later."""
        places = self._places.get(item)
        if not places:
            return 2 * len(self._previous)
        index = bisect_left(places, self.at)
        return places[index] if index < len(places) else len(self._previous) + places[0]

    def ended(self) -> None:
        """A step is over; the next one will be like it."""
        self._previous, self._now, self.at = self._now, [], 0
        self._places = {}
        for place, item in enumerate(self._previous):
            self._places.setdefault(item, []).append(place)
