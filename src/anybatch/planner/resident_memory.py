"""Choice of a micro-batch size with all saved tensors resident; refusal where no size fits.

forecast <= budget ──> cap, rehearsed once more ──> first size ──> the fastest, by steps
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from anybatch.core.plan_sections import Candidate, Capacity
from anybatch.core.retry import Retry
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError, NotExactError
from anybatch.execution.signature import MICRO_BATCHES, RunPlan
from anybatch.memory.ledger import Phase, StepTimeline, joined
from anybatch.memory.lockstep_budget import WAITING, least
from anybatch.planner.forecast import DIVIDED, Forecast, total
from anybatch.planner.memory_model import MemoryModel, finite
from anybatch.planner.search import doubling, even
from anybatch.planner.working_set import lane_of, step_of

CACHED = 32 << 20
"""Bytes of samples from which a smaller micro-batch may be faster on a host: they are in no cache,
and the host's allocator maps blocks of this size anew each time."""

START = 4
"""Samples of the first size on a host, at least, where so many fit."""

SHARED = ("parameters", "buffers", "optimizer", "transfer buffers", "shards")
"""Owners of bytes that exist once for all lanes."""


def in_no_cache(foreseen: Forecast, size: int) -> bool:
    """Say whether an undivided batch of `size` samples holds more than a host's caches do."""
    return foreseen.of_samples(size) > CACHED


