"""`anybatch.convolutions`: every convolution by its fastest algorithms, within a workspace.

torch runs a convolution in one piece, by what its libraries have for it. For large and long windows
they have no fast algorithm on a CPU, and where they have one it may need more workspace than there
is. Here every kernel is measured once, in several sizes and by several algorithms, and then divided
so that the fastest of them fit.

    kernel ──> known? ──> fft@4 x 8           for large windows, in as much workspace as was given
                    └──> torch's own kernel   where nothing is faster

Source: Oyama, Ben-Nun, Hoefler and Matsuoka, u-cuDNN (2018).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from anybatch.conv.algorithms import NATIVE
from anybatch.conv.costs import Costs
from anybatch.conv.divide import Configuration, fastest
from anybatch.conv.execute import run
from anybatch.conv.intercept import Strides, intercepted
from anybatch.conv.problem import Problem
from anybatch.units import parse_bytes

Policy = Literal["powerOfTwo", "all", "undivided"]

GAIN = 0.95
"""A division must take no more than this share of what torch's kernel takes."""


@dataclass
class Convolutions:
    """What `convolutions` has decided so far.

    Attributes:
        workspace: bytes that a kernel may allocate beside its operands and its result.
        policy: which micro-batches are measured.
        chosen: kernel and samples -> its configuration, and the seconds of torch's own kernel.
    """

    workspace: int
    policy: str
    chosen: dict[tuple[Problem, int], tuple[Configuration, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a line for each kernel."""
        lines = [
            f"{problem}, {size} samples: {configuration}"
            + (
                f", {own / configuration.seconds:.1f} times as fast"
                if _divided(configuration)
                else ""
            )
            for (problem, size), (configuration, own) in self.chosen.items()
        ]
        return "\n".join(lines)


@contextmanager
def convolutions(
    workspace: int | str = "64MiB",
    *,
    policy: Policy = "powerOfTwo",
    cache: str | Path | None = None,
    seconds: float = 60.0,
) -> Iterator[Convolutions]:
    """Compute the convolutions of the process by the fastest algorithms, divided to fit.

    Enter and leave it where no other thread computes convolutions outside: torch's dispatcher is
    changed then, which every thread reads.

    Forward, the gradient of the input and that of the filters are three kernels, chosen for each
    layer and each number of samples by measuring, when they are met for the first time. Results
    are torch's up to rounding. Where nothing is clearly faster, torch's own kernel runs.

    Args:
        workspace: bytes, or a text such as "64MiB" (default), that one kernel may allocate beside
            its operands and its result.
        policy: which micro-batches are measured: powers of two (default), "all", or only the whole
            mini-batch ("undivided").
        cache: a file for what was measured. Default None: it is forgotten with the context.
        seconds: that measuring one kernel may go on for. Default 60.

    Yields:
        What was chosen, kernel by kernel; it prints itself.

    Raises:
        ValueError: `workspace` or `policy` means nothing.

    Example:
        >>> with anybatch.convolutions(workspace="100MiB"):
        ...     loss_fn(model(x), y).backward()

    Source: u-cuDNN, sections III-A and III-B (WR).
    """
    if policy not in ("powerOfTwo", "all", "undivided"):
        raise ValueError(f'policy must be "powerOfTwo", "all" or "undivided", and it is {policy!r}')
    found = Convolutions(parse_bytes(workspace), policy)
    chooser = _Chooser(found, Costs(None if cache is None else Path(cache), seconds=seconds))
    with intercepted("cpu", chooser):
        yield found


class _Chooser:
    """Chooses a configuration for every kernel, and runs it.

    Args:
        found: what is decided.
        costs: what was measured.
    """

    def __init__(self, found: Convolutions, costs: Costs) -> None:
        self._found, self._costs = found, costs
        self._lock = threading.Lock()

    def __call__(
        self,
        problem: Problem,
        operands: tuple[Tensor, Tensor],
        bias: Tensor | None,
        strides: Strides,
    ) -> Tensor | None:
        """Compute a kernel, or leave it to torch."""
        key = problem, len(operands[0])
        known = self._found.chosen.get(key)
        if known is None:
            with self._lock:
                known = self._found.chosen.get(key) or self._choose(*key)
        if not _divided(known[0]):
            return None
        return run(problem, known[0], operands, strides(), bias)

    def _choose(self, problem: Problem, size: int) -> tuple[Configuration, float]:
        limit = self._found.workspace
        with torch.no_grad():
            parts = self._costs.parts(problem, size, self._found.policy, limit)
        own = next(part for part in parts if part.algorithm == NATIVE and part.size == size)
        best = fastest(parts, size, limit)
        if best.seconds > GAIN * own.seconds:
            best = Configuration((own,))
        self._found.chosen[problem, size] = best, own.seconds
        return best, own.seconds


def _divided(configuration: Configuration) -> bool:
    return len(configuration.parts) > 1 or configuration.parts[0].algorithm != NATIVE
