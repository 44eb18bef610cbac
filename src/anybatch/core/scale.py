"""Forecast for more GPUs in a plan: seconds of a step on each number, and the number worth it.

The same mini-batch is divided among them, so the training stays what it was.

Source: Zou et al. (the guide), section 3.2, Lemma 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anybatch.core.units import show_seconds


@dataclass(frozen=True)
class ScaleRow:
    """A number of GPUs.

    Attributes:
        gpus: G.
        seconds: of a step, predicted.
        speedup: over one.
        efficiency: that over G.
        lemma: the speedup by Lemma 3.1, from R_O alone.
    """

    gpus: int
    seconds: float
    speedup: float
    efficiency: float
    lemma: float


@dataclass(frozen=True)
class Scale:
    """Forecast of a training on more GPUs.

    Attributes:
        rows: by GPUs, one first.
        gpus: as many as the goal takes, or as were asked for; None where no number reaches it, or
            there is no goal.
        goal: in words; empty where there is none.
        worth: GPUs after which no more of them gain 5 % of speed each.
        fastest: GPUs with which a step is fastest.
        assumed: what was not measured, a sentence each.
    """

    rows: tuple[ScaleRow, ...]
    gpus: int | None
    goal: str
    worth: int
    fastest: int
    assumed: tuple[str, ...]

    def explain(self) -> list[str]:
        """Return the plan's lines on more GPUs."""
        lines = ["  GPUs      seconds a step   speedup   efficiency   Lemma 3.1"]
        lines += [
            f"  {one.gpus:>4} {show_seconds(one.seconds):>19} {one.speedup:>9.2f} "
            f"{one.efficiency:>12.0%} {one.lemma:>11.2f}{'   <' if one.gpus == self.gpus else ''}"
            for one in self.rows
        ]
        if self.goal:
            lines.append(f"  goal         {self.goal}")
        lines.append(f"  worth it     up to {self.worth} GPUs; fastest with {self.fastest}")
        return lines + [f"  assumed      {one}" for one in self.assumed]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Scale:
        """Return the forecast from JSON, where tuples are lists."""
        rows = tuple(ScaleRow(**row) for row in found["rows"])
        return cls(**{**found, "rows": rows, "assumed": tuple(found["assumed"])})
