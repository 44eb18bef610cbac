"""matplotlib's SVG made a part of a page: its colours are the page's, its names are read aloud.

A figure of matplotlib is a file by itself: it fixes colours, so it is a white sheet on a dark page;
its ids are those of every other figure; its fonts are its own; and a screen reader finds nothing in
it. So a figure is drawn in stand-in colours, one for each role, and here each becomes a variable of
the page's style sheet:

    style="stroke: #0a0001"   ──>   style="stroke: var(--line-1)"

Ids that nothing refers to go, the others get the figure's name in front of them.
"""

from __future__ import annotations

import re
from itertools import count
from xml.etree import ElementTree

HATCHES = (
    *("", "M-2 2L2-2M0 8L8 0M6 10L10 6", "M-2 6L2 10M0 0L8 8M6-2L10 2", "M0 4V8M4 0V4"),
    *("M0 4H8", "M2 2h1M6 6h1", "M4 0V8", "M0 0L8 8M8 0L0 8", "M1 4h2M5 4h2M1 0h2M5 0h2"),
    *("M0 4H8M4 0V8", "M1 2l3 3l3-3"),
)
"""Patterns over a band, in a square of 8, to distinguish it without its colour."""

LINES, BANDS = 3, len(HATCHES)
"""Distinct styles of lines and of bands."""

ROLES = {
    "#0a0000": "var(--ink)",
    "#0a0010": "var(--muted)",
    "#0a0020": "var(--grid)",
    "#0a0030": "var(--limit)",
    **{f"#0b00{i:02x}": f"var(--line-{i})" for i in range(LINES)},
    **{f"#0c00{i:02x}": f"var(--band-{i})" for i in range(BANDS)},
    **{f"#0d00{i:02x}": f"url(#hatch-{i})" for i in range(BANDS)},
}
"""Colour of a drawn figure -> its replacement."""

INK, MUTED, GRID, LIMIT = list(ROLES)[:4]

_COLOR = re.compile("|".join(ROLES))
_LONG = re.compile(r"-?\d+\.\d{3,}")
_URL = re.compile(r"url\(#([^)]+)\)")
_REFERENCE = re.compile(r"(?:url\(|href=\")#([^)\"]+)")
_FONT = re.compile(r"font(-\w+)?:[^;]*;?\s*")
_SIZE = re.compile(r"font(?:-size)?:[^;]*?(\d+(?:\.\d+)?)px")


def line_color(i: int) -> str:
    """Return the colour in which the `i`-th line is drawn."""
    return f"#0b00{i % LINES:02x}"


def band_color(i: int, *, hatched: bool = False) -> str:
    """Return the colour in which the `i`-th band is drawn, or its pattern."""
    return f"#{'0d' if hatched else '0c'}00{i % BANDS:02x}"


def inlined(svg: bytes, name: str, title: str, description: str) -> str:
    """Return a figure as an element of a page.

    Args:
        svg: as matplotlib writes it.
        name: of the figure, unique in the page.
        title: its title.
        description: its contents, in words.
    """
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if _tag(child) in ("metadata", "style"):
                parent.remove(child)
    _rename_ids(root, name)
    for element in root.iter():
        element.tag = _tag(element)
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        element.attrib.clear()
        element.attrib.update({key: _themed(key, value) for key, value in attributes.items()})
    box = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib.update(
        {"viewBox": box, "role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    )
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        child.text = text
        root.insert(place, child)
    return ElementTree.tostring(root, encoding="unicode")


def _tag(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]


def _rename_ids(root: ElementTree.Element, name: str) -> None:
    """Give ids that are referred to a name of this figure's; remove the others."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = set(_REFERENCE.findall(text))
    new = _names(root, name, used)
    for element in root.iter():
        old = element.attrib.pop("id", "")
        for key, value in element.attrib.items():
            if key.endswith("href"):
                element.set(key, f"#{new[value[1:]]}")
            elif "url(#" in value:
                element.set(key, _URL.sub(lambda hit: f"url(#{new[hit[1]]})", value))
        if old in new:
            element.set("id", new[old])


def _names(root: ElementTree.Element, name: str, used: set[str]) -> dict[str, str]:
    """Return the new name of each id; a shape that is drawn twice is stored, and named, once."""
    new, shapes, numbers = dict[str, str](), dict[str, str](), count()
    for parent in list(root.iter()):
        for element in list(parent):
            old, shape = element.get("id", ""), element.get("d", "")
            if old not in used:
                continue
            if shape in shapes:
                parent.remove(element)
            new[old] = shapes.get(shape) or f"{name}-{next(numbers)}"
            if shape:
                shapes[shape] = new[old]
    return new


def _themed(key: str, value: str) -> str:
    """Return an attribute with the page's colours and font, and with two digits."""
    if key == "style" and "font" in value:
        size = _SIZE.search(value)
        value = (f"font-size: {size[1]}px; " if size else "") + _FONT.sub("", value)
    value = _COLOR.sub(lambda hit: ROLES[hit[0]], value)
    value = _LONG.sub(lambda hit: f"{float(hit[0]):.2f}", value)
    return _without_repeats(value) if key == "d" else value


def _without_repeats(path: str) -> str:
    """Return a path without the lines that lead nowhere: steps have as many as others."""
    parts = re.findall(r"[A-Za-z][^A-Za-z]*", path)
    points = [(part[0], part[1:].split()) for part in parts]
    distinct = [
        f"{letter}{' '.join(numbers)}"
        for i, (letter, numbers) in enumerate(points)
        if letter != "L" or numbers != points[i - 1][1]
    ]
    return "".join(distinct)
