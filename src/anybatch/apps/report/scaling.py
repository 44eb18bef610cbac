"""The section of a page that tells what more GPUs are worth."""

from __future__ import annotations

from anybatch._scale import Scale
from anybatch.apps.report.drawing import Line, Titled, draw_lines
from anybatch.apps.report.known import Known
from anybatch.apps.report.parts import Fact, Figure, Key, Section, Table
from anybatch.apps.report.words import drawn, figure_of, number, percent
from anybatch.units import show_seconds


def scale_out(known: Known) -> list[Section]:
    """Return what more GPUs are worth; nothing where nobody asked."""
    found = None if known.plan is None else known.plan.scale
    if found is None:
        return []
    goal = (Fact("Goal", found.goal),) if found.goal else ()
    facts = (
        *goal,
        Fact("Worth it", f"up to {found.worth} GPUs", "after that one more gains less than 5 %"),
        Fact("Fastest", f"{found.fastest} GPUs"),
    )
    points = tuple(f"Assumed: {one}." for one in found.assumed)
    return [Section("scale", "Scale-out", facts=facts, points=points, figures=(_figure(found),))]


def _figure(found: Scale) -> Figure:
    rows = found.rows
    gpus, speedups = [row.gpus for row in rows], [row.speedup for row in rows]
    description = f"From {gpus[0]} to {gpus[-1]} GPUs the speedup goes from " + (
        f"{number(speedups[0])} to {number(speedups[-1])}; ideal would be {gpus[-1]}."
    )
    titled = Titled("scaling", "Speedup by GPUs", description)
    lines = [
        Line(gpus, speedups),
        Line(gpus, [float(count) for count in gpus]),
        Line(gpus, [row.lemma for row in rows]),
    ]
    names = ("GPUs", "A step", "Speedup", "Efficiency", "Lemma 3.1")
    table = Table(
        *("scaling-numbers", "What more GPUs are worth", names),
        tuple(
            (
                *(str(row.gpus), show_seconds(row.seconds), number(row.speedup)),
                *(percent(row.efficiency), number(row.lemma)),
            )
            for row in rows
        ),
        marked=frozenset(i for i, row in enumerate(rows) if row.gpus == found.gpus),
    )
    keys = (
        Key("predicted", "line", 0),
        Key("ideal", "line", 1),
        Key("Lemma 3.1", "line", 2),
    )
    return figure_of(titled, drawn(lambda: draw_lines(titled, lines, "GPUs")), keys, table)
