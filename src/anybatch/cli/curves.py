"""The learning curves of a run as a picture: loss and metric, training and test, over the epochs.

matplotlib is an optional extra; without it there is no picture and the run folder says so. The
figure is drawn without pyplot, which would keep it, and a window system's state, in global
variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from anybatch.cli.picture import refuse_without_matplotlib


@dataclass(frozen=True)
class EpochRow:
    """One epoch: losses and figures of the metric called `metric`."""

    epoch: int
    metric: str
    train_loss: float
    test_loss: float
    train_value: float
    test_value: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> EpochRow:
        """Read an epoch's line of metrics.jsonl."""
        metric = record["metric"]
        return cls(
            epoch=record["epoch"],
            metric=metric,
            train_loss=record["train_loss"],
            test_loss=record["test_loss"],
            train_value=record[f"train_{metric}"],
            test_value=record[f"test_{metric}"],
        )


def draw_curves(rows: Sequence[EpochRow]) -> bytes:
    """Return the curves of at least one row, a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    refuse_without_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    epochs = [row.epoch for row in rows]
    mark = "." if len(rows) < 50 else ""
    left.plot(epochs, [row.train_loss for row in rows], mark + "-", label="training")
    left.plot(epochs, [row.test_loss for row in rows], mark + "-", label="test")
    right.plot(epochs, [row.train_value for row in rows], mark + "-", label="training")
    right.plot(epochs, [row.test_value for row in rows], mark + "-", label="test")
    for axes, title in ((left, "loss"), (right, rows[0].metric)):
        axes.set(xlabel="epoch", ylabel=title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    file = BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()
