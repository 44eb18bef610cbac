"""Write the pages that follow from something else, or say which of them are out of date.

docs/api/ follows from the docstrings of the public names, docs/papers.md from docs/papers.toml,
docs/benchmarks/ and the regions between ``<!-- generated: NAME -->`` and ``<!-- end -->`` from
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

Every table of these pages is written from a results file that a command in this repository made;
`make bench` runs them all. The page of each benchmark says how it was measured, on what machine and
with which seeds. An error is that of Law 1 ([why](../why.md#how-exactness-is-measured)) unless its
column says otherwise. Written by `make docs`: do not edit."""
FOLDERS = {
    "mbs": "Micro Batch Streaming: exactness, speed, memory",
    "agbn": "AGBN: BatchNorm of the full batch",
    "outofcore": "Out of core: tensors that leave the device",
    "ucudnn": "u-cuDNN: convolutions and vocabularies",
    "guide": "Plans, profiles and several GPUs",
    "integrations": "Trainers and other libraries",
    "hosts": "Inside other packages: timm, MONAI, TRL, nnU-Net, ultralytics, open_clip",
    "concepts": "Concepts",
}
"""Titles of the pages, by the folder of `benchmarks` that each is of."""
LONG = 35
"""Lines of a benchmark that stays on the page of its folder; a longer one has its own page."""


def benchmarks_pages() -> dict[str, str]:
    """Return the pages of docs/benchmarks by their names, one for each folder of benchmarks."""
    pages = {folder: [f"# {title}"] for folder, title in FOLDERS.items()}
    listed: dict[str, list[str]] = {folder: [] for folder in FOLDERS}
    for name, title in TITLES.items():
        folder = WRITERS[name][0].partition("/")[0]
        text = _benchmark(name)
        page, anchor = f"{folder}.md", f"#{slug(title)}"
        if text.count("\n") > LONG:
            page, anchor = f"{name}.md", ""
            pages[name] = [f"# {title}", text]
            text = f"[It has a page of its own]({page})."
        pages[folder] += [f"## {title}", text]
        listed[folder].append(f"- [{title}]({page}{anchor})")
    parts = [BENCHMARKS]
    for folder, links in listed.items():
        parts += [f"## [{FOLDERS[folder]}]({folder}.md)", "\n".join(links)]
    return {name: "\n\n".join(page) + "\n" for name, page in {"README": parts, **pages}.items()}


def slug(heading: str) -> str:
    """Return the anchor of a heading, as a forge makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _benchmark(name: str) -> str:
    """Return the tables of a benchmark, its command, and a link to the page beside it."""
    folder, _ = WRITERS[name]
    tables = [TABLES[one]() for one in (f"{name}_summary", name) if one in TABLES]
    about = f"`{command(folder)}`; [how it is measured](../../benchmarks/{folder}/README.md)"
    images = pictures(name, f"../../benchmarks/{folder}/")
    return "\n\n".join([about, *dict.fromkeys(tables), *images])


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


def pages(root: Path) -> dict[Path, str | None]:
    """Return every page below `root`, and what should be in it; None where it should be gone."""
    made: dict[Path, str | None] = {root / "docs" / "papers.md": papers_page()}
    for folder, written in (("api", reference()), ("benchmarks", benchmarks_pages())):
        made |= {root / "docs" / folder / f"{name}.md": text for name, text in written.items()}
    there = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    others = [path for path in there if path not in made]
    return made | {path: None if _generated(path) else filled(path) for path in others}


def main(
    *,
    check: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False,
    root: Annotated[Path, typer.Option(hidden=True)] = ROOT,
) -> None:
    """Write docs/api/, docs/benchmarks/, docs/papers.md and the tables of the other pages."""
    wanted = pages(root)
    stale = [path for path, text in wanted.items() if _found(path) != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(root)} is out of date: run `make docs`")
        raise typer.Exit(1 if stale else 0)
    for path in stale:
        _put(path, wanted[path])
    print(f"wrote {', '.join(str(path.relative_to(root)) for path in stale) or 'nothing new'}")


def _generated(path: Path) -> bool:
    """Say whether a page is in a folder that is written from something else."""
    return path.parent.name in ("api", "benchmarks")


def _put(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
        return
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def _found(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    typer.run(main)
