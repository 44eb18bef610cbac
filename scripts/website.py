"""The documentation as a site: one folder of pages that opens without a server or a network.

The pages are read in the repository first, and link from docs/ to benchmarks/, src/ and tests/; a
site builder knows one folder of pages and calls those links broken. So the pages are laid out for
it as they lie in the repository, with the pictures beside them. A file of code that some page links
to becomes a page of its own, and the link leads there: no link is written twice.

Built strictly: a link or an anchor that leads nowhere ends it. `make site` runs the tests of the
pages before, which execute every example and ask for every public name.

    python -m scripts.website [--out site]
"""

import re
import shutil
import sys
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*(?:\.py|\.toml|\.json|LICENSE))\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", "": "text"}
BESIDE = (".png", ".svg", ".css", ".js")
"""Files that a page needs beside itself, or in a folder of its name."""
WORD = re.compile(r"<code>([^<\s]{1,28})</code>")
"""A word of code in a sentence: a browser would break it behind a hyphen, as in `--memory`."""
LARGEST = 200_000
"""Bytes of a file that is shown; of a longer one, what comes first."""


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages of the repository."""
    found = [root.glob("*.md"), (root / "docs").rglob("*.md"), (root / "benchmarks").rglob("*.md")]
    return sorted(path for some in found for path in some)


def lay_out(root: Path, folder: Path) -> None:
    """Write what the site is built of: pages, their pictures, and a page for each linked file.

    Args:
        root: of the repository.
        folder: an empty folder, which gets the repository's layout.
    """
    linked = set[Path]()
    for page in pages(root):
        text = page.read_text()
        linked |= {(page.parent / name).resolve() for name in LINK.findall(text)}
        name = page.relative_to(root)
        _write(folder / name, boost(name) + LINK.sub(r"](\1.md)", text))
        for extra in (*page.parent.iterdir(), *page.with_suffix("").glob("*")):
            if extra.suffix in BESIDE:
                (folder / extra.relative_to(root)).parent.mkdir(exist_ok=True)
                shutil.copy(extra, folder / extra.relative_to(root))
    for path in sorted(path for path in linked if path.is_file()):
        name = path.relative_to(root)
        _write(folder / f"{name}.md", code_page(str(name), path.read_text()))


def boost(name: Path) -> str:
    """Return the head of a page that tells the search how it ranks.

    What people search for most are the words of a refusal; figures and history come last.
    """
    behind = {"benchmarks", "decisions", "CHANGELOG.md", "CONTRIBUTING.md"} & set(name.parts)
    weight = 0.1 if behind else 10 if "refused" in name.parts else 1
    return f"---\nsearch:\n  boost: {weight}\n---\n"


def code_page(name: str, text: str) -> str:
    """Return a page that shows a file, which the search leaves out."""
    shown = text if len(text) <= LARGEST else f"{text[:LARGEST]}\n... (cut here)"
    head = "---\nsearch:\n  exclude: true\n---\n"
    return f"{head}# {name}\n\n````{LANGUAGES[Path(name).suffix]}\n{shown.rstrip()}\n````\n"


def build(folder: Path, out: Path, config: Path = ROOT / "mkdocs.yml") -> str:
    """Build the site of laid out pages and return what the builder said.

    Raises:
        RuntimeError: a link leads nowhere, or the builder is not installed.
    """
    with TemporaryDirectory() as scratch:
        here = Path(scratch) / "mkdocs.yml"
        here.write_text(config.read_text().replace("docs_dir: docs", f"docs_dir: {folder}"))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
        done = run(
            [*command, "--config-file", here, "--site-dir", out.resolve()],
            capture_output=True,
            text=True,
            check=False,
        )
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"the site must build without a warning, and it said:\n{said}")
    for page in out.rglob("*.html"):
        page.write_text(WORD.sub(r'<code class="word">\1</code>', page.read_text()))
    return said


def main(*, out: Annotated[Path, typer.Option(help="Folder of the site.")] = ROOT / "site") -> None:
    """Build the documentation site."""
    with TemporaryDirectory() as folder:
        lay_out(ROOT, Path(folder))
        build(Path(folder), out)
    print(f"open {out / 'index.html'}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    typer.run(main)
