"""The pages follow from their sources, links lead somewhere, and every public name is told."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from scripts import docs, reference

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").rglob("*.md"),
]
FOLDERS = ("src", "tests", "docs", "scripts", "benchmarks", ".ci")
TEXT = (".py", ".md", ".toml", ".json", ".jsonl", ".txt", ".svg", "")
MACHINE = re.compile(r"(?<![\w.}\])])/(home|root|work|tmp|mnt|Users|private|usr/local)/\w")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the pages, to spoil."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def check(root: Path) -> int:
    """Run the command with --check and return its exit code."""
    with pytest.raises(typer.Exit) as stop:
        docs.main(check=True, root=root)
    return stop.value.exit_code


def test_the_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    code = check(ROOT)
    assert (code, capsys.readouterr().out) == (0, "")


@pytest.mark.parametrize(
    "name", ["README.md", "docs/api/engine.md", "docs/benchmarks/mbs.md", "docs/why.md"]
)
def test_a_stale_page_is_named_and_written_again(
    name: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = copied / name
    right = page.read_text()
    spoilt = re.sub(r"(<!-- generated: \S+ -->\n)", r"\1old figures\n", right)
    page.write_text(spoilt if spoilt != right else f"{right}old figures\n")
    assert check(copied) == 1
    assert capsys.readouterr().out == f"{name} is out of date: run `make docs`\n"
    docs.main(root=copied)
    assert capsys.readouterr().out == f"wrote {name}\n"
    assert page.read_text() == right
    docs.main(root=copied)
    assert capsys.readouterr().out == "wrote nothing new\n"


def test_a_missing_page_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "docs" / "api" / "engine.md").unlink()
    assert check(copied) == 1
    assert capsys.readouterr().out == "docs/api/engine.md is out of date: run `make docs`\n"


def test_a_page_that_nothing_writes_any_more_is_named_and_removed(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = copied / "docs" / "api" / "old.md"
    old.write_text("# Old\n")
    assert check(copied) == 1
    assert capsys.readouterr().out == "docs/api/old.md is out of date: run `make docs`\n"
    docs.main(root=copied)
    assert not old.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<!-- generated: nothing -->\n<!-- end -->\n",
            "a table of benchmarks.tables, and nothing",
        ),
        ("<!-- generated: bf16 -->\n", "it holds 1 beginnings and 0 ends"),
    ],
)
def test_a_region_that_cannot_be_filled_is_refused(text: str, message: str, copied: Path) -> None:
    (copied / "docs" / "why.md").write_text(text)
    with pytest.raises(ValueError, match=message):
        docs.main(root=copied)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as a forge makes them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere; links to other sites are not followed."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title, here\n\n[a](page.md#a-title-here) [b](gone.md) [c](#gone)\n")
    assert list(broken(page)) == ["gone.md", "#gone"]


def written() -> Iterator[Path]:
    """Yield every text file that a person reads or runs."""
    here = (path for path in ROOT.iterdir() if path.name != ".git")
    yield from (path for path in here if path.is_file() and path.suffix in TEXT)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path


def test_no_file_names_a_path_of_a_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {hit[0]}"
        for path in written()
        for hit in MACHINE.finditer(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["home", "root", "tmp", "Users"])
def test_a_path_of_a_machine_is_found(folder: str) -> None:
    assert MACHINE.search(f'data = "/{folder}/me/data"')
    assert not MACHINE.search(f"https://example.org/{folder}/me")


def public_names() -> dict[str, Any]:
    """Every public name and every public method of a public class."""
    found = dict(reference.public())
    for name, value in reference.public().items():
        if isinstance(value, type) and not reference.is_error(value):
            for member, (_, function) in reference.members(value).items():
                found[f"{name}.{member}"] = function
    return found


def untold(value: Callable[..., Any]) -> Iterator[str]:
    """Yield what a docstring leaves out: arguments, fields, the result, exceptions raised."""
    doc = inspect.getdoc(value) if value.__doc__ else None
    if not doc:
        yield "a docstring"
        return
    parts = dict(reference.sections(doc))
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else []
    listed = dict(reference.entries(parts.get("Attributes", "")))
    told = [field.name for field in fields if not field.name.startswith("_")]
    yield from (f"field {name}" for name in told if name not in listed)
    if isinstance(value, type) and (fields or issubclass(value, Exception)):
        return
    found = inspect.signature(value)
    if inspect.isfunction(value) or not inspect.isabstract(value):
        listed = dict(reference.entries(parts.get("Args", "")))
        names = [name for name in found.parameters if name not in ("self", "cls")]
        yield from (f"argument {n}" for n in names if n not in listed and f"`{n}`" not in doc)
    if isinstance(value, type):
        return
    if found.return_annotation not in ("None", found.empty) and len(found.parameters) > 1:
        says = "Returns" in parts or re.search(r"\b([Rr]eturn|[Yy]ield)", doc)
        yield from [] if says else ["what is returned"]
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc]
    yield from ["what is raised"] if raised and "Raises" not in parts else []


@pytest.mark.parametrize("name", list(public_names()))
def test_every_public_name_is_documented(name: str) -> None:
    assert list(untold(public_names()[name])) == []


def test_a_thin_docstring_is_found() -> None:
    def thin(x: int, y: int) -> int:
        """Add `x` and something."""
        if y < 0:
            raise ValueError
        return x + y

    def bare(x: int) -> None: ...

    assert list(untold(thin)) == ["argument y", "what is returned", "what is raised"]
    assert list(untold(bare)) == ["a docstring"]


def test_the_reference_holds_every_public_name() -> None:
    text = "".join(reference.reference().values())
    headings = re.findall(r"^###? (\S+)$", text, re.MULTILINE)
    assert set(headings) >= set(public_names())
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda one: one.name)
def test_a_page_has_three_hundred_lines_at_most(page: Path) -> None:
    """But one that is a single table, with a row for each of many networks."""
    most = 320 if page == ROOT / "docs" / "benchmarks" / "honest.md" else 300
    assert page.read_text().count("\n") <= most
