"""History of a run from metrics.jsonl, with the valid lines read even if others are damaged.

A process that is killed may leave half a line, and a disk may leave worse. A line in another form
than the log's is counted and skipped: the page has the count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import fsum, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anybatch.cli.timeline import COLORS, stacked

if TYPE_CHECKING:
    from anybatch.reports import StepTimeline


class Spent(NamedTuple):
    """Where the seconds of a step went: waiting for its mini-batch, computing, and all else."""

    waiting: float
    computing: float
    rest: float


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step.

    `step`: its number, from 1. `loss`: of the mini-batch. `speed`: samples a second. `peak`: bytes
    held at most; None where that was not measured. `spent`: its seconds; None in the log of a
    version that did not write them separately.
    """

    step: int
    loss: float
    speed: float
    peak: int | None
    spent: Spent | None = None


@dataclass(frozen=True)
class EpochRow:
    """One epoch: losses and figures of the metric called `metric`."""

    epoch: int
    metric: str
    train_loss: float
    test_loss: float
    train_value: float
    test_value: float


@dataclass(frozen=True)
class RunHistory:
    """A run according to its log.

    `steps`: in order. `epochs`: the complete ones, in order. `changes`: changes during the run, a
    sentence each. `broken`: lines that could not be read.
    """

    steps: tuple[LoggedStep, ...] = ()
    epochs: tuple[EpochRow, ...] = ()
    changes: tuple[str, ...] = ()
    broken: int = 0

    @classmethod
    def of(cls, text: bytes) -> RunHistory:
        """Read the bytes of a metrics.jsonl."""
        steps, epochs, changes, broken = [], [], [], 0
        for line in text.splitlines():
            try:
                record = json.loads(line)
                event = record["kind"]
                if event == "step":
                    steps.append(_step(record))
                elif event == "epoch":
                    epochs.append(_epoch(record))
                else:
                    changes.append(f"After epoch {_integer(record['epoch'])}: {record['change']}.")
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                broken += 1
        return cls(tuple(steps), tuple(epochs), tuple(changes), broken)

    @property
    def measured(self) -> int | None:
        """The most bytes that a step was measured to hold; None where none was measured."""
        return max((one.peak for one in self.steps if one.peak is not None), default=None)


class Bin(NamedTuple):
    """Some steps one after another, and the quartiles of a value of theirs; NaN for no number."""

    first: int
    last: int
    low: float
    middle: float
    high: float

    @property
    def steps(self) -> str:
        """The steps in words."""
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


def bins(steps: Sequence[int], values: Sequence[float], most: int) -> list[Bin]:
    """Return values in at most `most` bins of as many steps each as can be.

    `steps`: their numbers, in order. `values`: one for each. `most`: at least 1.
    """
    return [
        Bin(steps[a], steps[b - 1], *quartiles(values[a:b])) for a, b in spans(len(steps), most)
    ]


