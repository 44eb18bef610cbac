"""What it would win to let a part of a variable leave: every large one is cut into four.

A storage is one piece of memory, so no executor here could do it; this is what it would be worth.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from anybatch.offloading.schedule import Trace, Variable

PARTS = 4
WORTH = 1.03
"""Times the bound above which it is looked at: below it, nothing could win as much."""


def in_parts(trace: Trace, least: int) -> Trace:
    """Return the step in which every variable of so many bytes that may leave is cut into parts."""
    variables: list[Variable] = []
    parts: list[range] = []
    for one in trace.variables:
        count = 1 if one.stays or one.size < least else PARTS
        begin = len(variables)
        cuts = [one.size * k // count for k in range(count + 1)]
        variables += [replace(one, size=end - start) for start, end in pairwise(cuts)]
        parts.append(range(begin, begin + count))

    def cut(uses: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(part for v in uses for part in parts[v])

    functions = (
        replace(f, reads=cut(f.reads), makes=cut(f.makes), writes=cut(f.writes))
        for f in trace.functions
    )
    return Trace(tuple(variables), tuple(functions))
