"""Choice of a configuration for every kernel: at its first call, or later on request.

    at once     a kernel is measured when it is called for the first time
    waiting     it is torch's own until then, and recorded; `choose` measures all recorded ones

Measuring needs memory of its own, and time. A step within a budget has neither, so there kernels
wait.

Source: u-cuDNN, section III-A.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from anybatch.conv.algorithms import NATIVE, run
from anybatch.conv.dispatch import Strides, untouched
from anybatch.conv.divide import Key, Network, front
from anybatch.conv.fourier import HALVES
from anybatch.conv.measure import DUELS, Costs
from anybatch.conv.problem import Problem
from anybatch.core import accelerator
from anybatch.core.oom import out_of_memory
from anybatch.core.plan_sections import Configuration, KernelPart
from anybatch.core.units import show_bytes
from anybatch.memory.meter import within_kernel

GAIN = 0.9
"""A division must take no more than this share of the seconds of torch's kernel: in a network the
work around a kernel costs a little more than where it is measured by itself."""

CLEAR = 0.5
"""The share of the seconds of torch's kernel below which there is no doubt."""

SHARE = 0.25
"""Of the seconds that are left for measuring, those of one kernel if their number is unknown."""


@dataclass(frozen=True)
class Chosen:
    """How a kernel is computed.

    Attributes:
        configurations: its divisions; several where a network has several such layers, each with a
            share of its own.
        seconds: that torch's own kernel takes.
    """

    configurations: tuple[Configuration, ...]
    seconds: float


@dataclass
class Convolutions:
    """Settings of `convolutions`, and its choices so far.

    Attributes:
        workspace: bytes that a kernel may allocate in addition to its operands and its result; if
            `shared`, bytes for all kernels together.
        policy: which micro-batches are measured.
        shared: the workspace is divided among the kernels of a network.
        nan: "spread" or "local": what one value that is not finite does to a result.
        chosen: kernel and samples -> how it is computed.
    """

    workspace: int
    policy: str
    shared: bool = False
    nan: str = "spread"
    chosen: dict[Key, Chosen] = field(default_factory=dict)

    @property
    def configurations(self) -> list[Configuration]:
        """Return the divisions of all kernels."""
        return [one for found in self.chosen.values() for one in found.configurations]

    def __str__(self) -> str:
        """Return a line for each kernel."""
        return "\n".join(
            f"{problem}, {size} samples: {configuration}{_gain(configuration, found.seconds)}"
            for (problem, size), found in self.chosen.items()
            for configuration in found.configurations
        )


def _gain(configuration: Configuration, own: float) -> str:
    if not configuration.divided:
        return ""
    space = show_bytes(configuration.workspace)
    return f", {own / configuration.seconds:.1f} times as fast, {space}"


