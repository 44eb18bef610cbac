"""The seven steps of a mini-batch, by the guide's names.

Source: Zou et al. (the guide), section 2.1, Figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass

REFRESH = "parameter refresh"
LOAD = "data loading"
PREPARE = "data preparation"
TRANSFER = "host to device"
COMPUTE = "computing"
UPDATE = "parameter update"
EXCHANGE = "distributed update"
STAGES = (REFRESH, LOAD, PREPARE, TRANSFER, COMPUTE, UPDATE, EXCHANGE)
"""In their order; all but `COMPUTE` are overhead where they are not hidden behind it."""


@dataclass(frozen=True)
class LoopStage:
    """Seconds of one of the seven steps.

    Attributes:
        name: one of `STAGES`.
        takes: mean seconds of work in a step, hidden or not.
        shows: mean seconds that the loop waits for it.
        share: of all the time of the loop, 0 to 1.
    """

    name: str
    takes: float
    shows: float
    share: float
