"""History of a run from metrics.jsonl, with the valid lines read even if others are damaged.

A process that is killed may leave half a line, and a disk may leave worse. A line in another form
than the log's is counted and skipped: the page has the count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from anybatch.cli.curves import EpochRow


class Spent(NamedTuple):
    """Where the seconds of a step went: waiting for its mini-batch, computing, and all else."""

    waiting: float
    computing: float
    rest: float


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step.

    Attributes:
        step: its number, from 1.
        loss: of the mini-batch.
        speed: samples a second.
        peak: bytes held at most; None where that was not measured.
        spent: its seconds; None in the log of a version that did not write them separately.
    """

    step: int
    loss: float
    speed: float
    peak: int | None
    spent: Spent | None = None


@dataclass(frozen=True)
class RunHistory:
    """A run according to its log.

    Attributes:
        steps: in order.
        epochs: the complete ones, in order.
        changes: changes during the run, a sentence each.
        broken: lines that could not be read.
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

    Args:
        steps: their numbers, in order.
        values: one for each.
        most: at least 1.
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
    row = EpochRow.of(record)
    _integer(row.epoch)
    for value in (row.train_loss, row.test_loss, row.train_value, row.test_value):
        _number(value)
    if not isinstance(row.metric, str):
        raise TypeError(row.metric)
    return row


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(value)
    return float(value)
