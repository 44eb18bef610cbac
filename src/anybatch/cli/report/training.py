"""Sections of a page on training: how it ended, its settings, curves, throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anybatch.cli.report.drawing import Line, Titled, draw_lines
from anybatch.cli.report.history import RunHistory, bins, quartiles, thinned
from anybatch.cli.report.parts import (
    Fact,
    Figure,
    Key,
    Section,
    Table,
    counted,
    drawn,
    figure_of,
    number,
    percent,
    rounded,
    seconds,
)
from anybatch.cli.report.record import RunRecord
from anybatch.units import show_bytes

POINTS, ROWS = 240, 60
"""Places of a curve, and rows of a table, at most."""

_VERSIONS = {"python": "Python", "system": "System"}
METRICS = {"accuracy": "Accuracy", "iou": "IoU (intersection over union)"}
_FREED = {"tight": "freed memory is returned at once", "fast": "freed memory is kept"}


def outcome(record: RunRecord) -> list[Section]:
    """Return the figures at the end of a run; none of a plan, or before the first step."""
    tiles = [*_at_the_end(record.history), *_spent(record)]
    return [Section("outcome", "Figures at the end", facts=tuple(tiles), tiles=True)] * bool(tiles)


def _at_the_end(history: RunHistory) -> Iterator[Fact]:
    if history.epochs:
        last = history.epochs[-1]
        best = max(history.epochs, key=lambda row: row.test_value)
        more = f"best {percent(best.test_value)} in epoch {best.epoch}"
        yield Fact(f"{METRICS.get(last.metric, last.metric)}, test", percent(last.test_value), more)
        yield Fact("Loss, test", number(last.test_loss), f"training {number(last.train_loss)}")
    elif history.steps:
        yield Fact("Loss, last step", number(history.steps[-1].loss), "no whole epoch yet")


def _spent(record: RunRecord) -> Iterator[Fact]:
    history, end = record.history, record.summary or {}
    if history.steps:
        done = counted(len(history.epochs), "whole epochs")
        yield Fact("Steps", f"{history.steps[-1].step:,}", done)
        middle = quartiles([one.speed for one in history.steps])[1]
        yield Fact("Samples a second", rounded(middle), "median of the steps")
    if history.measured is not None:
        budget = record.plan.memory.budget if record.plan and record.plan.memory else None
        of = "no budget" if budget is None else f"of {show_bytes(budget)}"
        yield Fact("Peak memory", show_bytes(history.measured), of)
    if isinstance(end.get("seconds"), float):
        yield Fact("Time", seconds(end["seconds"]), _parts(end))


def _parts(end: Mapping[str, Any]) -> str:
    resumed = end.get("resumed")
    if not isinstance(resumed, int) or not resumed:
        return ""
    return f"of all parts; resumed {counted(resumed, 'times')}"


def what_was_run(record: RunRecord) -> list[Section]:
    """Return the section on the settings of a run, its process and its versions."""
    settings, recipe, data = record.part("settings"), record.part("recipe"), record.part("data")
    process, versions = record.part("process"), record.part("versions")
    end = record.summary or {}
    pixels, exact = data.get("size"), end.get("exact_from")
    size = " x ".join(map(str, pixels)) if isinstance(pixels, list | tuple) else None
    values = {
        "Model": (recipe.get("model"), _counted(end.get("parameters"), "parameters")),
        "Data": (settings.get("data"), _counted(data.get("train_samples"), "training samples")),
        "Task": (data.get("task"), f"{size} pixels" if size else ""),
        "Mini-batch": (settings.get("batch_size"), "samples of one step"),
        "Micro-batch": (_micro_batch(record), "samples on the device at once"),
        "Memory": (settings.get("memory"), "budget, as it was given"),
        "Loss": (recipe.get("loss"), ""),
        "Optimizer": (recipe.get("optimizer"), _rate(recipe)),
        "Epochs": (recipe.get("epochs"), "planned"),
        "BatchNorm": (settings.get("batchnorm"), f"exact from epoch {exact}" if exact else ""),
        "Seed": (settings.get("seed"), ""),
        "Device": (process.get("device"), _counted(process.get("threads"), "CPU threads")),
        "Processes": (record.ranks if record.ranks > 1 else None, "share every mini-batch"),
        "Host allocator": (process.get("malloc"), _FREED.get(str(process.get("malloc")), "")),
        **{_VERSIONS.get(name, name): (value, "") for name, value in versions.items()},
    }
    facts = [
        Fact(name, str(value), more if isinstance(more, str) else "")
        for name, (value, more) in values.items()
        if value is not None
    ]
    notes = record.part("data").get("notes")
    points = tuple(map(str, notes)) if isinstance(notes, list | tuple) else ()
    command = Fact("Command", record.words, code=True)
    title = "What was run" if record.command == "train" else "What was planned"
    return [Section("run", title, facts=(command, *facts), points=points)]


def curves(record: RunRecord) -> list[Section]:
    """Return loss and metric over the epochs, and over the steps where there is but one."""
    history = record.history
    figures = []
    if len(history.epochs) > 1:
        name = history.epochs[0].metric
        loss = [(row.epoch, row.train_loss, row.test_loss) for row in history.epochs]
        value = [(row.epoch, row.train_value, row.test_value) for row in history.epochs]
        figures = [
            _over_epochs("loss", "Loss", loss),
            _over_epochs("metric", METRICS.get(name, name), value),
        ]
    elif len(history.steps) > 1:
        figures = [_over_steps("loss", "Loss", "training loss", history)]
    tables = () if len(history.epochs) != 1 else (_one_epoch(history),)
    if not figures and not tables:
        return []
    return [
        Section(
            *("curves", "Loss and metric"),
            points=history.changes,
            figures=tuple(figures),
            tables=tables,
        )
    ]


def throughput(record: RunRecord) -> list[Section]:
    """Return how many samples a second the steps took."""
    history = record.history
    if not history.steps:
        return []
    speeds = [one.speed for one in history.steps]
    low, middle, high = quartiles(speeds)
    facts = (
        Fact("Median", f"{rounded(middle)} samples/s"),
        Fact("Quartiles", f"{rounded(low)} to {rounded(high)} samples/s", "of the steps"),
        Fact("Slowest, fastest", f"{rounded(min(speeds))}, {rounded(max(speeds))} samples/s"),
    )
    figures = [_over_steps("throughput", "Samples a second", "samples a second", history)]
    lead = "Whole steps with their data; the first step of a process also measures its memory."
    return [Section("throughput", "Throughput", (lead,), facts, figures=tuple(figures))]


def _over_epochs(name: str, title: str, rows: Sequence[tuple[int, float, float]]) -> Figure:
    epochs, train, test = (list(column) for column in zip(*rows, strict=True))
    description = (
        f"{title} over epochs {epochs[0]} to {epochs[-1]}: training from {number(train[0])} to "
        f"{number(train[-1])}, test from {number(test[0])} to {number(test[-1])}."
    )
    titled = Titled(name, f"{title} by epoch", description)
    every = thinned(len(rows), ROWS)
    note = "" if len(every) == len(rows) else f", one of {every[1] - every[0]} epochs"
    table = Table(
        f"{name}-numbers",
        f"{title} by epoch{note}",
        ("Epoch", "Training", "Test"),
        tuple((str(epochs[i]), number(train[i]), number(test[i])) for i in every),
    )
    keys = (Key("training", "line", 0, number(train[-1])), Key("test", "line", 1, number(test[-1])))
    drawing = drawn(lambda: draw_lines(titled, [Line(epochs, train), Line(epochs, test)], "epoch"))
    return figure_of(titled, drawing, keys, table)


def _over_steps(name: str, title: str, what: str, history: RunHistory) -> Figure:
    """Return a figure of the loss or of the throughput: each step, or medians of some."""
    steps = [one.step for one in history.steps]
    values = [one.loss if name == "loss" else one.speed for one in history.steps]
    places, rows = bins(steps, values, POINTS), bins(steps, values, ROWS)
    middles = [one.middle for one in places]
    spread = len(steps) > len(places)
    line = Line(
        [(one.first + one.last) / 2 for one in places],
        middles,
        [one.low for one in places] if spread else (),
        [one.high for one in places] if spread else (),
    )
    low, middle, high = quartiles(values)
    description = (
        f"{what.capitalize()} over steps {steps[0]} to {steps[-1]}: first {number(values[0])}, "
        f"last {number(values[-1])}, median {number(middle)}, quartiles {number(low)} and "
        f"{number(high)}."
    )
    titled = Titled(name, f"{title} by step", description)
    each = len(rows) == len(steps)
    cells = [
        (row.steps, number(row.middle), *(() if each else (number(row.low), number(row.high))))
        for row in rows
    ]
    table = Table(
        f"{name}-numbers",
        f"{title} by step" if each else f"{title}, of several steps each",
        ("Step", title) if each else ("Steps", "Median", "First quartile", "Third quartile"),
        tuple(cells),
    )
    more = f"median of {-(-len(steps) // len(places))} steps, and the middle half" if spread else ""
    drawing = drawn(lambda: draw_lines(titled, [line], "step"))
    return figure_of(titled, drawing, (Key(what, "line", 0, more),), table)


def _one_epoch(history: RunHistory) -> Table:
    (row,) = history.epochs
    name = METRICS.get(row.metric, row.metric)
    return Table(
        "epoch-numbers",
        f"Epoch {row.epoch}",
        ("", "Training", "Test"),
        (
            ("Loss", number(row.train_loss), number(row.test_loss)),
            (name, number(row.train_value), number(row.test_value)),
        ),
    )


def _micro_batch(record: RunRecord) -> int | None:
    if record.plan is not None:
        return record.plan.micro_batch
    found = record.part("settings").get("micro_batch")
    return found if isinstance(found, int) else None


def _counted(value: Any, what: str) -> str:
    return counted(value, what) if isinstance(value, int) else ""


def _rate(recipe: Mapping[str, Any]) -> str:
    rate, schedule = recipe.get("lr"), recipe.get("schedule")
    if rate is None:
        return ""
    return f"learning rate {rate}" if schedule is None else f"learning rate {rate}, {schedule}"
