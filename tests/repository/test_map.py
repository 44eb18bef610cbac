"""The map of the source: reading orders and the contributor's table name what is there."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "anybatch"
FOLDERS = sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)
NAMED = re.compile(r"\btest_\w+")
ROW = re.compile(r"^\| (`.*?\)) \|", re.MULTILINE)
LINK = re.compile(r"\]\(src/(\S+?)(?:/__init__)?\.py\)")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_reading_order_names_files_that_are_there(folder: Path) -> None:
    text = (folder / "__init__.py").read_text()
    assert text.startswith('"""')
    order = text.partition("\nRead ")[2]
    for name in re.findall(r"`([a-z_.]+)`", order):
        path = ROOT / "src" / name.replace(".", "/") if "." in name else folder / name
        assert path.with_suffix(".py").exists() or path.is_dir(), name


def steps() -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of each row of the contributor's table, and the names that it has."""
    for row in ROW.findall((ROOT / "CONTRIBUTING.md").read_text()):
        names = re.findall(r"`([A-Za-z_.]+)`", row)
        yield row, names


@pytest.mark.parametrize(("row", "names"), list(steps()))
def test_the_way_of_a_step_names_what_is_there(row: str, names: list[str]) -> None:
    modules = [importlib.import_module(link.replace("/", ".")) for link in LINK.findall(row)]
    assert names
    owner: object = None
    for name in names:
        first, _, rest = name.partition(".")
        found = [getattr(module, first) for module in modules if hasattr(module, first)]
        found += [getattr(owner, first)] if hasattr(owner, first) else []
        assert found, name
        owner = found[0]
        assert not rest or hasattr(owner, rest), name


def test_a_comment_names_a_test_that_is_there() -> None:
    """The one that fails without the code below it."""
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    there = {path.stem for path in files}
    there |= {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    lines = "\n".join(path.read_text() for path in SOURCE.rglob("*.py")).splitlines()
    comments = [line.partition("#")[2] for line in lines if "#" in line]
    assert {name for line in comments for name in NAMED.findall(line)} - there == set()
