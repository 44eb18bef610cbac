"""A second count of the bytes of a step, that shares nothing with the meter it judges.

A meter under torch's dispatcher, and a forecast made with the same meter, could be wrong alike. The
profiler hears of every block from the allocator itself and knows no tensor. The sum of the blocks,
from a known start, is what torch holds; taken where a kernel ends it is what the meter claims to
count. Between these moments it is more: what a kernel takes and gives back inside itself, such as a
copy in another layout, is no live tensor.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile

MEMORY = "[memory]"  # the profiler's name for a block that was taken or given back


def allocated_peaks(
    body: Callable[[], object], before: int, kernels: Iterable[str]
) -> tuple[int, int]:
    """The most bytes that torch's CPU allocator had handed out: at ends of kernels, and ever.

    Args:
        body: what is run.
        before: bytes that were handed out when it began and that count.
        kernels: names of the kernels, such as "aten.addmm.default".
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        body()
    assert profiler.profiler is not None
    events = list(profiler.profiler.kineto_results.events())
    names = {"::".join(name.split(".")[:2]) for name in kernels}
    changes = [(e.start_ns(), 0, e.nbytes()) for e in events if e.name() == MEMORY]
    changes += [(end, 1, 0) for end in _ends([e for e in events if e.name() in names])]
    changes.sort()
    live = list(accumulate((change for *_, change in changes), initial=before))[1:]
    after = [count for count, (_, end, _) in zip(live, changes, strict=True) if end]
    return max(after, default=before), max(live, default=before)


def _ends(kernels: list[Any]) -> list[int]:
    """When kernels end that are not a part of another one, in nanoseconds."""
    ends: list[int] = []
    for kernel in sorted(kernels, key=lambda e: (e.start_ns(), -e.duration_ns())):
        if not ends or kernel.start_ns() >= ends[-1]:
            ends.append(kernel.start_ns() + kernel.duration_ns())
    return ends
