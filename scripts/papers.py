"""docs/papers.md: every numbered item of the five papers, and what of this repository it is.

docs/papers.toml says it, and this makes a page of it. A map drawn by hand goes on naming what was
renamed; here every file and name is looked for, and every number must come once.
"""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KINDS = ("Equation", "Algorithm", "Lemma", "Table", "Figure")
HEAD = """# From the papers to the code

Every numbered equation, algorithm, lemma, table and figure of the five papers, in our words, and
the file, test or result here that is it; the dash says that nothing here is, and why. Written from
[papers.toml](papers.toml) by `make docs`: do not edit. A test looks for every file, every name and
every number."""


def papers(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return what docs/papers.toml says: a mapping for each paper, its items in it."""
    found = tomllib.loads((root / "docs" / "papers.toml").read_text())
    return list(found["paper"])


def numbers(item: dict[str, Any]) -> list[tuple[str, str]]:
    """Return ``(category, number)`` of what an item is about."""
    return [(category, number) for category in KINDS for number in item.get(category, [])]


def wanted(paper: dict[str, Any]) -> list[tuple[str, str]]:
    """Return ``(category, number)`` of all that a paper numbers."""
    found = []
    for category, many in paper["numbered"].items():
        names = map(str, range(1, many + 1)) if isinstance(many, int) else many
        found += [(category, name) for name in names]
    return found


def faults(entries: list[dict[str, Any]], root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with a map: numbers that are missing, and files and names that are not.

    Args:
        entries: what `papers` returns.
        root: of the repository.
    """
    for paper in entries:
        name = paper["name"]
        claimed = Counter(wanted(paper))
        there = Counter(one for item in paper["item"] for one in numbers(item))
        yield from (f"{name}: {' '.join(one)} is missing" for one in claimed - there)
        yield from (f"{name}: {' '.join(one)} comes once too often" for one in there - claimed)
        for item in paper["item"]:
            here = f"{name}: {' '.join(numbers(item)[0])}"
            if bool(item.get("where")) == bool(item.get("left")):
                yield f"{here} must be somewhere, or say why not"
            lost = [where for where in item.get("where", []) if not exists(where, root)]
            yield from (f"{here}: there is no {where}" for where in lost)


def exists(where: str, root: Path = ROOT) -> bool:
    """Say whether ``path`` is a file, or ``path::name`` a name that it defines."""
    name, _, symbol = where.partition("::")
    path = root / name
    return path.is_file() and (not symbol or symbol in defined(path))


def defined(path: Path) -> set[str]:
    """Return the functions, classes and methods of a module, methods as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (one.name for one in node.body if isinstance(one, ast.FunctionDef))
            found |= {f"{node.name}.{one}" for one in inner}
    return found


def papers_page(root: Path = ROOT) -> str:
    """Return docs/papers.md."""
    parts = [HEAD]
    for paper in papers(root):
        counts = ((k, len([n for category, n in wanted(paper) if category == k])) for k in KINDS)
        holds = ", ".join(f"{n} {k.lower()}{'s' if n > 1 else ''}" for k, n in counts if n)
        rows = [_row(item, root) for item in paper["item"]]
        table = ["| item | says | is | but |", "| --- | --- | --- | --- |", *rows]
        about = f"*{paper['title']}*: {holds}. {paper['about']}"
        parts += [f"## {paper['name']}", about, "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def _row(item: dict[str, Any], root: Path) -> str:
    kinds = [category for category in KINDS if category in item]
    names = [f"{category} {', '.join(item[category])}" for category in kinds]
    where = "<br>".join(_link(one, root) for one in item.get("where", [])) or "-"
    but = item.get("note", item.get("left", ""))
    return f"| {'; '.join(names)} | {item['says']} | {where} | {but} |"


def _link(where: str, root: Path) -> str:
    """Return a link to a file; a benchmark's page is named by its folder."""
    name, _, symbol = where.partition("::")
    path = Path(name)
    text = symbol or (f"{path.parent.name}, results" if path.name == "README.md" else path.name)
    if path.name == "README.md" and not (root / path.parent / "results.json").exists():
        text = f"{path.parent.name}, no results yet"
    return f"[`{text}`](../{name})" if symbol else f"[{text}](../{name})"
