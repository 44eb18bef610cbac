"""Seconds below which no schedule of a trace can be, on a link: a linear program.

What a schedule does is looked at when certain functions begin (all of them, or some). A variable
that is not used there may be here in part, x, and on the host in part, o. The program knows no more
of a schedule than this, and every schedule obeys it, so its optimum is a lower bound:

    minimise   sum_k D_k                        seconds between two looks
    D_k      >= seconds of the functions between them
    x + o    >= 1                               every byte is somewhere
    sum size * x + what is used or stays <= budget
    sum size * (growth of o) <= D_k * out       sum size * (growth of x) <= D_k * back

`o` grows from the last write of a variable on; a later one makes it 0 again. Small variables are
left out, as if moving them were free: that, too, only lowers the bound.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from anybatch.core.plan_sections import Link
from anybatch.offloading.schedule import Trace


@dataclass
class _Rows:
    """Rows ``sum coefficient * column <= bound`` of a sparse program."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], bound: float) -> None:
        for column, value in terms:
            self.row.append(len(self.bound))
            self.column.append(column)
            self.value.append(value)
        self.bound.append(bound)


def lower_bound(
    trace: Trace, budget: int, link: Link, *, looks: int | None = None, least: int = 0
) -> float:
    """Return seconds that no schedule within `budget` can go below.

    Args:
        trace: the step, with seconds.
        budget: bytes.
        link: between device and host.
        looks: at how many functions memory is looked at; None (default) for all.
        least: bytes below which a variable moves for nothing.

    Raises:
        ValueError: no schedule exists at all.
    """
    return _Program(trace, budget, link, looks, least).solved()


class _Program:
    """Columns and rows for one trace."""

    def __init__(
        self, trace: Trace, budget: int, link: Link, looks: int | None, least: int
    ) -> None:
        count = len(trace.functions)
        self.trace, self.link, self.least = trace, link, least
        self.at = _chosen(trace, count if looks is None else looks)
        seconds = np.array([function.seconds for function in trace.functions])
        parts = np.split(seconds, self.at[1:])
        self.lower = [float(part.sum()) for part in parts]  # columns 0.. are D_k
        self.upper: list[float | None] = [None] * len(parts)
        self.rows = _Rows()
        self.unit = float(budget)
        self.memory: list[list[tuple[int, float]]] = [[] for _ in self.at]
        self.out: list[list[tuple[int, float]]] = [[] for _ in self.at]
        self.back: list[list[tuple[int, float]]] = [[] for _ in self.at]
        self.fixed = [0.0] * len(self.at)
        for v in range(len(trace.variables)):
            self._variable(v)
        for k in range(len(self.at)):
            self.rows.add(self.memory[k], (budget - self.fixed[k]) / self.unit)
            self._links(k)

    def solved(self) -> float:
        """Return the optimum."""
        columns, rows = len(self.lower), self.rows
        shape = (len(rows.bound), columns)
        matrix = coo_array((rows.value, (rows.row, rows.column)), shape=shape).tocsr()
        cost = np.zeros(columns)
        cost[: len(self.at)] = 1.0
        bounds = list(zip(self.lower, self.upper, strict=True))
        found = linprog(cost, A_ub=matrix, b_ub=rows.bound, bounds=bounds, method="highs")
        if found.status != 0:
            raise ValueError(f"the program must have an optimum, and it has none: {found.message}")
        return float(found.fun)

    def _column(self) -> int:
        self.lower.append(0.0)
        self.upper.append(1.0)
        return len(self.lower) - 1

    def _links(self, k: int) -> None:
        out = [(c, value * self.unit / self.link.out) for c, value in self.out[k]]
        back = [(c, value * self.unit / self.link.back) for c, value in self.back[k]]
        for terms in (out, back) if self.link.duplex else (out + back,):
            if terms:
                self.rows.add([*terms, (k, -1.0)], 0.0)

    def _variable(self, v: int) -> None:
        """Add what one variable may do between its uses."""
        one, trace = self.trace.variables[v], self.trace
        uses = [-1, *trace.uses[v]] if one.before else list(trace.uses[v])
        share = one.size / self.unit
        if one.stays:
            last = len(trace.functions) if one.after else uses[-1] + 1
            for k in range(bisect_left(self.at, uses[0]), bisect_left(self.at, last)):
                self.fixed[k] += one.size
            return
        for i in trace.uses[v]:
            k = bisect_left(self.at, i)
            if k < len(self.at) and self.at[k] == i:
                self.fixed[k] += one.size
        if one.size < self.least or not one.size:
            return
        copied: int | None = None  # the column of o at the look before, None for 0
        ends = [*uses[1:], len(trace.functions)] if one.after else uses[1:]
        for last, following in zip(uses, ends, strict=False):
            if last < 0 or v in trace.functions[last].writes + trace.functions[last].makes:
                copied = None
            copied = self._gap(share, last, following, copied)

    def _gap(self, share: float, last: int, following: int, copied: int | None) -> int | None:
        """Add the time between two uses; the return is over when the second begins."""
        here: int | None = None  # the column of x at the look before, None for 1
        looks = range(bisect_right(self.at, last), bisect_left(self.at, following))
        for k in looks:
            x, o, grown = self._column(), self._column(), self._column()
            before = [(copied, -1.0)] if copied is not None else []
            self.rows.add([(o, 1.0), *before, (grown, -1.0)], 0.0)
            self.out[k - 1].append((grown, share))
            self.rows.add([(x, -1.0), (o, -1.0)], -1.0)
            if here is not None:
                self._returns(k - 1, x, here, share)
            self.memory[k].append((x, share))
            here, copied = x, o
        if here is not None:
            self._returns(looks[-1], None, here, share)
        return copied

    def _returns(self, k: int, x: int | None, before: int, share: float) -> None:
        """Let x grow between two looks; None for 1."""
        grown = self._column()
        now, bound = ([(x, 1.0)], 0.0) if x is not None else ([], -1.0)
        self.rows.add([*now, (before, -1.0), (grown, -1.0)], bound)
        self.back[k].append((grown, share))


def _chosen(trace: Trace, looks: int) -> list[int]:
    """Return functions to look at: of each stretch the one at which most is live, or most is used.

    Beside the first, so that the step begins with a look.
    """
    count = len(trace.functions)
    if looks >= count:
        return list(range(count))
    used = [trace.bytes_of(function.uses) for function in trace.functions]
    edges = np.linspace(0, count, max(looks // 2, 1) + 1).astype(int)
    chosen = {0}
    for a, b in pairwise(edges):
        for most in (used, trace.live):
            chosen.add(max(range(a, b), key=most.__getitem__))
    return sorted(chosen)
