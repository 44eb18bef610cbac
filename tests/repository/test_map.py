"""The map of the source: reading orders and the contributor's table name what is there."""

from __future__ import annotations

import builtins
import importlib
import io
import re
import tokenize
from pathlib import Path

import pytest
import torch

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
    assert order or folder.parent != SOURCE
    for name in re.findall(r"(?<!`)`([a-z_.]+)`", order):
        path = ROOT / "src" / name.replace(".", "/") if "." in name else folder / name
        assert path.with_suffix(".py").exists() or path.is_dir(), name
    if folder.name != "cli" and folder.parent.name != "cli":  # its files are its commands
        files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert files - set(re.findall(r"`([a-z_]+)`", order)) == set()


ROWS = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("row", ROWS, ids=[row.partition(" (")[0] for row in ROWS])
def test_the_way_of_a_step_names_what_is_there(row: str) -> None:
    modules = [importlib.import_module(link.replace("/", ".")) for link in LINK.findall(row)]
    owner: object = None
    for name in re.findall(r"`([A-Za-z_.]+)`", row):
        first, _, rest = name.partition(".")
        found = [getattr(one, first) for one in (*modules, owner) if hasattr(one, first)]
        assert found, name
        owner = found[0]
        assert not rest or hasattr(owner, rest), name


def test_what_docstrings_name_is_there() -> None:
    """Names in backticks; those of torch and Python, too."""
    files = [path for top in ("src", "tests", "benchmarks") for path in ROOT.glob(f"{top}/**/*.py")]
    there = {*dir(torch), *dir(builtins), *(part for p in files for part in (p.stem, *p.parts))}
    for path in files:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        there |= {token.string for token in tokens if token.type == tokenize.NAME}
    named = {
        (path.name, name)
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", path.read_text())
    }
    assert named
    assert {(file, name) for file, name in named if set(name.split(".")) - there} == set()


def test_a_comment_names_a_test_that_is_there() -> None:
    """The one that fails without the code below it."""
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    there = {path.stem for path in files}
    there |= {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    lines = "\n".join(path.read_text() for path in SOURCE.rglob("*.py")).splitlines()
    comments = [line.partition("#")[2] for line in lines if "#" in line]
    assert {name for line in comments for name in NAMED.findall(line)} - there == set()
