"""The way between a device and the store beyond it: its speed, and when something is under way.

No torch here: offload schedules and timelines are made of these.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The way between device and host.

    Attributes:
        out: bytes a second to the host.
        back: bytes a second from it.
        duplex: both at the same time.
    """

    out: float
    back: float
    duplex: bool = True


@dataclass(frozen=True)
class Interval:
    """When something was under way: seconds from the beginning of the step."""

    begin: float
    end: float