class ResidentSizes(MemoryModel):
    """Sizes with all saved tensors resident; `confirmed` ones are rehearsed, where that is free."""

    place = "resident"
    confirmed = False

    @cached_property
    def largest(self) -> int:
        """The most samples that fit; 0 where not even one does."""
        cap = min(self.foreseen.largest(self._budget, self._size), self._most)
        while self.confirmed and cap > 0 and not self._confirms(cap):
            cap = min(cap - 1, 7 * cap // 8)
        return cap

    def _confirms(self, n: int) -> bool:
        """Say whether a size fits as it is rehearsed.

        First with an accumulator, where that may fit: its plan takes one, and asks for that.
        """
        size, foreseen, budget = self._size, self.foreseen, self._budget
        signature = self._request.signature
        sums = n < size and signature.trains and not signature.lanes
        may = sums and foreseen.peak(n, size) + foreseen.gradients <= budget
        if may and foreseen.accumulator_peak(n, size, confirmed=True) <= budget:
            return True
        return foreseen.confirm(n, size) <= budget

    def require(self, fixed: int | None) -> None:
        """Require that a step fits, in micro-batches of `fixed` samples if that is set.

        Raises:
            NotExactError: it would have to be divided, and must not be.
            BudgetError: it does not fit.
        """
        size, cap, foreseen = self._size, self.largest, self.foreseen
        shown = f"{show_bytes(self._budget)} ({self._request.source})"
        if cap < size:
            try:
                self._request.refuse_division()
            except NotExactError as error:
                raise NotExactError(
                    f"{error}. Undivided the batch needs {show_bytes(foreseen.peak(size, size))}, "
                    f"and the budget is {shown}"
                ) from None
        if cap == 0:
            n, floor = foreseen.least(size, self._most)
            step = "undivided" if n == size else "with micro-batches of one sample"
            owners = foreseen.owners(n, size)
            raise self._too_small(floor, step, owners, model="a smaller model, ")
        n = cap if fixed is None else min(fixed, size)
        if n != cap and (n > cap or not self.fits(n)):
            needed = foreseen.peak(n, size)
            raise BudgetError(
                f"a step must fit in memory, and micro-batches of {fixed} samples need "
                f"{show_bytes(needed)} of {shown}: give "
                f"micro_batch={cap}{' or less' if n > cap else ''}, or leave it out",
                needed=needed,
                budget=self._budget,
            )

    def fits(self, n: int) -> bool:
        """Say whether a size does: sums of gradients may cost more than dividing a batch saves."""
        return self.foreseen.peak(n, self._size) <= self._budget

    @property
    def start(self) -> int:
        """The size of the first step: the largest, on a host no more than its caches hold.

        Micro-batches are as equal as can be. In lockstep each costs waits, so it is the largest.
        """
        size, cap = self._size, self.largest
        if cap < size and not self._request.signature.lanes and self._request.on_host:
            per_sample = self.foreseen.of_samples(size) / size
            cap = min(cap, max(START, int(CACHED / per_sample) if per_sample else cap))
        n = even(size, cap)
        return n if self.fits(n) else self.largest

    @cached_property
    def pages(self) -> bool:
        """Whether lanes of the first size are paged while they wait."""
        first = self.planned(self.start) if self._request.signature.lanes else None
        return first is not None and first.lanes and first.memory.waiting_capacity is not None

    def planned(self, n: int, *, checked: bool = False) -> RunPlan:
        """Return how a batch is run in micro-batches of `n`, which are `checked` by a rehearsal.

        Or not: one above it was rehearsed, or they are lanes, which always are.
        """
        foreseen, size, budget = self.foreseen, self._size, self._budget
        inspection, signature = foreseen.inspection, self._request.signature
        confirmed = self.confirmed and (checked or signature.lanes)
        owners, peak = foreseen.owners(n, size), 0
        accumulator, lanes = False, signature.lanes and n < size
        if signature.trains and n < size and not lanes:
            peak = foreseen.accumulator_peak(n, size, confirmed=confirmed)
            accumulator = peak <= budget
        if not accumulator:  # else that was rehearsed, and holds a set of gradients more
            peak = foreseen.confirm(n, size) if confirmed else total(owners)
        elif by_line := foreseen.accumulator_owners(n, size):
            owners = by_line
        more = peak - total(owners)
        owner = "gradients" if accumulator and more > 0 else "activations"
        owners[owner] = more + owners.get(owner, 0)
        predicted = peak
        capacity: Capacity = 0
        if lanes:
            predicted, owners, capacity = self._in_lanes(n, peak, owners, confirmed=confirmed)
        memory = self._memory(
            {owner: count for owner, count in owners.items() if count},
            predicted,
            waiting_capacity=capacity,
            floor=self._floor(confirmed=confirmed),
            candidates=self.rows(n),
        )
        coupled = inspection.coupled and not lanes
        return RunPlan(n, accumulator, memory, coupled, inspection.loss, lanes)

    def _floor(self, *, confirmed: bool) -> int | None:
        """Return the bytes of a step in micro-batches of one sample, rehearsed as in an error."""
        foreseen, exact = self.foreseen, 0
        if foreseen.full_batch:
            return None
        try:
            exact = foreseen.confirm(1, self._size) if confirmed else 0
        except (Retry, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # of a model that takes no such micro-batch, by any error of its own
            pass
        return max(exact, foreseen.peak(1, self._size))  # on no line once it was rehearsed

    def _in_lanes(
        self, n: int, peak: int, owners: dict[str, int], *, confirmed: bool
    ) -> tuple[int, dict[str, int], Capacity]:
        """Return the bytes of a step in lanes, their owners, and the budget of waiting lanes.

        Where the bytes that a lane touches are unknown, all those of its peak wait.
        """
        foreseen, size, budget = self.foreseen, self._size, self._budget
        lane = lane_of(foreseen, n, size, rehearsed=confirmed)
        if lane is not None:
            step, waiting = step_of(lane, foreseen, n, size, budget)
            if least(waiting) >= 0:
                owners = max(step.at_peak(), foreseen.other_peak(n, size), key=total)
                return total(owners), owners, waiting
        each = sum(count for owner, count in owners.items() if owner not in SHARED)
        left = budget - peak
        capacity = None if left >= (-(-size // n) - 1) * each else max(0, left)
        return min(budget, peak + foreseen.of_samples(size)), owners, capacity

    def rows(self, n: int = 0) -> tuple[Candidate, ...]:
        """Return the sizes worth a line in a plan: those run, the first that does not fit, and `n`.

        0 (default) is the largest.
        """
        foreseen, size = self.foreseen, self._size
        if foreseen.full_batch:
            return (Candidate(size, foreseen.peak(size, size), None),)
        fits = [k for k in doubling(size) if self.fits(k)]
        too_large = [k for k in doubling(size) if k not in fits][:1]
        return tuple(
            Candidate(k, foreseen.peak(k, size), finite(self._seconds.get(k)))
            for k in sorted({n or self.largest, size, *too_large, *(self._seconds or fits)})
        )


# A plan as the step it stands for: a forecast at the micro-batch that was chosen, as it passes.
#
# A plan has the peak and its owners. Why it is the peak, and how far below it the rest of a step
# is, follows from the lines of its forecast:
#
#     inspection │ mu_0  mu_1 │ update        at n: a_t + b_t * n bytes after every event
#
# The peak of it is the plan's. Bytes that the plan counts in addition to the lines have no position
# in time: those found by another dry run are drawn from beginning to end, and the bytes of waiting
# micro-batches as long as there are any.


def depict(foreseen: Forecast, planned: RunPlan, size: int) -> StepTimeline:
    """Return the step of a plan as it passes, by its forecast, in the order of its events.

    Its peak is what the plan predicts, or less where micro-batches wait and the peak is not in
    theirs but in the update. Where saved tensors are offloaded it has the seconds that they were
    planned with, if it was run for that.
    """
    n, memory = min(planned.micro_batch, size), planned.memory
    shown = foreseen.micro_batches if planned.passes is None else MICRO_BATCHES
    title = _title(n, size, lanes=planned.lanes, shown=shown)
    if planned.passes is not None:
        return replace(planned.passes(), title=f"{title}, saved tensors offloaded")
    parts = foreseen.phases(n, size, accumulator=planned.accumulator)
    lane = lane_of(foreseen, n, size, rehearsed=False) if planned.lanes else None
    if lane is not None:
        found, waiting = step_of(lane, foreseen, n, size, memory.budget)
        if waiting == memory.waiting_capacity and found.peak <= memory.predicted:
            parts[DIVIDED] = found
    more = max(0, memory.predicted - joined(list(parts.values())).peak)
    if more and planned.lanes:
        parts[DIVIDED] = parts[DIVIDED].plus({WAITING: more})
    elif more:
        owner = "gradients" if planned.accumulator else "activations"
        parts = {name: part.plus({owner: more}) for name, part in parts.items()}
    phases, first = list[Phase](), 0
    for name, part in parts.items():
        phases.append(Phase(name, first))
        first += len(part.events)
    return StepTimeline(title, joined(list(parts.values())), memory.budget, tuple(phases))


def _title(n: int, size: int, *, lanes: bool, shown: int) -> str:
    if n >= size:
        return f"the batch of {size} undivided"
    count = -(-size // n)
    title = f"{size} samples in {count} micro-batches of {n}"
    if lanes:
        return f"{title}, one of them and the bytes of waiting ones"
    return f"{title}, the first of them" if count > shown else title
