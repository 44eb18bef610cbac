"""`Retry`: the only way in which a step is run again.

A step that has begun can find that it must be another one. It then ends like one that failed: its
transaction restores all state, other ranks learn of it, and the loop in `Engine` begins the next
attempt with what this one has learned.
"""

from __future__ import annotations

from typing import Any, Literal

Reason = Literal["memory", "rows", "meeting", "coupled", "inspection", "sites", "draws", "ranks"]
"""Why a step is run again; `anybatch.engine.engine` says what is learned, and how often each comes.

memory: it ran out, and fewer samples may fit. rows: a lazy batch has larger ones than were planned
for. meeting: samples meet where no module shows it. coupled: the loss needs all outputs at once.
inspection: the model is not the inspected one. sites: lanes meet elsewhere than in earlier steps.
draws: a full-batch draw has no known layout. ranks: another rank runs it again.
"""


class Retry(Exception):  # noqa: N818 - no error: it begins the next attempt
    """Request to run the step again.

    Args:
        reason: as in `Reason`.
        learned: what the next attempt has to know, by name.
    """

    def __init__(self, reason: Reason, **learned: Any) -> None:
        super().__init__(f"the step is run again: {reason}")
        self.reason, self.learned = reason, learned