def spans(count: int, most: int) -> list[tuple[int, int]]:
    """Return so many places as at most `most` stretches, ``first <= place < end``."""
    parts = min(most, count)
    borders = [round(i * count / parts) for i in range(parts + 1)] if parts else []
    return list(pairwise(borders))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of the finite ones among some values; NaN where there are none."""
    found = np.asarray(values, np.float64)
    found = found[np.isfinite(found)]
    if not len(found):
        return (float("nan"),) * 3
    low, middle, high = np.quantile(found, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def thinned(count: int, most: int) -> list[int]:
    """Return places among `count`, at most `most` of them and the last among these."""
    every = -(-count // most)
    return list(range((count - 1) % every, count, every)) if count else []


def _step(record: Mapping[str, Any]) -> LoggedStep:
    peak = record.get("peak_bytes")
    return LoggedStep(
        _integer(record["step"]),
        _number(record["loss"]),
        _number(record["images_per_second"]),
        None if peak is None else _integer(peak),
        _spent(record),
    )


def _spent(record: Mapping[str, Any]) -> Spent | None:
    if "computing_seconds" not in record:
        return None
    computing = _number(record["computing_seconds"])
    rest = max(0.0, _number(record["seconds"]) - computing)
    return Spent(_number(record["waiting_seconds"]), computing, rest)


def _epoch(record: Mapping[str, Any]) -> EpochRow:
    metric = record["metric"]
    if not isinstance(metric, str):
        raise TypeError(metric)
    names = ("train_loss", "test_loss", f"train_{metric}", f"test_{metric}")
    return EpochRow(_integer(record["epoch"]), metric, *(_number(record[name]) for name in names))


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(value)
    return float(value)


# Planned step as few numbers: for each stretch of it, bytes by owner at its highest moment.
#
# A step has thousands of events, and a page and a run folder want a few hundred. Every k-th event
# would lose the peak, and the step is shown for its peak. So each stretch is shown by the moment at
# which the most was live, as a chart in letters does:
#
#     events      .:|:..:|||:.   ..:.:|::..
#     stretches    |     |    |    :   |   :      the peak is in one of them

MOST = 200
"""Stretches of a step, at most."""


@dataclass(frozen=True)
class Envelope:
    """A planned step, stretch by stretch.

    `title`: the step, in words. `facts`: its bytes and, if known, its seconds, in words. `budget`:
    bytes that it may hold. `peak`: bytes that it holds at most. `timed`: edges are seconds; else
    they are places of events. `owners`: owners of bytes, in the order in which they are stacked,
    from below. `edges`: where stretches begin, and the last one ends; one more than there are
    stretches. `live`: [stretches][owners], bytes. `busy`: [stretches][3], shares in which kernels
    ran, copies went out, and came back. `phases`: ``(name, edge)`` of the parts of the step, in
    order.
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
        colors = list(dict.fromkeys(COLORS.values()))
        assigned = {name: colors.index(COLORS[name]) for name in self.owners if name in COLORS}
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
            rows = {name: tuple(map(tuple, found[name])) for name in ("live", "busy", "phases")}
            lists = {name: tuple(found[name]) for name in ("owners", "edges")}
            made = cls(**{**found, **rows, **lists})
            wrong = len(made.edges) != len(made.live) + 1 or len(made.busy) != len(made.live)
            if wrong or any(len(row) != len(made.owners) for row in made.live):
                raise ValueError("its rows are not as long as they must be")
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"a step must hold what to_json writes, and {error}") from error
        return made


# Overhead of a run's own steps: R_O, its ratio to computing, the one input of Lemma 3.1.
#
# A profile runs single steps and restores all state; a run has made thousands, and its log has the
# seconds of each for its mini-batch, computing, and the rest. That is enough for the lemma, and for
# nothing more: the part of it that GPUs would also divide is unknown.
#
#     |wwww|cccccccccccccccccccc|rr|     R_O = (w + r) / c, of the sums over all steps
#
# Source: Zou et al. (the guide), section 3.2, Lemma 3.1.


@dataclass(frozen=True)
class Overhead:
    """Seconds of a run's steps, each the mean of so many `steps`.

    `steps`: that count. `waiting`: for mini-batches. `computing`: micro-batches. `rest`: the
    update, and all else between two waits.
    """

    steps: int
    waiting: float
    computing: float
    rest: float

    @classmethod
    def of(cls, steps: Sequence[LoggedStep]) -> Overhead | None:
        """Return the overhead of these steps; None where they show nothing.

        The first step of a process also measures its memory, and says so by its peak: those are
        left out. Where every step has one, as on CUDA, the first of all is.
        """
        plain = [one.spent for one in steps if one.peak is None and one.spent is not None]
        if not plain:
            plain = [one.spent for one in steps[1:] if one.spent is not None]
        plain = [spent for spent in plain if all(isfinite(s) and s >= 0 for s in spent)]
        if not plain:
            return None
        count = len(plain)
        means = [fsum(s / count for s in column) for column in zip(*plain, strict=True)]
        found = cls(count, *means)
        return found if found.computing > 0 and isfinite(found.ratio) else None

    @property
    def ratio(self) -> float:
        """R_O."""
        return (self.waiting + self.rest) / self.computing

    def seconds(self, gpus: int) -> float:
        """Return the seconds of a step on so many GPUs, by the lemma."""
        return self.waiting + self.rest + self.computing / gpus
