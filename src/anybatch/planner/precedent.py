"""Decisions of earlier batches that later ones follow, at any signature.

Only the first batch is timed. Later ones keep the number of elements in a micro-batch: of samples
half as large, twice as many. If saved tensors were offloaded, they may be again.

    timed: 8 samples of 512 elements ──> 16 of 256, 4 of 1024
"""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.execution.signature import Signature
from anybatch.planner.choice import even


@dataclass
class Precedent:
    """How batches are run.

    Attributes:
        fixed: required samples in a micro-batch; None (default) chooses.
        best: samples in the micro-batch chosen first, and elements of each; None (default) before.
        sends: whether saved tensors were offloaded.
        decided: forecasts made, and decisions of a plan that was given.
    """

    fixed: int | None = None
    best: tuple[int, int] | None = None
    sends: bool = False
    decided: int = 0

    def sent(self, n: int, signature: Signature) -> None:
        """Record saved tensors as offloaded in micro-batches of `n`; the first size is stored."""
        self.sends = True
        if self.best is None:
            self.best = n, signature.elements

    def keeps_offloading(self, signature: Signature) -> bool:
        """Return whether saved tensors are offloaded as before: not under another plan."""
        return self.sends and not signature.most

    def fixed_for(self, signature: Signature) -> int | None:
        """Return the required samples of a micro-batch; None where the size is free."""
        return None if self.fixed is None else min(self.fixed, signature.largest)

    def pick(self, signature: Signature, cap: int) -> int:
        """Return a size up to `cap` that does as much work at once as the first one chosen did."""
        if self.fixed is not None:
            return min(self.fixed, cap)
        if self.best is None:
            return even(signature.size, cap)
        n, elements = self.best
        if elements == signature.elements:
            return min(cap, n)
        return max(1, min(cap, round(n * elements / max(signature.elements, 1))))
