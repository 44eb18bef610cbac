"""Batch sizes at which the forward of the full batch was compared with that of micro-batches.

A proof for 8 samples does not hold for 16: ghost batches of 8, a branch on ``len(x) > 10``. A model
that reads the number of samples is compared again at new sizes.

    batch of   8, in parts of 3   compared by the look of step 1
    batch of  16, in parts of 3   new: compared before the step computes anything
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anybatch.execution.proof.verdict import Verdict

FREE = 8
"""Pairs of sizes that are always compared: each costs some forwards without data."""

LARGER = 24
"""Pairs after which a larger batch is compared only where it is twice as large as any before."""


@dataclass
class ComparedSizes:
    """Pairs of batch and micro-batch that were compared since the last inspection.

    Attributes:
        counts: forward may depend on the number of samples.
        values: numbers that Python reads in a forward, in order.
        backward: that is not torch's own, and is compared, too.
        reads: a declared loss has Python read numbers of tensors.
        followed: rows in which samples were followed.
        pairs: (samples of the batch, of a micro-batch) that were compared.
        step: the step of the signature in which the last of these was.
        declared: compares the calls of a declared loss for numbers of samples; None (default)
            where nothing in it may depend on these.
    """

    counts: bool
    values: Sequence[Any] = ()
    backward: bool = False
    reads: bool = False
    followed: int = 0
    pairs: set[tuple[int, int]] = field(default_factory=set)
    step: int = 0
    declared: Callable[[Sequence[int]], Verdict] | None = None

    @property
    def matter(self) -> bool:
        """Whether forward, or a declared loss, may depend on how many samples there are."""
        return self.counts or self.declared is not None

    def new(self, samples: int, micro_batch: int) -> bool:
        """Say whether a pair is to be compared."""
        if not self.matter or (samples, micro_batch) in self.pairs:
            return False
        if len(self.pairs) < FREE:
            return True
        factor = 1 if len(self.pairs) < LARGER else 2
        most, widest = self._largest()
        larger = samples > most and samples >= factor * most
        return larger or (micro_batch > widest and micro_batch >= factor * widest)

    def beyond(self, samples: int, micro_batch: int) -> bool:
        """Say whether a pair that is not to be compared is larger than those that were."""
        if not self.matter or (samples, micro_batch) in self.pairs:
            return False
        most, widest = self._largest()
        return samples > most or micro_batch > widest

    def add(self, samples: int, micro_batch: int, step: int) -> None:
        """Note that a pair was compared in this step."""
        self.pairs.add((samples, micro_batch))
        self.step = step

    def _largest(self) -> tuple[int, int]:
        return max(n for n, _ in self.pairs), max(m for _, m in self.pairs)
