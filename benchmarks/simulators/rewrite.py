"""A step in which some results of the forward pass are computed again: another trace.

    before   f makes v ──────────────────── v is kept ─────────────────── b reads v
    after    f makes v, v dies                       f again makes v' ─── b reads v'

Whatever plans a trace plans the rewritten one, and knows nothing of recomputation. What a function
updates beside its result (running statistics of BatchNorm) is not updated again.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

from anybatch.offloading.schedule import Function, Trace, Variable


class Rewriter:
    """The functions of a step so far, and what stands for which variable now.

    Args:
        trace: the step as it was.

    Attributes:
        now: variable -> what has been made again in its place.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.now: dict[int, int] = {}
        self._variables: list[Variable] = list(trace.variables)
        self._functions: list[Function] = []

    def keep(self, function: Function) -> None:
        """Take a function over, reading what has been made again."""
        self._functions.append(
            replace(
                function,
                reads=tuple(self.now.get(v, v) for v in function.reads),
                writes=tuple(self.now.get(v, v) for v in function.writes),
            )
        )

    def again(self, k: int, wanted: set[int], made: dict[int, int]) -> None:
        """Run function `k` of the forward pass again.

        Args:
            k: the function.
            wanted: of what it makes or writes to, what is wanted.
            made: what has been made again already; takes what it makes.
        """
        function = self.trace.functions[k]
        fresh = [v for v in function.makes if v in wanted]
        made |= {v: self._fresh(v) for v in fresh}
        updates = set(function.writes) - wanted
        reads = [made.get(v, v) for v in function.reads if v not in updates]
        self._functions.append(
            replace(
                function,
                reads=tuple(reads),
                makes=tuple(made[v] for v in fresh),
                writes=tuple(made[v] for v in function.writes if v in wanted),
                backward=True,
                again=True,
            )
        )

    def rewritten(self) -> Trace:
        """Return the new step."""
        return Trace(tuple(self._variables), tuple(self._functions))

    def _fresh(self, v: int) -> int:
        one = self.trace.variables[v]
        self._variables.append(replace(one, name=f"{one.name} again", before=False, after=False))
        return len(self._variables) - 1


def rewrite(
    trace: Trace, dropped: Container[int], remake: Callable[[Rewriter, int], None]
) -> Trace:
    """Return the step in which variables are dropped after the forward pass and made again.

    Args:
        trace: the step.
        dropped: the variables.
        remake: is called with a variable before the first function of backward that reads it, and
            must make it in `Rewriter.now`.
    """
    rewriter = Rewriter(trace)
    for function in trace.functions:
        if function.backward:
            for v in function.reads:
                if v in dropped and v not in rewriter.now:
                    remake(rewriter, v)
        rewriter.keep(function)
    return rewriter.rewritten()
