"""The site: built strictly of the pages as they are, whole, and without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from scripts.screens import lines_of
from scripts.website import ROOT, build, lay_out, pages

WIDER = """() => document.documentElement.scrollWidth - document.documentElement.clientWidth"""
CONFIG = ROOT / "mkdocs.yml"
FROM_ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc="?(?:https?:)?//"""
    r"""|<link[^>]*rel="?(?:stylesheet|preload)[^>]*href="?(?:https?:)?//|url\(["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built: a warning ends it."""
    pages_there, out = tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("site")
    lay_out(ROOT, pages_there)
    build(pages_there, out)
    return out


def html(site: Path, page: Path) -> Path:
    """Where a page of the repository is in the site."""
    name = page.relative_to(ROOT)
    return site / name.with_name("index.html" if name.name == "README.md" else f"{name.stem}.html")


def test_every_page_and_every_picture_of_one_is_there(site: Path) -> None:
    for page in pages():
        assert html(site, page).is_file(), page
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (html(site, page).parent / picture).is_file(), f"{page}: {picture}"


def test_every_page_of_docs_is_in_the_list_of_contents() -> None:
    listed = set(re.findall(r"^\s*- (?:[^:\n]+: )?(\S+\.md)$", CONFIG.read_text(), re.MULTILINE))
    docs = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert docs - listed == set()


def test_tables_are_tables_and_code_has_a_page(site: Path) -> None:
    home = (site / "index.html").read_text()
    regions = re.findall(r"<!-- generated: \S+ -->\n\|", (ROOT / "README.md").read_text())
    assert home.count("<table>") >= len(regions) > 0
    assert '<code class="word">--memory</code>' in (site / "docs" / "command.html").read_text()
    assert "<h1" in (site / "src" / "anybatch" / "execution" / "streaming.py.html").read_text()


def test_nothing_is_requested_of_a_network(site: Path) -> None:
    found = {
        str(path.relative_to(site)): hits
        for path in site.rglob("*")
        if path.suffix in (".html", ".css")
        for hits in [FROM_ELSEWHERE.findall(path.read_text())]
        if hits
    }
    assert found == {}
    assert FROM_ELSEWHERE.search('<script src="https://example.org/x.js">')
    assert FROM_ELSEWHERE.search('<link rel="stylesheet" href="//example.org/x.css">')


def test_the_search_finds_a_refusal_in_a_page_that_was_opened_from_a_folder(
    site: Path, chromium: Any
) -> None:
    page, requests = chromium.new_page(), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.click("input.md-search__input")
    page.keyboard.type("all tensors of a batch must have the same first dimension")
    page.wait_for_selector("a.md-search-result__link[href*='refused/batches.html']")
    assert [url for url in requests if not url.startswith("file:")] == []
    page.close()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_its_window(
    site: Path, chromium: Any, width: int, scheme: str
) -> None:
    """Wide tables and code scroll by themselves; the theme is that of the reader."""
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    for name in ("index.html", "docs/start.html", "docs/shown.html", "docs/benchmarks/tables.html"):
        page.goto((site / name).as_uri())
        assert page.evaluate(WIDER) == 0, name
        wanted = "slate" if scheme == "dark" else "default"
        assert page.get_attribute("body", "data-md-color-scheme") == wanted
    context.close()


def test_a_picture_of_a_terminal_has_the_lines_that_stand_on_it() -> None:
    written = (
        "first\r\nold\r\x1b[2K\x1b[3mnew\x1b[0m, whole\r\n\x1b[?25h\r\x1b[1A\x1b[2Klast\r\nend"
    )
    assert lines_of(written) == ["first", "last", "end"]
    assert lines_of("wide line\rnarrow") == ["narrow"]
    for path in (ROOT / "docs" / "screens").glob("*.svg"):
        assert "url(http" not in path.read_text()


def test_what_leads_nowhere_ends_it_and_is_named(tmp_path: Path) -> None:
    folder, config = tmp_path / "pages", tmp_path / "mkdocs.yml"
    folder.mkdir()
    (folder / "index.md").write_text("# A page\n\n[a](gone.md) [b](#lost) ![c](none.png)\n")
    plain = CONFIG.read_text().partition("nav:\n  - ")[0]
    config.write_text(re.sub(r"^extra_css:.*\n", "", plain, flags=re.MULTILINE))
    with pytest.raises(RuntimeError, match="must build without a warning") as raised:
        build(folder, tmp_path / "site", config)
    assert [
        name for name in ("gone.md", "#lost", "none.png") if name not in str(raised.value)
    ] == []
