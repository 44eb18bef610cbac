"""What each policy chooses for a kernel, and for a network, from the parts that were measured.

Every policy reads the same measurements, so what is compared are choices alone:

    undivided   parts of all samples      powerOfTwo   1, 2, 4, ... and all      all   every number
    WR   each kernel within a workspace of its own      WD   all kernels within one total

As in the library, a choice other than torch's kernel counts where it is clearly faster than that:
the least of many noisy figures is always a little less. And where the best is not twice as fast, it
must win a duel, run in turns with torch's, or nothing that is not twice as fast is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from anybatch.conv.chooser import certain, worthwhile
from anybatch.conv.convolutions import Policy
from anybatch.conv.divide import share
from anybatch.conv.measure import Costs
from anybatch.core.plan_sections import Configuration
from benchmarks.ucudnn.listen import RecordedKernel

MIB = 1 << 20
WORKSPACES = (8 * MIB, 64 * MIB, 512 * MIB)
UNDIVIDED: Policy = "undivided"
POWERS: Policy = "powerOfTwo"
ALL: Policy = "all"
SOLVED = 5
"""Times that a knapsack is solved, of which the median counts."""

Fronts = dict[str, list[Configuration]]


@dataclass(frozen=True)
class Kernel:
    """A kernel of a network with what it may be.

    Attributes:
        recorded: the kernel, as it was recorded.
        fronts: policy -> its configurations in the order of their workspace; torch's own is first.
    """

    recorded: RecordedKernel
    fronts: Fronts = field(default_factory=dict)

    @property
    def own(self) -> Configuration:
        """All samples by torch's own kernel."""
        return self.fronts[UNDIVIDED][0]

    def within(self, policy: str, workspace: int) -> Configuration:
        """Return the fastest configuration of a policy within a workspace: WR."""
        return [c for c in self.fronts[policy] if c.workspace <= workspace][-1]


@dataclass(frozen=True)
class Took:
    """Seconds that choosing took: measuring, and making fronts of what was measured."""

    measuring: float
    solving: float
    parts: int


def make_fronts(
    costs: Costs, kernels: Sequence[Kernel], size: int, policy: str, limit: int
) -> Took:
    """Measure what a policy asks for, and give every kernel its front; `undivided` comes of it."""
    measuring, solving, count = 0.0, 0.0, 0
    for kernel in kernels:
        start = perf_counter()
        parts = costs.parts(kernel.recorded.problem, size, policy, limit)
        measured = perf_counter()
        found = worthwhile(parts, size, limit)
        solved = perf_counter()
        problem = kernel.recorded.problem
        kernel.fronts[policy] = certain(costs, problem, found)
        dueled = perf_counter()
        undivided = worthwhile([part for part in parts if part.size == size], size, limit)
        kernel.fronts.setdefault(UNDIVIDED, certain(costs, problem, undivided))
        measuring, solving = measuring + measured - start, solving + solved - measured
        measuring, count = measuring + dueled - solved, count + len(parts)
    return Took(measuring, solving, count)


def each_within(kernels: Sequence[Kernel], policy: str, workspace: int) -> list[Configuration]:
    """Return a configuration for every kernel, as often as it comes: WR."""
    return [k.within(policy, workspace) for k in kernels for _ in range(k.recorded.count)]


@dataclass(frozen=True)
class Shared:
    """A total that was divided among the kernels of a network: WD.

    Attributes:
        chosen: a configuration for every kernel, as often as it comes.
        variables: of the knapsack.
        solving: seconds.
    """

    chosen: list[Configuration]
    variables: int
    solving: float


def all_within(kernels: Sequence[Kernel], policy: str, total: int) -> Shared:
    """Divide a total among the kernels of a network: WD."""
    fronts = [k.fronts[policy] for k in kernels for _ in range(k.recorded.count)]
    timings = []
    for _ in range(SOLVED):
        start = perf_counter()
        chosen = share(fronts, total)
        timings.append(perf_counter() - start)
    return Shared(chosen, sum(map(len, fronts)), median(timings))


def seconds_of(chosen: Sequence[Configuration]) -> float:
    """Return the seconds of all of them."""
    return sum(c.seconds for c in chosen)


def bytes_of(chosen: Sequence[Configuration]) -> int:
    """Return the workspace of all of them together."""
    return sum(c.workspace for c in chosen)
