"""The paper's policy: a window of bytes slides over the variables in the order they are used.

   variables of   f_{i-1} |  f_i   f_{i+1}  f_{i+2} |  f_{i+3} ...
                          └─── window, in bytes ────┘
   (a) what comes into the window returns          (c) what f_i used leaves, after it
   (b) where that does not fit, the oldest copy    (d) unless it is never used again, or is in the
       to the host is awaited before f_i               window already

Improvements to it: a variable is not copied again if nothing has written to it since; one that
enters the window before its copy was awaited is not moved; and variables outside of the window
when the step begins are evicted after the first function.

Source: Hayakawa and Narihira, section 3, Figure 2.
"""

from __future__ import annotations

from anybatch.core.units import show_bytes
from anybatch.offloading.schedule import Schedule, Trace
from benchmarks.simulators.baselines import Draft


def window(trace: Trace, budget: int, size: int) -> Schedule:
    """Plan a step by the paper's algorithm.

    Args:
        trace: the step.
        budget: bytes on the device.
        size: bytes of the schedule-window; the variables of one function are always in it.

    Raises:
        BudgetError: the window and the resident variables do not fit.
    """
    draft, sequence = Draft(trace, budget), _Sequence(trace, size)
    for i, function in enumerate(trace.functions):
        inside, new = sequence.slide_to(i)
        draft.bring(v for v in new if v in sequence.made)  # (a), and in it (b)
        draft.run()
        sequence.made.update(function.makes)
        used = function.uses if i else (*function.uses, *trace.before)
        draft.evict(v for v in used if v not in inside)  # (c), (d)
    return draft.schedule(f"window of {show_bytes(size)}")


class _Sequence:
    """The variable-sequence v, and the window v[l:r] on it."""

    def __init__(self, trace: Trace, size: int) -> None:
        self._flat = [v for function in trace.functions for v in function.uses]
        self._trace, self._size = trace, size
        self._left = self._right = self._bytes = 0
        self._count: dict[int, int] = {}
        self.made = set(trace.before)

    def slide_to(self, i: int) -> tuple[dict[int, int], list[int]]:
        """Move the window to function `i`.

        Returns:
            The variables in it after those of the function, and those that have just entered it.
        """
        own = self._left + len(self._trace.functions[i].uses)
        new = []
        while self._right < len(self._flat) and (
            self._right < own or self._bytes + self._size_at(self._right) <= self._size
        ):
            v = self._flat[self._right]
            new.append(v)
            self._count[v] = self._count.get(v, 0) + 1
            self._bytes += self._size_at(self._right)
            self._right += 1
        for place in range(self._left, own):
            v = self._flat[place]
            self._bytes -= self._size_at(place)
            self._count[v] -= 1
            if not self._count[v]:
                del self._count[v]
        self._left = own
        return self._count, new

    def _size_at(self, place: int) -> int:
        return self._trace.size(self._flat[place])