class Chooser:
    """Chooses a configuration for every kernel, and runs it.

    Args:
        found: the decisions.
        costs: measurements; None: no more are made.
        seconds: that measuring may go on for, of all kernels together.

    Attributes:
        requested: bytes of workspace as the user set them; `limit` lowers those in `found`.
        left: calls that are torch's for ever, as `dispatch.Kernels` marks them.
    """

    def __init__(self, found: Convolutions, costs: Costs | None, seconds: float) -> None:
        self.found, self._costs, self._left = found, costs, seconds
        self.requested = found.workspace
        self._lock = threading.RLock()
        self._waiting = 0
        self._noted: dict[Key, None] = {}
        self._own: dict[Key, float] = {}
        self.left: set[Any] = set()
        self._network = Network(found.workspace, self._of_network) if found.shared else None

    def __call__(
        self,
        problem: Problem,
        operands: tuple[Tensor, Tensor],
        bias: Tensor | None,
        strides: Strides,
    ) -> Tensor | None:
        """Compute a kernel, or return None to have torch compute it."""
        chosen = self._chosen((problem, len(operands[0])))
        if chosen is None or not chosen.divided:
            return None
        # Products with the zeros of a border spread infinities, too
        # (test_an_infinity_meets_no_zeros_of_a_border_on_request).
        ours = any(part.algorithm != NATIVE for part in chosen.parts)
        if ours and self.found.nan == "local" and spreads(problem, operands):
            return None
        first, size = operands[0], len(operands[0])
        own = prod(problem.result(size)) * first.element_size()
        with within_kernel(first.device, own + chosen.workspace):
            return run(problem, chosen, operands, strides(), bias)

    def leaves(self, key: Key) -> bool:
        """Say whether a kernel is torch's own from here on."""
        if self._network is not None:
            return False
        choice = self.found.chosen.get(key)
        return self._costs is None if choice is None else not choice.configurations[0].divided

    @property
    def measures(self) -> bool:
        """Return whether new kernels are measured, or only those of a plan are computed."""
        return self._costs is not None

    @property
    def most(self) -> int:
        """Return the most bytes of workspace that any kernel may use."""
        return self.found.workspace if self._costs is not None else self.used(self.found.chosen)

    def limit(self, workspace: int) -> None:
        """Limit the workspace of each kernel to so many bytes, and drop the choices that exceed it.

        With none at all every kernel is torch's own, and nothing is measured.
        """
        with self._lock:
            self.found.workspace = workspace
            every = self.found.chosen
            over = [key for key in every if self.used([key]) > workspace]
            for key in over:
                del every[key]

    def used(self, keys: Iterable[Key]) -> int:
        """Return the most bytes of workspace that any of some kernels takes, as was chosen."""
        every = [self.found.chosen[key] for key in keys if key in self.found.chosen]
        return max((c.workspace for one in every for c in one.configurations), default=0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure nothing in the body: unmeasured kernels are torch's own, and recorded.

        Those of a network that shares its workspace are divided when it has been recorded, as ever.
        """
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def choose(self, keys: Iterable[Key] | None = None) -> None:
        """Measure and choose unmeasured kernels, each in its share of the remaining seconds.

        Args:
            keys: kernels. Default None: those that were noted.
        """
        with self._lock:
            if self._network is not None or self._costs is None or not self.found.workspace:
                return
            noted = list(self._noted)
            todo = [
                key for key in (noted if keys is None else keys) if key not in self.found.chosen
            ]
            for place, key in enumerate(todo):
                self._choose(key, self._left / (len(todo) - place))
            self.forget(todo if keys is not None else noted)

    def forget(self, keys: Iterable[Key] | None = None) -> None:
        """Forget that kernels were noted; all of them by default."""
        with self._lock:
            for key in list(self._noted) if keys is None else keys:
                self._noted.pop(key, None)

    def _chosen(self, key: Key) -> Configuration | None:
        choice = self.found.chosen.get(key) if self._network is None else None
        if choice is not None:
            return choice.configurations[0]
        with self._lock:
            if self._network is not None:
                return self._of_pass(self._network, key)
            if key not in self.found.chosen:
                # While a graph of the device is captured nothing can be measured.
                captured = accelerator.of(key[0].device).capturing
                if self._costs is None or not self.found.workspace or captured:
                    return None
                if self._waiting:
                    self._noted[key] = None
                    return None
                self._choose(key, SHARE * self._left)
            return self.found.chosen[key].configurations[0]

    def _of_pass(self, network: Network, key: Key) -> Configuration | None:
        before = network.shares
        found = network.next(key)
        if network.shares is not before:
            for one, shares in network.shares.items():
                self.found.chosen[one] = Chosen(tuple(shares), self._own[one])
        return found

    def _choose(self, key: Key, seconds: float) -> None:
        self.found.chosen[key] = Chosen((self._front(key, seconds)[-1],), self._own[key])

    def _of_network(self, keys: Iterable[Key]) -> dict[Key, list[Configuration]]:
        """Return the fronts of the kernels of a network."""
        every = list(keys)
        return {
            key: self._front(key, self._left / (len(every) - place))
            for place, key in enumerate(every)
        }

    def _front(self, key: Key, seconds: float) -> list[Configuration]:
        """Return the candidates for a kernel: torch's own, and the clearly faster configurations.

        If memory does not suffice to measure a kernel, it stays torch's own.
        """
        begin = perf_counter()
        try:
            found, self._own[key] = self._measured(key, seconds)
        except Exception as error:
            if not out_of_memory(error):
                raise
            found, self._own[key] = [Configuration((KernelPart(key[1], NATIVE, 0.0, 0),))], 0.0
        self._left = max(0.0, self._left - (perf_counter() - begin))
        return found

    def _measured(self, key: Key, seconds: float) -> tuple[list[Configuration], float]:
        """Return the same, and the seconds of torch's own."""
        assert self._costs is not None
        problem, size = key
        limit, begin = self.found.workspace, perf_counter()
        with torch.no_grad(), untouched():
            parts = self._costs.parts(problem, size, self.found.policy, limit, seconds)
            faster = worthwhile(parts, size, limit)
            left = seconds - (perf_counter() - begin)
            found = certain(self._costs, problem, faster, left)
        return found, own_of(parts, size).seconds


def spreads(problem: Problem, operands: tuple[Tensor, Tensor]) -> bool:
    """Return whether spectra of operands may be infinite or NaN in places where sums are not.

    One pass over each operand, without memory. On a GPU the host waits for it.
    """
    largest = 1.0
    for one in operands:
        # At most the sum of all that one frequency adds up, over channels and over places.
        ends = [abs(float(end)) for end in torch.aminmax(one)]  # NaN where any value is
        largest *= max(ends) if ends[0] == ends[0] else inf
        largest *= one[0].numel() if problem.kernel != "filter" else one.numel()
    wide = torch.float32 if operands[0].dtype in HALVES else operands[0].dtype
    return not largest < torch.finfo(wide).max


def own_of(parts: Iterable[KernelPart], size: int) -> KernelPart:
    """Return the measurement of torch's kernel on all samples."""
    return next(part for part in parts if part.algorithm == NATIVE and part.size == size)


def worthwhile(parts: list[KernelPart], size: int, limit: int) -> list[Configuration]:
    """Return torch's own kernel, and the front of clearly faster configurations."""
    own = own_of(parts, size)
    faster = [c for c in front(parts, size, limit) if c.seconds <= GAIN * own.seconds]
    return [Configuration((own,)), *(c for c in faster if c.workspace > 0)]


def certain(
    costs: Costs, problem: Problem, found: list[Configuration], seconds: float = inf
) -> list[Configuration]:
    """Return a front without its doubtful configurations, if the best one has lost a duel.

    Args:
        costs: fights duels, and remembers them.
        problem: the kernel.
        found: torch's own, and the front of faster ones.
        seconds: for the duel; if it would take longer, it is lost. Default: any.
    """
    own, best = found[0], found[-1]
    clear, affords = CLEAR * own.seconds, DUELS * (own.seconds + best.seconds) <= seconds
    if best is own or best.seconds <= clear or costs.duel(problem, best, run=affords) <= GAIN:
        return found
    return [own, *(c for c in found[1:] if c.seconds <= clear)]
