"""Evidence for the word "exact" in a plan.

shown        the gradient is that of the undivided batch, and this is how that was shown
not shown    nothing speaks against it, and it could not be shown
inexact      another gradient was requested by name
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["shown", "not shown", "inexact"]
STATES = ("shown", "not shown", "inexact")


@dataclass(frozen=True)
class Evidence:
    """Whether a plan gives the gradient of the undivided batch, and the evidence for it.

    It is true where that was shown, and false otherwise.

    Attributes:
        state: "shown", "not shown" or "inexact".
        by: the instrument that has shown it, or the reason why it could not be shown.
        step: the step of its signature that inspected it last; 0 is before any.
    """

    state: State
    by: str
    step: int = 0

    def __bool__(self) -> bool:
        return self.state == "shown"

    def __str__(self) -> str:
        at = f", step {self.step}" if self.step else ""
        return f"{self.state}: {self.by}{at}"

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Evidence:
        """Return the evidence that was saved with a plan.

        Args:
            found: the object in the plan's JSON.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(found, Mapping) or found.get("state") not in STATES:
            raise ValueError(f"exact must have a state of {STATES}, and it is {found!r}")
        return cls(**found)


UNDIVIDED = Evidence("shown", "the batch is not divided")
FORESEEN = Evidence("not shown", "no step has been run")
