"""Checkpointing every so often: of a stretch of layers only what enters it is kept.

    forward    | stretch 0 | stretch 1 | stretch 2 |
    backward                             2  │ 1 again, 1 │ 0 again, 0

With n layers in sqrt(n) stretches about 2 sqrt(n) layers' results are there at a time, for one more
forward pass. It is what ``torch.utils.checkpoint`` on equal blocks gives.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import ceil

from anybatch.offloading.schedule import Trace
from benchmarks.simulators.recompute import first_in_backward, saved
from benchmarks.simulators.rewrite import Rewriter, rewrite


def sublinear(trace: Trace, stretches: int, share: float = 1.0) -> Trace:
    """Return the step in which stretches of layers are computed again, all but the last.

    Args:
        trace: the step.
        stretches: how many, of about as many bytes each; 1 changes nothing.
        share: of those that can be, how many are computed again: the first of the forward pass,
            whose results would be kept for the longest time.
    """
    cuts = _cuts(trace, stretches)
    cuts = cuts[: ceil(share * len(cuts))]
    recipes: dict[int, tuple[int, ...]] = {}
    of: dict[int, int] = {}
    inside: dict[int, list[int]] = {}
    for v in saved(trace):
        stretch = bisect_right(cuts, trace.uses[v][0])
        forward = [i for i in trace.uses[v] if not trace.functions[i].backward]
        if stretch < len(cuts) and forward[-1] < cuts[stretch]:
            inside.setdefault(stretch, []).append(v)
    for stretch, variables in inside.items():
        begin = cuts[stretch - 1] if stretch else 0
        needed = _slice(trace, range(begin, cuts[stretch]), set(variables))
        when = min(i for v in variables if (i := first_in_backward(trace, v)) is not None)
        if _as_it_was(trace, needed, when):
            recipes |= dict.fromkeys(variables, needed)
            of |= dict.fromkeys(variables, stretch)

    def remake(rewriter: Rewriter, v: int) -> None:
        made = dict(rewriter.now)
        results = {w for k in recipes[v] for w in trace.functions[k].makes}
        for k in recipes[v]:
            rewriter.again(k, results, made)
        rewriter.now |= {w: made[w] for w in inside[of[v]]}

    return rewrite(trace, recipes, remake)


def _cuts(trace: Trace, stretches: int) -> list[int]:
    """Return the functions before which one stretch ends, so that nobody writes across a cut."""
    first_backward = next(
        (i for i, f in enumerate(trace.functions) if f.backward), len(trace.functions)
    )
    made = [0] * first_backward
    for v in saved(trace):
        made[trace.uses[v][0]] += trace.size(v)
    crossed: set[int] = set()
    for v, variable in enumerate(trace.variables):
        writes = [i for i in trace.written[v] if i < first_backward]
        if writes and not variable.before:
            crossed.update(range(writes[0] + 1, writes[-1] + 1))
    so_far = list(accumulate(made))
    wanted = [so_far[-1] * k // stretches for k in range(1, stretches)] if so_far else []
    found: list[int] = []
    for count in wanted:
        cut = bisect_right(so_far, count)
        while cut in crossed and cut < first_backward:
            cut += 1
        if 0 < cut < first_backward and cut not in found:
            found.append(cut)
    return sorted(found)


def _slice(trace: Trace, stretch: range, wanted: set[int]) -> tuple[int, ...]:
    """Return the functions of a stretch on which what is wanted rests."""
    found, needed = [], set(wanted)
    for k in reversed(stretch):
        function = trace.functions[k]
        if needed.intersection(function.makes + function.writes):
            found.append(k)
            needed.update(function.reads)
    return tuple(reversed(found))


def _as_it_was(trace: Trace, recipe: tuple[int, ...], when: int) -> bool:
    """Say whether what a recipe starts from has not been written to when it runs again."""
    results = {v for k in recipe for v in trace.functions[k].makes}
    for k in recipe:
        function = trace.functions[k]
        for v in set(function.reads) - set(function.writes) - results:
            if any(k < i < when for i in trace.written[v]):
                return False
    return True
