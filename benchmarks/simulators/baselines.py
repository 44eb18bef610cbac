"""What others do: everything moves, nothing moves ahead, or it moves at a fixed distance.

    naive           all of a function's variables return before it, and leave after it
    on demand       the least recently used leaves when bytes are needed, and returns when used
    prefetch k      what backward needs leaves after its last forward use, returns k functions ahead
    fixed distance  what is not used for `threshold` functions leaves, returns `ahead` of its use

Distances are counted in functions of the trace; the graph of Le et al. has its own edges.

Sources: Hayakawa and Narihira, section 1 (naive) and 2; Rhu et al. 2016, "vDNN" (prefetch, k = 1);
Le et al. 2019, "Large Model Support": swapout_threshold and swapin_ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError
from anybatch.offloading.policy import too_small
from anybatch.offloading.schedule import Schedule, Stage, Trace


def naive(trace: Trace, budget: int) -> Schedule:
    """Let everything leave after every function, and wait for it.

    Raises:
        BudgetError: one function alone needs more.
    """
    draft = Draft(trace, budget)
    for function in trace.functions:
        draft.run()
        draft.evict((*function.uses, *sorted(draft.here)))
        draft.await_all()
    return draft.schedule("naive")


def on_demand(trace: Trace, budget: int) -> Schedule:
    """Let the least recently used leave when bytes are needed, and bring back what is missing.

    Raises:
        BudgetError: one function alone needs more.
    """
    draft, recent = Draft(trace, budget), dict.fromkeys(trace.before)
    for i, function in enumerate(trace.functions):
        if i:
            draft.evict(_oldest(draft, recent, function.uses))
        draft.run()
        for v in function.uses:
            recent.pop(v, None)
            recent[v] = None
        for v in trace.dies[i]:
            del recent[v]
    ends = trace.after
    draft.evict(_oldest(draft, recent, ends))
    return draft.schedule("on demand")


def _oldest(draft: Draft, recent: Iterable[int], uses: Iterable[int]) -> Iterator[int]:
    """Yield what must leave for the next function, the least recently used first."""
    needed = set(uses)
    waiting = sum(draft.trace.size(v) for v in draft.leaving if v not in needed)
    short = draft.held - waiting - draft.budget
    short += draft.trace.bytes_of(needed - draft.here)
    for v in recent:
        if short <= 0:
            return
        one = draft.trace.variables[v]
        if v in draft.here and v not in draft.leaving and v not in needed and not one.stays:
            short -= one.size
            yield v


def prefetch(trace: Trace, budget: int, k: int = 1) -> Schedule:
    """Let what is needed in backward leave after its last forward use, and return `k` ahead.

    A variable's longest time without a use is the one from forward to backward.

    Args:
        trace: the step.
        budget: bytes.
        k: functions that a return is ahead of its use.

    Raises:
        BudgetError: what comes back ahead, or is not needed in backward, does not fit.
    """
    gaps = [max(_unused(trace, v), key=_length, default=(0, 0)) for v in _moving(trace)]
    pairs = zip(_moving(trace), gaps, strict=True)
    offloaded = [(v, last, following) for v, (last, following) in pairs if following - last > k + 1]
    return _at_distance(trace, budget, offloaded, k, f"prefetch {k} ahead")


def fixed_distance(trace: Trace, budget: int, threshold: int, ahead: int) -> Schedule:
    """Let what is not used for `threshold` functions leave, and return `ahead` of its use.

    Args:
        trace: the step.
        budget: bytes.
        threshold: functions between two uses, from which on a variable leaves.
        ahead: functions that a return is ahead of its use.

    Raises:
        BudgetError: these two do not fit; others may.
    """
    offloaded = [
        (v, last, following)
        for v in _moving(trace)
        for last, following in _unused(trace, v)
        if following - last > max(threshold, ahead + 1)
    ]
    return _at_distance(trace, budget, offloaded, ahead, f"distance {threshold}, {ahead} ahead")


def _moving(trace: Trace) -> list[int]:
    return [v for v, variable in enumerate(trace.variables) if not variable.stays]


def _unused(trace: Trace, v: int) -> Iterator[tuple[int, int]]:
    ends = [len(trace.functions)] if v in trace.after else []
    return pairwise([*trace.uses[v], *ends])


def _length(gap: tuple[int, int]) -> int:
    return gap[1] - gap[0]


def _at_distance(
    trace: Trace, budget: int, offloaded: list[tuple[int, int, int]], ahead: int, policy: str
) -> Schedule:
    """Return the schedule in which variables leave after a use and return `ahead` of the next."""
    leaves: dict[int, list[int]] = {}
    returns: dict[int, list[int]] = {}
    for v, last, following in offloaded:
        leaves.setdefault(last, []).append(v)
        returns.setdefault(following - ahead, []).append(v)
    draft = Draft(trace, budget)
    for i in range(len(trace.functions)):
        draft.bring(returns.get(i, ()))
        draft.run()
        draft.evict(leaves.get(i, ()))
    return draft.schedule(policy)


# Schedule under construction: resident variables, evictions in progress, and stages so far.
#
# Policies that go through the functions one by one call `bring` and `evict`; a draft counts bytes,
# and where they run short it waits for the oldest copy that has begun, as the paper does (Fig. 2b).
# A variable that is needed again before its copy was awaited has never been evicted.


class Draft:
    """The beginning of a schedule.

    Args:
        trace: the step.
        budget: bytes.

    Attributes:
        stage: the stage that is being written.
        here: variables on the device, in eviction or not.
        leaving: variables that may be freed after their copy, the oldest first.
        held: bytes on the device.
    """

    def __init__(self, trace: Trace, budget: int) -> None:
        self.trace, self.budget = trace, budget
        self.stage = 0
        self.here = set(trace.before)
        self.leaving: dict[int, None] = {}
        self.held = trace.bytes_of(self.here)
        self._copied: set[int] = set()
        self._frees: list[int] = []
        self._ins: list[int] = []
        self._stages: list[Stage] = []

    def bring(self, variables: Iterable[int]) -> None:
        """Make variables resident at this stage, and cancel their evictions in progress."""
        wanted = list(dict.fromkeys(variables))
        for v in wanted:
            self.leaving.pop(v, None)
        for v in wanted:
            if v not in self.here:
                self._make_space(self.trace.size(v))
                self._ins.append(v)
                self.here.add(v)

    def run(self) -> None:
        """Run the function of this stage; then the next stage begins."""
        i, trace = self.stage, self.trace
        function = trace.functions[i]
        self.bring(function.reads)
        self._make_space(trace.bytes_of(function.makes))
        self.here.update(function.makes)
        self._copied.difference_update(function.writes)
        dead = set(trace.dies[i])
        self.here -= dead
        self.held -= trace.bytes_of(dead)
        self._close()

    def evict(self, variables: Iterable[int]) -> None:
        """Begin copies after the latest function; skip variables that are never evicted."""
        outs = []
        for v in dict.fromkeys(variables):
            if v in self.here and v not in self.leaving and not self.trace.variables[v].stays:
                self.leaving[v] = None
                if v not in self._copied:
                    outs.append(v)
        self._copied.update(outs)
        last = self._stages[-1]
        self._stages[-1] = Stage(last.frees, last.ins, last.outs + tuple(outs))

    def await_all(self) -> None:
        """Free at this stage all variables that are being evicted."""
        for v in list(self.leaving):
            self._free(v)

    def schedule(self, policy: str) -> Schedule:
        """Bring in the variables needed at the end, and return the schedule."""
        self.bring(self.trace.after)
        self._close()
        return Schedule(policy, self.budget, tuple(self._stages))

    def _make_space(self, count: int) -> None:
        self.held += count
        while self.held > self.budget:
            if not self.leaving:
                raise over_budget(self.trace, self.budget, self.stage, self.held)
            self._free(next(iter(self.leaving)))

    def _free(self, v: int) -> None:
        del self.leaving[v]
        self.here.remove(v)
        self.held -= self.trace.size(v)
        self._frees.append(v)

    def _close(self) -> None:
        self._stages.append(Stage(tuple(self._frees), tuple(self._ins)))
        self._frees, self._ins = [], []
        self.stage += 1


def over_budget(trace: Trace, budget: int, i: int, held: int) -> BudgetError:
    """Return the error for a policy that evicts too few bytes where another may suffice."""
    if trace.floor > budget:
        return too_small(trace, budget)
    return BudgetError(
        f"a policy must evict enough for each function, and at stage {i} this one holds "
        f"{show_bytes(held)} of {show_bytes(budget)}: evict more, or prefetch less",
        needed=held,
        budget=budget,
    )
