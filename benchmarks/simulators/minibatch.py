"""Which algorithm for each layer, and which mini-batch: the guide's 0-1 program.

Every layer was measured with every algorithm: T_kl seconds and M_kl bytes. One is chosen for each,
so that the step is fastest and the bytes fit in what features and parameters leave:

    minimise  sum x_kl T_kl      with  sum x_kl M_kl <= M_bound,  one l for each k         (Eq. 6)

That is a knapsack with multiple choice, which `anybatch.conv.divide` solves exactly. The sum is
right where every layer keeps a workspace of its own. Where they run one after another in the same
buffer, only the largest counts, and there is nothing to trade: each takes its fastest algorithm
within the bound.

The mini-batch is part of the choice. A large one fills the device, and workspaces have no room:

    samples   M_bound         seconds of 128 samples
      128     ####            1.3       GEMM everywhere
       64     ########        1.0       two layers by FFT        <- fastest
       32     ##########      1.1       all by FFT, but small

So the program is solved for each size, and the one that is fastest for a sample is taken.

Source: guide, sections 3.1.3 (Equation 6) and 3.1.4 ("permit X_mini reduction").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from anybatch.conv.divide import front, share
from anybatch.core.plan_sections import Configuration, KernelPart
from anybatch.core.units import show_bytes, show_samples
from anybatch.errors import BudgetError
from anybatch.tools.gpus import positive_integer

Measured = Mapping[str, Sequence[KernelPart]]
"""Layer -> what was measured of it: an algorithm on so many samples, its seconds and workspace."""


@dataclass(frozen=True)
class Choice:
    """Algorithms of all layers at one mini-batch.

    Attributes:
        samples: X_mini.
        layers: layer -> its algorithm; a division of the mini-batch where that was allowed.
        bound: bytes that were there for workspaces.
        adds: workspaces of layers add up; otherwise the largest counts.
    """

    samples: int
    layers: Mapping[str, Configuration]
    bound: int
    adds: bool

    @property
    def seconds(self) -> float:
        """Of all layers."""
        return sum(one.seconds for one in self.layers.values())

    @property
    def per_sample(self) -> float:
        """Seconds over samples."""
        return self.seconds / self.samples

    @property
    def workspace(self) -> int:
        """Bytes of all workspaces, or of the largest."""
        each = [one.workspace for one in self.layers.values()]
        return sum(each) if self.adds else max(each, default=0)

    def __str__(self) -> str:
        place = "of their own" if self.adds else "in one buffer"
        lines = [
            f"{show_samples(self.samples)} in {self.seconds:.3g} s, workspaces {place}: "
            f"{show_bytes(self.workspace)} of {show_bytes(self.bound)}"
        ]
        return "\n".join(lines + [f"  {name}: {one}" for name, one in self.layers.items()])


@dataclass(frozen=True)
class Sweep:
    """Result for each mini-batch: the choices that fit, and the missing bytes of the others.

    Attributes:
        choices: in the order of their samples, those that fit.
        refused: samples -> bytes that are missing.
    """

    choices: tuple[Choice, ...]
    refused: Mapping[int, int]

    @property
    def best(self) -> Choice:
        """The fastest for a sample; the larger mini-batch of two that are as fast."""
        return min(self.choices, key=lambda one: (one.per_sample, -one.samples))


def choose(
    measured: Measured, samples: int, bound: int, *, adds: bool = True, divided: bool = False
) -> Choice:
    """Return the fastest algorithms with workspaces that fit in the bound: Equation 6.

    Args:
        measured: of every layer.
        samples: X_mini.
        bound: M_bound, bytes for workspaces.
        adds: every layer has a workspace of its own. Default True, as in the guide; False: all use
            the same buffer.
        divided: a layer may take the mini-batch in parts, as u-cuDNN has it. Default False.

    Raises:
        BudgetError: no choice fits.
        ValueError: a layer was not measured at this mini-batch.
    """
    positive_integer(samples=samples)
    fronts = {name: _front(name, parts, samples, divided) for name, parts in measured.items()}
    least = [one[0].workspace for one in fronts.values()]
    needed = sum(least) if adds else max(least, default=0)
    if needed > bound:
        raise BudgetError(
            f"the workspaces of {len(fronts)} layers must fit beside what else there is, and for "
            f"{show_samples(samples)} they need at least {show_bytes(needed)}, and "
            f"{show_bytes(bound)} is left: take a smaller mini-batch",
            needed=needed,
            budget=bound,
        )
    if adds:
        found = share(list(fronts.values()), bound)
    else:
        found = [[c for c in one if c.workspace <= bound][-1] for one in fronts.values()]
    return Choice(samples, dict(zip(fronts, found, strict=True)), bound, adds)


def _front(
    name: str,
    parts: Sequence[KernelPart],
    samples: int,
    divided: bool,  # noqa: FBT001
) -> list[Configuration]:
    """Return the Pareto front of a layer's configurations, the fastest last."""
    found = front([p for p in parts if divided or p.size == samples], samples)
    if not found:
        sizes = sorted({part.size for part in parts})
        raise ValueError(
            f"every layer must be measured at every mini-batch, and {name!r} was at {sizes}, not "
            f"at {samples}: measure it, or leave that size out"
        )
    return found


def sweep(
    measured: Measured,
    sizes: Iterable[int],
    bound: Callable[[int], int],
    *,
    adds: bool = True,
    divided: bool = False,
) -> Sweep:
    """Solve Equation 6 for each mini-batch.

    Args:
        measured: of every layer, at each of the sizes.
        sizes: mini-batches "that can attain good accuracy".
        bound: samples -> M_bound, such as `Network.bound` (Equation 5) or what a trace leaves.
        adds: see `choose`.
        divided: see `choose`.

    Raises:
        BudgetError: none of them fits.
        ValueError: there is no size, or a layer was not measured at one.

    Source: guide, end of section 3.1.3.
    """
    choices: list[Choice] = []
    refused: dict[int, int] = {}
    error: BudgetError | None = None
    for n in sorted(set(sizes)):
        try:
            choices.append(choose(measured, n, bound(n), adds=adds, divided=divided))
        except BudgetError as caught:
            refused[n] = caught.needed - caught.budget
            error = error or caught  # of the smallest
    if not choices:
        raise error or ValueError("sizes must hold at least one mini-batch, and there is none")
    return Sweep(tuple(choices), refused)
