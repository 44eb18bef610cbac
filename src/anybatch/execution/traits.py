"""Traits of a model: the findings of an inspection and of the steps since, one record a signature.

A signature is dimensions and dtypes of a batch, without its size, and the training flags. A step
works on its own copy, and hands it on when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from anybatch.core.barrier import Way
from anybatch.distributed.local_batch import Layout
from anybatch.execution.proof.inspected import ComparedSizes


@dataclass(frozen=True)
class LaneTraits:
    """Findings of inspections of a model for lanes.

    Attributes:
        slots: attributes and containers that every lane has of its own.
        ways: where samples meet in forward, in order, for each inspection.
        singles: forward normalises some samples by themselves, each as a row of channels.
        current: no other way has come since.
    """

    slots: tuple[Any, ...] = ()
    ways: tuple[Way, ...] = ()
    singles: bool = False
    current: bool = True

    def after(self, slots: Iterable[Any], way: Way, *, singles: bool) -> LaneTraits:
        """Return the findings after one more inspection."""
        every = {id(slot.held): slot for slot in (*self.slots, *slots)}
        return LaneTraits(tuple(every.values()), (*self.ways, way), singles=self.singles or singles)


@dataclass
class Traits:
    """Findings of the steps of a signature, which later steps reuse.

    Attributes:
        coupled: the loss needs all outputs at once.
        moving: paths of the buffers that forward moves; None before a step is complete.
        layout: where the outputs hold the samples; None before an inspection.
        extra_layout: the same of outputs next to a loss, which have no layout, as two sizes show.
        copies: forward writes to its inputs, so it gets copies of them.
        still: the first step drew nothing.
        lanes: result of an inspection of lanes; None where there was none.
        doubts: why it is not shown that samples are separate; nothing where it is.
        looked: the step of the signature in which samples were traced last; 0 is none.
        sizes: of batches that were compared since; None before an inspection.
        steps: steps of the signature so far, the present one included.
        mixed: outputs without rows that samples have had a part in.
    """

    coupled: bool = False
    moving: frozenset[str] | None = None
    layout: Layout | None = None
    extra_layout: Layout = ()
    copies: bool = False
    still: bool = False
    lanes: LaneTraits | None = None
    doubts: tuple[str, ...] = ()
    looked: int = 0
    sizes: ComparedSizes | None = None
    steps: int = 1
    mixed: frozenset[int] = frozenset()

    def of_next(self, *, more: int) -> Traits:
        """Return those of a later attempt, in which they are changed, so many steps later."""
        found = Traits()
        vars(found).update(vars(self), steps=self.steps + more)  # `replace` takes ten times as long
        return found

    @property
    def axes(self) -> Layout:
        """The dimension of each output that holds the samples; empty before an inspection."""
        return self.layout or ()

    def doubt(self, *doubts: str) -> None:
        """Add why it is not shown that samples are separate, each once."""
        self.doubts += tuple(one for one in dict.fromkeys(doubts) if one not in self.doubts)
