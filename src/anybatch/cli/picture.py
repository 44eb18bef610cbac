"""Picture of a planned step: live bytes by owner below the budget, and transfers over time.

    ┌ bytes by owner, stacked; the budget; the peak ┐
    ├ offloaded storages: out ▬▬ gone ── back ▬▬    ┤     where times are known
    └ kernels, out, back: when each was busy        ┘

matplotlib is an optional extra, drawn without pyplot as in `curves`. Colours are those of Okabe and
Ito, distinct for the colour-blind, in an order whose greys differ too; storages that are being
copied are hatched as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from anybatch.cli.faults import MissingExtraError
from anybatch.reports import Move, StepTimeline
from anybatch.units import show_bytes

LEAVING, RETURNING = "on its way out", "on its way back"
"""Owners of bytes that are being copied."""

STYLES = {
    "weights, inputs, gradients": ("#5c5c5c", ""),
    "parameters": ("#5c5c5c", ""),
    "buffers": ("#9b9b9b", ""),
    "optimizer": ("#0072b2", ""),
    "gradients": ("#56b4e9", ""),
    "inputs": ("#009e73", ""),
    "activations": ("#e69f00", ""),
    "saved": ("#e69f00", ""),
    "kernels, new gradients": ("#f0e442", ""),
    LEAVING: ("#d55e00", "////"),
    "copied, not given up": ("#f2c3a5", "...."),
    RETURNING: ("#cc79a7", "\\\\\\\\"),
    "waiting, at most": ("#f7d9a0", "...."),
}
"""Owner -> colour and hatching, in the order in which they are stacked, from below."""

SPARE = ("#cc79a7", "#f0e442", "#d55e00", "#b2df8a", "#cab2d6", "#ffffff")
"""Colours of owners that have none of their own."""

MOST = 400
"""Storages that are drawn one by one; of more, the largest."""


def refuse_without_matplotlib() -> None:
    """Refuse to draw where matplotlib is missing.

    Raises:
        MissingExtraError: saying how to get it.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "a picture of a step needs matplotlib, and it is not installed: pip install "
            "'anybatch[report]', or leave the file out: --timeline alone is a chart in letters"
        ) from error


