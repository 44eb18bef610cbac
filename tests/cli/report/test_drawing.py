"""What is drawn is the data: points of a path are an affine image of them, areas are bytes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from tests.cli.report.pages import Node, read
from tests.cli.test_timeline import ordered, timed

from anybatch.cli.report.drawing import Line, Titled, draw_envelope, draw_lines
from anybatch.cli.report.history import Envelope
from anybatch.reports import StepTimeline

TITLED = Titled("name", "a title", "a description")
EXACT = 0.011
"""Units of a drawing: coordinates have two digits."""


def paths(svg: Node, word: str) -> list[list[tuple[float, float]]]:
    """Return the points of the paths that have a word in their style."""
    found = [one for one in svg.all("path") if word in one.attributes.get("style", "")]
    number = r"(-?[\d.]+)"
    return [
        [
            (float(x), float(y))
            for x, y in re.findall(rf"[ML]{number} {number}", one.attributes["d"])
        ]
        for one in found
        if "d" in one.attributes
    ]


def line_of(svg: Node, i: int) -> np.ndarray:
    """Return the points of the `i`-th line; its marks are other paths."""
    return np.array(max(paths(svg, f"stroke: var(--line-{i})"), key=len))


def affine(values: np.ndarray, drawn: np.ndarray) -> tuple[float, float]:
    """Return slope and offset of the map from values to what was drawn; it must be one."""
    slope, offset = np.polyfit(values, drawn, 1)
    assert np.abs(slope * values + offset - drawn).max() <= EXACT
    return float(slope), float(offset)


@pytest.mark.parametrize("seed", range(4))
def test_lines_go_through_their_values_on_one_scale(seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = np.sort(draw.uniform(0, 9, 12))
    values = draw.normal(0, 10.0**seed, (2, 12))
    svg = read(draw_lines(TITLED, [Line(list(x), list(one)) for one in values], "x", integer=False))
    lines = [line_of(svg, i) for i in range(2)]
    for points in lines:
        assert affine(x, points[:, 0])[0] > 0
    slope, _ = affine(values.ravel(), np.concatenate([points[:, 1] for points in lines]))
    assert slope < 0  # up is more


def test_what_is_no_number_is_a_gap() -> None:
    y = [1.0, 2.0, math.nan, 3.0, math.inf, 1.0, 2.0]
    svg = draw_lines(TITLED, [Line(list(range(7)), y)], "x")
    (path,) = [one for one in re.findall(r'd="(M[^"]*)"', svg) if one.count("M") > 1]
    assert path.count("M") == 3
    assert path.count("L") == 2


@pytest.mark.parametrize(
    "step", [ordered(), timed(), timed(36), ordered(1)], ids=["order", "times", "tight", "one"]
)
def test_areas_are_bytes_by_owner(step: StepTimeline) -> None:
    found = Envelope.of(step)
    svg = read(draw_envelope(TITLED, found, 1))
    widths = np.diff(found.edges)
    held = np.array(found.live, float).T @ widths
    areas = []
    assert len(set(found.styles)) == len(found.owners)
    for i in found.styles:
        fills = (f"var(--band-{i})", f"url(#hatch-{i})")
        plain, hatched = (paths(svg, f"fill: {fill}") for fill in fills)
        assert plain == hatched
        x, y = np.array(plain[0]).T
        areas.append(abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2)
    assert np.array(areas) / sum(areas) == pytest.approx(held / held.sum(), abs=2e-3)


def test_a_budget_is_drawn_on_the_scale_of_the_bytes_or_not_at_all() -> None:
    found = Envelope.of(ordered())
    svg = read(draw_envelope(TITLED, found, 1 << 20))
    (limit,) = paths(svg, "stroke: var(--limit)")
    outline = max(paths(svg, "stroke: var(--ink); stroke-width: 0.9"), key=len)
    floor = max(y for band in paths(svg, "fill: var(--band-0)") for _, y in band)
    top = min(y for _, y in outline)
    share = (floor - limit[0][1]) / (floor - top)
    assert share == pytest.approx(found.budget / found.peak, rel=1e-3)
    far = read(draw_envelope(TITLED, replace(found, budget=1 << 40), 1 << 20))
    assert paths(far, "stroke: var(--limit)") == []


def test_names_of_phases_do_not_lie_on_each_other() -> None:
    phases = (
        ("first inspection", 0.0),
        ("three micro-batches", 3.0),
        ("update", 30.0),
        ("end", 39.5),
    )
    svg = read(draw_envelope(TITLED, replace(Envelope.of(ordered()), phases=phases), 1))
    texts = [one for one in svg.all("text") if one.text in dict(phases)]
    assert [one.text for one in texts] == list(dict(phases))
    boxes = [(one.attributes["y"], *reach(one)) for one in texts]
    for (y, begin, _), (other, _, end) in combinations(reversed(boxes), 2):
        assert y != other or end <= begin
    assert len({y for y, *_ in boxes}) == 2
    assert max(end for *_, end in boxes) <= 420


def reach(text: Node) -> tuple[float, float]:
    """Return where a text begins and ends, with letters of half their height."""
    x, width = float(text.attributes["x"]), 12 * 0.55 * len(text.text)
    right = "text-anchor: end" in text.attributes["style"]
    return (x - width, x) if right else (x, x + width)
