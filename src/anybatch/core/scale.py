"""Forecast for more GPUs in a plan: seconds of a step on each number, and the number worth it.

The same mini-batch is divided among them, so the training stays the same. On request there is a
training of another sort beside it: workers that do not wait for each other, and the servers that
hold their parameters.

Source: Zou et al. (the guide), sections 3.2 and 3.3, Lemmas 3.1 and 3.2.
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
        lemma: the speedup by Lemma 3.1, from R_O only.
    """

    gpus: int
    seconds: float
    speedup: float
    efficiency: float
    lemma: float


@dataclass(frozen=True)
class ParameterServers:
    """Parameter servers of workers that do not wait for each other.

    Attributes:
        workers: N_w, GPUs that compute a mini-batch each in a round.
        servers: N_ps, as requested, or the fewest that hide the traffic; None where no number does.
        fewest: servers that hide the traffic; None where no number does.
        traffic: seconds of a round's traffic over those of its computing, with `servers`.
        reason: the obstacle, where no number of servers hides the traffic; else "".

    Source: guide, Lemma 3.2.
    """

    workers: int
    servers: int | None
    fewest: int | None
    traffic: float
    reason: str

    @property
    def utilisation(self) -> float:
        """Part of a round in which a worker computes, at best: as if no transfer queued."""
        return 1 / max(1.0, self.traffic)

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        if self.servers is None:
            return f"no number of them hides the traffic of {workers}: {self.reason}"
        if self.servers == self.fewest:
            return f"{_hide(self.servers)} the traffic of {workers}"
        more = "no number hides" if self.fewest is None else _hide(self.fewest)
        return (
            f"{self.servers} for {workers}: traffic takes {self.traffic:,.2f} times as long as "
            f"computing, which is {self.utilisation:.0%} of a round; {more} it"
        )


def _hide(servers: int) -> str:
    return "1 server hides" if servers == 1 else f"{servers} servers hide"


@dataclass(frozen=True)
class Scale:
    """Forecast of a training on more GPUs.

    Attributes:
        rows: by GPUs, one first.
        gpus: as many as the goal needs, or as requested; None without a goal, or if it is
            unreachable.
        goal: in words; empty where there is none.
        worth: GPUs after which no more of them gain 5 % of speed each.
        fastest: GPUs with which a step is fastest.
        assumed: quantities that were not measured, a sentence each.
        servers: of as many workers as there are GPUs; None (default): not requested.
    """

    rows: tuple[ScaleRow, ...]
    gpus: int | None
    goal: str
    worth: int
    fastest: int
    assumed: tuple[str, ...]
    servers: ParameterServers | None = None

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
        if self.servers is not None:
            lines.append(f"  servers      {self.servers} (Lemma 3.2)")
        return lines + [f"  assumed      {one}" for one in self.assumed]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Scale:
        """Return the forecast from JSON.

        Args:
            found: the object in a plan's JSON, where tuples are lists.
        """
        rows = tuple(ScaleRow(**row) for row in found["rows"])
        more: dict[str, Any] = {"rows": rows, "assumed": tuple(found["assumed"])}
        if found.get("servers") is not None:
            more["servers"] = ParameterServers(**found["servers"])
        return cls(**{**found, **more})