def draw_step(step: StepTimeline) -> bytes:
    """Return the picture of a step, a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    refuse_without_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed, moves = step.seconds is not None, bool(step.moves)
    heights = [5.0, *([1.8] if moves else []), *([0.9] if timed else [])]
    figure = Figure(figsize=(8.5, 1.0 + 0.62 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    axes = list(grid[:, 0])
    title = f"{step.title}\n{step.facts}"
    axes[0].set_title(title, fontsize="small", loc="left")
    _bytes(axes[0], step)
    if moves:
        _draw_moves(axes[1], step)
    if timed:
        _busy(axes[-1], step)
    axes[-1].set_xlabel("seconds" if timed else "events, in their order")
    axes[0].set_xlim(step.edges[0], max(step.edges[-1], step.edges[0] + 1e-9))
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    png = BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()


def _bytes(axes: Any, step: StepTimeline) -> None:
    """Draw the bytes by owner, the budget, the peak, and the phases."""
    unit, name = _unit(max(step.peak, 1))
    names = stacked(step)
    columns = [step.ledger.live[:, step.ledger.owners.index(one)] / unit for one in names]
    rows = np.array([np.append(column, column[-1:]) for column in columns])
    edges, spare = step.edges, iter(SPARE * 3)
    below = np.zeros(rows.shape[1])
    bands = []
    for owner, row in zip(names, rows, strict=True):
        color, hatch = STYLES.get(owner) or (next(spare), "")
        band = {"step": "post", "facecolor": color, "linewidth": 0.0, "edgecolor": "#ffffff"}
        bands.append((edges, below, below + row, band | {"label": owner, "hatch": hatch or None}))
        below = below + row
    for x, low, high, band in reversed(bands):  # the legend reads from above
        axes.fill_between(x, low, high, **band)
    axes.plot(edges, below, color="#303030", linewidth=0.4, drawstyle="steps-post")
    _mark_peak(axes, step, unit)
    top = _mark_budget(axes, step, unit)
    axes.set_ylim(0, top)
    axes.set_yticks(_ticks(top))
    axes.set_ylabel(f"live bytes, {name}")
    _mark_phases(axes, step, top)
    axes.grid(visible=True, axis="y", alpha=0.3)


def style_of(owner: str) -> str:
    """Return the colour of an owner; "" for those that have none of their own."""
    return STYLES[owner][0] if owner in STYLES else ""


def stacked(step: StepTimeline) -> list[str]:
    """Return the owners that ever hold bytes, in the order in which they are stacked."""
    order = {name: place for place, name in enumerate(STYLES)}
    held = step.ledger.live.max(0, initial=0)
    there = [name for name, most in zip(step.ledger.owners, held, strict=True) if most]
    return sorted(there, key=lambda name: order.get(name, order["inputs"]))


def _mark_peak(axes: Any, step: StepTimeline, unit: int) -> None:
    total = step.ledger.live.sum(1)
    at = int(total.argmax())
    left, right = float(step.edges[at]), float(step.edges[at + 1])
    axes.plot([(left + right) / 2], [total[at] / unit], "v", color="black", markersize=6)
    late = (left + right) / 2 > (step.edges[0] + step.edges[-1]) / 2
    axes.annotate(
        f"peak {show_bytes(step.peak)}",
        ((left + right) / 2, total[at] / unit),
        textcoords="offset points",
        xytext=(-7 if late else 7, 6),
        ha="right" if late else "left",
        fontsize="small",
    )


def _mark_budget(axes: Any, step: StepTimeline, unit: int) -> float:
    """Draw the budget, or say that it is far above; return the top of the axis."""
    if step.budget > step.FAR * step.peak:
        text = f"budget {show_bytes(step.budget)}: far above"
        axes.annotate(
            text,
            (0.01, 0.985),
            xycoords="axes fraction",
            va="top",
            fontsize="small",
            color="#a00000",
        )
        return 1.3 * step.peak / unit
    label = f"budget {show_bytes(step.budget)}"
    axes.axhline(step.budget / unit, color="#a00000", linestyle="--", linewidth=1.4, label=label)
    return 1.14 * max(step.budget, step.peak) / unit


def _mark_phases(axes: Any, step: StepTimeline, top: float) -> None:
    edges = step.edges
    for phase in step.phases:
        at = float(edges[min(phase.first, len(edges) - 1)])
        if phase.first:
            axes.axvline(at, color="black", linewidth=0.8, linestyle=":")
        text = f" {phase.name}"
        axes.text(at, 0.985 * top, text, va="top", ha="left", fontsize="x-small", color="#404040")


def _draw_moves(axes: Any, step: StepTimeline) -> None:
    """Draw a row for each offloaded storage: its copies, and the time between."""
    names = sorted({move.name: move.size for move in step.moves}.items(), key=lambda one: -one[1])
    shown = {name for name, _ in names[:MOST]}
    moves = [move for move in step.moves if move.name in shown]
    rows = {name: row for row, name in enumerate(dict.fromkeys(move.name for move in moves))}
    waits = [(a.end, b.begin, a.name) for a, b in _pairs(moves)]
    _bars(
        axes,
        [(rows[name], begin, end) for begin, end, name in waits],
        "#c8c8c8",
        "copied, or offloaded",
    )
    for back, owner in ((False, LEAVING), (True, RETURNING)):
        copies = [(rows[m.name], m.begin, m.end) for m in moves if m.back is back]
        _bars(axes, copies, STYLES[owner][0])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_ylabel(f"{len(rows)} storages\nthat leave", fontsize="small")


def _bars(
    axes: Any, spans: Sequence[tuple[int, float, float]], color: str, label: str | None = None
) -> None:
    """Draw stretches of time, each in its row."""
    rows, begins, ends = (list(each) for each in zip(*spans, strict=True)) if spans else ([],) * 3
    widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    axes.barh(rows, widths, height=1.0, left=begins, color=color, linewidth=0, label=label)


def _pairs(moves: Sequence[Move]) -> list[tuple[Move, Move]]:
    """Return every copy out or back that is followed by a return, with that return."""
    found, last = [], dict[str, Move]()
    for move in moves:
        if move.back and move.name in last:
            found.append((last[move.name], move))
        last[move.name] = move
    return found


def _busy(axes: Any, step: StepTimeline) -> None:
    """Draw when kernels ran and when each way of the link was busy."""
    kernels = [(run.begin, run.end - run.begin) for run in step.runs]
    lanes = [("kernels", kernels, "#404040")]
    for back, name in ((False, LEAVING), (True, RETURNING)):
        copies = [(move.begin, move.end - move.begin) for move in step.moved(back=back)]
        lanes.append(("back" if back else "out", copies, STYLES[name][0]))
    for row, (_, bars, color) in enumerate(lanes):
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=color, linewidth=0)
    axes.set_ylim(2.5, -0.5)
    axes.set_yticks(range(3), [name for name, *_ in lanes], fontsize="small")


def _unit(count: int) -> tuple[int, str]:
    names = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(names) - 1, (count.bit_length() - 1) // 10)
    return 1 << 10 * power, names[power]


def _ticks(top: float) -> list[float]:
    """Return marks at a power of two each, four to eight of them."""
    each = 2.0 ** np.ceil(np.log2(top / 8))
    return [float(mark) for mark in np.arange(0, top, each)]


# The learning curves of a run as a picture: loss and metric, training and test, over the epochs.
#
# matplotlib is an optional extra; without it there is no picture and the run folder says so. The
# figure is drawn without pyplot, which would keep it, and a window system's state, in global
# variables.


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
