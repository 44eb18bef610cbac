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
from anybatch.conv.divide import Configuration, front
from anybatch.conv.execute import run
from anybatch.conv.intercept import Strides, intercepted
from anybatch.conv.network import Key, Network
from anybatch.conv.problem import Problem
from anybatch.units import parse_bytes, show_bytes

Policy = Literal["powerOfTwo", "all", "undivided"]

WORKSPACE = "64MiB"
"""Of a kernel where nobody has said, as of a layer in Caffe2."""

GAIN = 0.95
"""A division must take no more than this share of what torch's kernel takes."""


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
    """What `convolutions` has decided so far.

    Attributes:
        workspace: bytes that a kernel may allocate beside its operands and its result; or all
            kernels together, where `shared`.
        policy: which micro-batches are measured.
        shared: the workspace is divided among the kernels of a network.
        chosen: kernel and samples -> how it is computed.
    """

    workspace: int
    policy: str
    shared: bool = False
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
    if not _divided(configuration):
        return ""
    space = show_bytes(configuration.workspace)
    return f", {own / configuration.seconds:.1f} times as fast, {space}"


@contextmanager
def convolutions(
    workspace: int | str | None = None,
    *,
    workspace_total: int | str | None = None,
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
        workspace: bytes, or a text such as "64MiB", that one kernel may allocate beside its
            operands and its result. Default None: 64 MiB.
        workspace_total: what all kernels of a network may have together, divided so that the
            network is fastest. It is given instead of `workspace`. The first pass is torch's: what
            the network has is found out by it. Default None.
        policy: which micro-batches are measured: powers of two (default), "all", or only the whole
            mini-batch ("undivided").
        cache: a file for what was measured. Default None: it is forgotten with the context.
        seconds: that measuring one kernel may go on for. Default 60.

    Yields:
        What was chosen, kernel by kernel; it prints itself.

    Raises:
        ValueError: a workspace or `policy` means nothing, or both workspaces are given.

    Example:
        >>> with anybatch.convolutions(workspace="100MiB"):
        ...     loss_fn(model(x), y).backward()

    Source: u-cuDNN, sections III-A to III-C (WR and WD).
    """
    if policy not in ("powerOfTwo", "all", "undivided"):
        raise ValueError(f'policy must be "powerOfTwo", "all" or "undivided", and it is {policy!r}')
    if workspace is not None and workspace_total is not None:
        raise ValueError(
            "workspace is for each kernel and workspace_total for all of them, and both were "
            "given: leave one out"
        )
    shared = workspace_total is not None
    name = "workspace_total" if shared else "workspace"
    given = parse_bytes(workspace_total or workspace or WORKSPACE, name)
    found = Convolutions(given, policy, shared)
    costs = Costs(None if cache is None else Path(cache), seconds=seconds)
    with intercepted("cpu", _Chooser(found, costs)):
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
        self._own: dict[Key, float] = {}
        self._network = Network(found.workspace, self._front) if found.shared else None

    def __call__(
        self,
        problem: Problem,
        operands: tuple[Tensor, Tensor],
        bias: Tensor | None,
        strides: Strides,
    ) -> Tensor | None:
        """Compute a kernel, or leave it to torch."""
        chosen = self._chosen((problem, len(operands[0])))
        if chosen is None or not _divided(chosen):
            return None
        return run(problem, chosen, operands, strides(), bias)

    def _chosen(self, key: Key) -> Configuration | None:
        if self._network is None:
            known = self._found.chosen.get(key)
            if known is not None:
                return known.configurations[0]
        with self._lock:
            if self._network is None:
                if key not in self._found.chosen:
                    best = self._front(key)[-1]
                    self._found.chosen[key] = Chosen((best,), self._own[key])
                return self._found.chosen[key].configurations[0]
            before = self._network.shares
            found = self._network.next(key)
            if self._network.shares is not before:
                for one, shares in self._network.shares.items():
                    self._found.chosen[one] = Chosen(tuple(shares), self._own[one])
            return found

    def _front(self, key: Key) -> list[Configuration]:
        """Return what a kernel may be: torch's own, and what is clearly faster."""
        problem, size = key
        limit = self._found.workspace
        with torch.no_grad():
            parts = self._costs.parts(problem, size, self._found.policy, limit)
        own = next(part for part in parts if part.algorithm == NATIVE and part.size == size)
        self._own[key] = own.seconds
        faster = [c for c in front(parts, size, limit) if c.seconds <= GAIN * own.seconds]
        return [Configuration((own,)), *(c for c in faster if c.workspace > 0)]


def _divided(configuration: Configuration) -> bool:
    return len(configuration.parts) > 1 or configuration.parts[0].algorithm != NATIVE
