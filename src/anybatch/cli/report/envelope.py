"""Planned step as few numbers: for each stretch of it, bytes by owner at its highest moment.

A step has thousands of events, and a page and a run folder want a few hundred. Every k-th event
would lose the peak, and the step is shown for its peak. So each stretch is shown by the moment at
which the most was live, as a chart in letters does:

    events      .:|:..:|||:.   ..:.:|::..
    stretches    |     |    |    :   |   :      the peak is in one of them
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from anybatch.cli.picture import STYLES, stacked, style_of
from anybatch.cli.report.history import spans
from anybatch.reports import StepTimeline

MOST = 200
"""Stretches of a step, at most."""


@dataclass(frozen=True)
class Envelope:
    """A planned step, stretch by stretch.

    Attributes:
        title: the step, in words.
        facts: its bytes and, if known, its seconds, in words.
        budget: bytes that it may hold.
        peak: bytes that it holds at most.
        timed: edges are seconds; else they are places of events.
        owners: owners of bytes, in the order in which they are stacked, from below.
        edges: where stretches begin, and the last one ends; one more than there are stretches.
        live: [stretches][owners], bytes.
        busy: [stretches][3], shares in which kernels ran, copies went out, and came back.
        phases: ``(name, edge)`` of the parts of the step, in order.
    """

    title: str
    facts: str
    budget: int
    peak: int
    timed: bool
    owners: tuple[str, ...]
    edges: tuple[float, ...]
    live: tuple[tuple[int, ...], ...]
    busy: tuple[tuple[float, float, float], ...]
    phases: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, step: StepTimeline, most: int = MOST) -> Envelope:
        """Return a step in at most `most` stretches."""
        columns, edges = step.columns(most), step.edges
        count, owners = len(columns), tuple(stacked(step))
        width = (float(edges[-1]) - float(edges[0])) / max(1, count)
        return cls(
            title=step.title,
            facts=step.facts,
            budget=step.budget,
            peak=step.peak,
            timed=step.seconds is not None,
            owners=owners,
            edges=tuple(float(edges[0]) + width * i for i in range(count + 1)),
            live=tuple(tuple(one.owners.get(name, 0) for name in owners) for one in columns),
            busy=tuple(one.busy for one in columns),
            phases=tuple(
                (phase.name, float(edges[min(phase.first, len(edges) - 1)]))
                for phase in step.phases
            ),
        )

    @property
    def styles(self) -> tuple[int, ...]:
        """The style of each owner: the same in every step, and one to spare for other names."""
        colors = list(dict.fromkeys(color for color, _ in STYLES.values()))
        assigned = {name: colors.index(style_of(name)) for name in self.owners if style_of(name)}
        spare = (i for i in range(len(colors)) if i not in assigned.values())
        return tuple(assigned[name] if name in assigned else next(spare, 0) for name in self.owners)

    def merged(self, most: int) -> Envelope:
        """Return an envelope of at most `most` stretches; merged ones show their highest."""
        parts = spans(len(self.live), most)
        highest = [max(range(a, b), key=lambda i: sum(self.live[i])) for a, b in parts]
        means = [
            [sum(share) / (b - a) for share in zip(*self.busy[a:b], strict=True)] for a, b in parts
        ]
        borders = [0, *(b for _, b in parts)]
        return replace(
            self,
            edges=tuple(self.edges[border] for border in borders),
            live=tuple(self.live[i] for i in highest),
            busy=tuple((kernels, out, back) for kernels, out, back in means),
        )

    def to_json(self) -> str:
        """Return it as a JSON object, a line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Envelope:
        """Return the step that `to_json` wrote.

        Raises:
            ValueError: `text` is none.
        """
        try:
            found: dict[str, Any] = json.loads(text)
            rows = {name: _rows(found[name]) for name in ("live", "busy", "phases")}
            lists = {name: tuple(found[name]) for name in ("owners", "edges")}
            made = cls(**{**found, **rows, **lists})
            wrong = len(made.edges) != len(made.live) + 1 or len(made.busy) != len(made.live)
            if wrong or any(len(row) != len(made.owners) for row in made.live):
                raise ValueError("its rows are not as long as they must be")
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"a step must hold what to_json writes, and {error}") from error
        return made


def _rows(found: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row) for row in found)
