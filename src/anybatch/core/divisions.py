"""Convolution section of a plan: the division of each kernel, and its workspace.

A resumed run must compute the same bits as before; new measurements might yield other divisions. So
the divisions are a part of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from anybatch.core.units import show_bytes


@dataclass(frozen=True)
class KernelPart:
    """A convolution kernel on some samples, as it was measured: a micro-configuration.

    Attributes:
        size: samples.
        algorithm: its name.
        seconds: it takes.
        workspace: bytes that it allocates beside its operands and its result.
        setup: seconds that its algorithm takes once for all its parts in a configuration; the same
            for every part of an algorithm. Default 0.
    """

    size: int
    algorithm: str
    seconds: float
    workspace: int
    setup: float = 0.0


@dataclass(frozen=True)
class Configuration:
    """Parts that run one after another; together they are a kernel on all samples.

    Attributes:
        parts: in the order in which they run.
    """

    parts: tuple[KernelPart, ...]

    @property
    def size(self) -> int:
        """N, the samples of all parts."""
        return sum(part.size for part in self.parts)

    @property
    def seconds(self) -> float:
        """Return the seconds of all parts, and of one setup for each algorithm."""
        return sum(part.seconds for part in self.parts) + sum(setups(self.parts).values())

    @property
    def workspace(self) -> int:
        """Bytes of the largest workspace among the parts: they use the same one."""
        return max((part.workspace for part in self.parts), default=0)

    @property
    def divided(self) -> bool:
        """Whether it is not just torch's own kernel on all samples."""
        return len(self.parts) > 1 or self.parts[0].algorithm != "native"

    def __str__(self) -> str:
        """Return for example ``fft@4 x 8, native@3``."""
        runs = groupby(self.parts, key=lambda part: f"{part.algorithm}@{part.size}")
        counted = ((name, sum(1 for _ in parts)) for name, parts in runs)
        return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in counted)


def setups(parts: Iterable[KernelPart]) -> dict[str, float]:
    """Return algorithm -> seconds that it takes once, of those that take some."""
    return {part.algorithm: part.setup for part in parts if part.setup > 0}


@dataclass(frozen=True)
class Division:
    """How a kernel is computed on so many samples.

    Attributes:
        kernel: its description, ``(name, value)``.
        samples: N, of a micro-batch.
        parts: ``(samples, algorithm, seconds, bytes of workspace, seconds once)``, one after
            another.
        seconds: that torch's own kernel takes.
    """

    kernel: tuple[tuple[str, Any], ...]
    samples: int
    parts: tuple[tuple[int, str, float, int, float], ...]
    seconds: float

    @property
    def configuration(self) -> Configuration:
        """The parts as an object, with their seconds and workspace together."""
        return Configuration(tuple(KernelPart(*part) for part in self.parts))


@dataclass(frozen=True)
class Divisions:
    """How the convolutions of a step are computed.

    Attributes:
        workspace: bytes that a kernel may allocate in addition to its operands and its result.
        policy: which micro-batches were measured.
        used: the most of it that any of these kernels does allocate.
        kernels: all that were chosen.
        requested: requested bytes, if they leave too little for a step; else 0.
    """

    workspace: int
    policy: str
    used: int
    kernels: tuple[Division, ...]
    requested: int = 0

    @property
    def other(self) -> int:
        """How many kernels are not torch's own on all samples at once."""
        return sum(one.configuration.divided for one in self.kernels)

    def __str__(self) -> str:
        """Return the plan's line on convolutions."""
        space = f"{show_bytes(self.used)} of {show_bytes(self.workspace)} of workspace"
        less = f" ({show_bytes(self.requested)} would leave too little for a step)"
        return (
            f"{self.other} of {len(self.kernels)} kernels not torch's own; {space}"
            f"{less if self.requested else ''}"
        )

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Divisions:
        """Return the divisions from JSON.

        Args:
            found: the object in a plan's JSON, where tuples are lists.
        """
        kernels = tuple(
            Division(
                tuple((str(name), _tuples(value)) for name, value in one["kernel"]),
                int(one["samples"]),
                tuple(
                    (int(n), str(a), float(t), int(w), float(s)) for n, a, t, w, s in one["parts"]
                ),
                float(one["seconds"]),
            )
            for one in found["kernels"]
        )
        return cls(**{**found, "kernels": kernels})


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
