"""Write the pages that follow from something else, or say which of them are out of date.

docs/api.md follows from the docstrings of the public names, docs/papers.md from docs/papers.toml,
docs/benchmarks.md and the regions between ``<!-- generated: NAME -->`` and ``<!-- end -->`` from
results files. Figures and signatures
that are copied by hand drift; here a test compares each page with its source.

    python -m scripts.docs            write
    python -m scripts.docs --check    exit 1, naming what is stale
"""

import re
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.report import fill
from benchmarks.tables import TABLES, TITLES, WRITERS, command, pictures

from scripts.papers import papers_page
from scripts.reference import reference

ROOT = Path(__file__).parents[1]
REGION = re.compile(r"<!-- generated: (\S+) -->\n")
BENCHMARKS = """# Benchmarks

Every table here is written from a results file that a command in this repository made; `make bench`
runs them all. The page of each benchmark says how it was measured, on what machine and with which
seeds. An error is that of Law 1 ([why](why.md#how-exactness-is-measured)) unless its column says
otherwise. Written by `make docs`: do not edit."""


def benchmarks_page() -> str:
    """Return docs/benchmarks.md: each table, its command, and a link to the page beside it."""
    parts = [BENCHMARKS]
    for name, title in TITLES.items():
        folder, _ = WRITERS[name]
        summary = f"{name}_summary"
        tables = [TABLES[one]() for one in (summary, name) if one in TABLES]
        about = f"`{command(folder)}`; [how it is measured](../benchmarks/{folder}/README.md)"
        images = pictures(name, f"../benchmarks/{folder}/")
        parts += [f"## {title}", about, *dict.fromkeys(tables), *images]
    return "\n\n".join(parts) + "\n"


def filled(path: Path) -> str:
    """Return the text of a page with its generated regions made anew.

    Raises:
        ValueError: a region has no end, or no table has its name.
    """
    text = path.read_text()
    names = REGION.findall(text)
    strange = [name for name in names if name not in TABLES]
    if strange:
        raise ValueError(
            f"{path.name}: a generated region must name a table of benchmarks.tables, and "
            f"{strange[0]} is none: take one of {', '.join(sorted(TABLES))}"
        )
    if len(names) != text.count("<!-- end -->"):
        raise ValueError(
            f"{path.name}: every generated region must end with <!-- end -->, and it holds "
            f"{len(names)} beginnings and {text.count('<!-- end -->')} ends: add what is missing"
        )
    return fill(text)


def pages(root: Path) -> dict[Path, str]:
    """Return every page below `root`, and what should be in it."""
    made = {
        root / "docs" / "api.md": reference(),
        root / "docs" / "benchmarks.md": benchmarks_page(),
        root / "docs" / "papers.md": papers_page(),
    }
    written = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return made | {path: filled(path) for path in written if path not in made}


def main(
    *,
    check: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False,
    root: Annotated[Path, typer.Option(hidden=True)] = ROOT,
) -> None:
    """Write docs/{api,benchmarks,papers}.md and the tables of the other pages."""
    wanted = pages(root)
    stale = [path for path, text in wanted.items() if _found(path) != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(root)} is out of date: run `make docs`")
        raise typer.Exit(1 if stale else 0)
    for path in stale:
        path.write_text(wanted[path])
    print(f"wrote {', '.join(str(path.relative_to(root)) for path in stale) or 'nothing new'}")


def _found(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    typer.run(main)
