"""What gradients are sent over: the machine itself, or a stand-in for a wire between machines.

On one machine the processor copies and adds what "the wire" carries, and the cores of the ranks are
busy with backward. Between machines a network card can do that. So the stand-in takes time and no
processor: a sum of M bytes holds the wire for 2 M (N - 1) / N / rate seconds, one after another,
and adds nothing up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

from torch import Tensor

from anybatch.distributed.process_group import Group

LINKS: dict[str, float | None] = {"this machine": None, "10 Gbit/s": 1.25e9, "1 Gbit/s": 1.25e8}
"""Name -> bytes a second; None is gloo on the loopback device."""


class Sent:
    """A sum that is there at a moment."""

    def __init__(self, at: float) -> None:
        self._at = at

    def wait(self, timeout: Any = None) -> None:
        """Sleep until then."""
        del timeout
        sleep(max(0.0, self._at - perf_counter()))


@contextmanager
def wire(rate: float | None) -> Iterator[None]:
    """Let `Group.start_sum` send over a wire of `rate` bytes a second; None leaves it."""
    if rate is None:
        yield
        return
    free = 0.0

    def start_sum(group: Group, part: Tensor) -> Sent:
        nonlocal free
        volume = 2 * part.numel() * part.element_size() * (group.size - 1) / group.size
        free = max(free, perf_counter()) + volume / rate
        return Sent(free)

    real = Group.start_sum
    Group.start_sum = start_sum  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Group.start_sum = real  # type: ignore[method-assign]
