"""Section of a page on the gain from more GPUs.

A plan with a goal has predicted them. A training has not, but it has run steps: Lemma 3.1 bounds
the gain by more GPUs from these only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anybatch import planning
from anybatch.cli.report.drawing import Line, Titled, draw_lines
from anybatch.cli.report.history import Overhead
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
)
from anybatch.cli.report.record import RunRecord
from anybatch.units import show_seconds

if TYPE_CHECKING:
    from anybatch.reports import Scale

SHOWN = (1, 2, 3, 4, 6, 8, 12, 16)
"""GPUs of the table by the lemma, as far as there are samples for them."""

LEFT_OUT = (
    "Lemma 3.1 is of Zou et al., Distributed Training Large-Scale Deep Architectures: computing is "
    "divided among the GPUs, all else that a step took here stays as it is",
    "Left out: summing gradients over a network, which was not measured, and that a small share of "
    "a mini-batch is computed less well; anybatch plan counts both where --gpus, --speedup or "
    "--deadline is given",
)


_MEANING = {
    "Lemma 3.1": "computing is divided, overhead is not",
    "ideal": "twice the GPUs, twice as fast",
}


def scale_out(record: RunRecord) -> list[Section]:
    """Return the section on more GPUs; none without a forecast or steps of a single process."""
    found = None if record.plan is None else record.plan.scale
    if found is not None:
        return [_foreseen(found)]
    shown, samples = Overhead.of(record.history.steps), _samples(record)
    if shown is None or record.ranks > 1 or samples < 2:
        return []
    return [_by_lemma(shown, samples)]


def _foreseen(found: Scale) -> Section:
    goal = (Fact("Goal", found.goal),) if found.goal else ()
    facts = (
        *goal,
        Fact("Worth it", f"up to {found.worth} GPUs", "after that one more gains less than 5 %"),
        Fact("Fastest", f"{found.fastest} GPUs"),
    )
    points = tuple(f"Assumed: {one}." for one in found.assumed)
    return Section("scale", "Scale-out", facts=facts, points=points, figures=(_figure(found),))


def _by_lemma(found: Overhead, samples: int) -> Section:
    ratio = found.ratio
    limit = f"no number of GPUs gets beyond {number(planning.speedup_limit(ratio))} times the speed"
    facts = (
        Fact("R_O", number(ratio), "overhead: all other seconds of a step / seconds of computing"),
        Fact("Waiting for data", show_seconds(found.waiting), "of a step, mean"),
        Fact("Computing", show_seconds(found.computing), "of a step, mean"),
        Fact("All else", show_seconds(found.rest), "of a step, mean: the update above all"),
        *((Fact("Limit", limit),) if ratio else ()),
    )
    measured = (
        f"Measured: {counted(found.steps, 'steps')} of this run; without those that measured "
        "memory, and without tests and checkpoints"
    )
    points = tuple(f"{one}." for one in (measured, *LEFT_OUT))
    gpus = [count for count in SHOWN if count <= samples]
    rows = tuple(
        (
            *(
                str(count),
                show_seconds(found.seconds(count)),
                number(planning.speedup(ratio, count)),
            ),
            percent(planning.efficiency(ratio, count)),
        )
        for count in gpus
    )
    columns = ("GPUs", "A step", "Speedup", "Efficiency")
    table = Table("scaling-numbers", "Gain by more GPUs, at most", columns, rows)
    figure = _curves({"Lemma 3.1": [planning.speedup(ratio, count) for count in gpus]}, gpus, table)
    return Section("scale", "Scale-out", facts=facts, points=points, figures=(figure,))


def _samples(record: RunRecord) -> int:
    """Return the samples of a mini-batch, which the GPUs would share."""
    found = record.part("settings").get("batch_size")
    return found if isinstance(found, int) and found > 0 else max(SHOWN)


def _figure(found: Scale) -> Figure:
    rows = found.rows
    names = ("GPUs", "A step", "Speedup", "Efficiency", "Lemma 3.1")
    table = Table(
        *("scaling-numbers", "Gain by more GPUs", names),
        tuple(
            (
                *(str(row.gpus), show_seconds(row.seconds), number(row.speedup)),
                *(percent(row.efficiency), number(row.lemma)),
            )
            for row in rows
        ),
        marked=frozenset(i for i, row in enumerate(rows) if row.gpus == found.gpus),
    )
    speedups = {
        "predicted": [row.speedup for row in rows],
        "Lemma 3.1": [row.lemma for row in rows],
    }
    return _curves(speedups, [row.gpus for row in rows], table)


def _curves(speedups: dict[str, list[float]], gpus: Sequence[int], table: Table) -> Figure:
    """Return the figure of some speedups by GPUs, next to the ideal."""
    (_, first), *more = speedups.items()
    description = (
        f"From {gpus[0]} to {gpus[-1]} GPUs the speedup goes from {number(first[0])} to "
        f"{number(first[-1])}; ideal would be {gpus[-1]}."
    )
    titled = Titled("scaling", "Speedup by GPUs", description)
    ideal = [float(count) for count in gpus]
    named = [next(iter(speedups)), "ideal", *(name for name, _ in more)]
    lines = [Line(gpus, values) for values in (first, ideal, *(values for _, values in more))]
    keys = tuple(Key(name, "line", i, _MEANING.get(name, "")) for i, name in enumerate(named))
    return figure_of(titled, drawn(lambda: draw_lines(titled, lines, "GPUs")), keys, table)
