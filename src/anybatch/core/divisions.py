"""Convolution section of a plan: the division of each kernel, and its workspace.

A resumed run must compute the same bits as before; new measurements might yield other divisions. So
the divisions are a part of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anybatch.core.units import show_bytes


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
        return sum(len(one.parts) > 1 or one.parts[0][1] != "native" for one in self.kernels)

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
        """Return the divisions from JSON, where tuples are lists."""
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
