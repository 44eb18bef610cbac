"""Schedule under construction: resident variables, evictions in progress, and stages so far.

Policies that go through the functions one by one call `bring` and `evict`; a draft counts bytes,
and where they run short it waits for the oldest copy that has begun, as the paper does (Fig. 2b).
A variable that is needed again before its copy was awaited has never been evicted.
"""

from __future__ import annotations

from collections.abc import Iterable

from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError
from anybatch.offload.schedule import Schedule, Stage
from anybatch.offload.trace import Trace


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
        self._copied = set(trace.hosted)
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
        """Evict the host's variables, bring in those needed at the end; return the schedule."""
        self.evict(v for v in self.trace.hosted if v in self.here)
        for v in [v for v in self.trace.hosted if v in self.leaving]:
            self._free(v)
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


def too_small(trace: Trace, budget: int) -> BudgetError:
    """Return the error for one function that does not fit in the budget by itself."""
    return BudgetError(
        f"a step needs {show_bytes(trace.floor)} on the device even with everything else "
        f"offloaded, and its budget is {show_bytes(budget)}: give as much, or a smaller "
        "micro-batch",
        needed=trace.floor,
        budget=budget,
    )


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
