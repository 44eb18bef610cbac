"""The page in a real browser: what a person sees, hears and reaches by keyboard.

HTML that is right may still be read by nobody: grey on grey, wider than the telephone, unreachable
without a mouse. So a headless Chromium opens the page, and measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cli.report.pages import in_order, log_of, plan_of, record_of, scaled, with_offload

from anybatch.cli.report.history import RunHistory
from anybatch.cli.report.write import page_of

LONG = "a_folder_with_a_name_that_no_telephone_shows_in_one_line_" * 3

WIDTHS = (320, 360, 768, 1440)

CONTRAST = """() => {
    const channel = c => { c /= 255; return c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4 }
    const parts = text => text.match(/[\\d.]+/g).map(Number)
    const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b)
    const ground = node => {
        for (; node; node = node.parentElement) {
            const found = parts(getComputedStyle(node).backgroundColor)
            if (found.length < 4 || found[3] > 0) return found
        }
        throw new Error('nothing below')
    }
    const ratio = (color, node) => {
        const [a, b] = [light(parts(color)), light(ground(node))].sort((x, y) => y - x)
        return (a + .05) / (b + .05)
    }
    const found = {text: [], line: []}
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement
        if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue
        const style = getComputedStyle(node)
        const color = node.closest('svg') ? style.fill : style.color
        if (!node.matches('title, desc')) found.text.push([ratio(color, node), node.textContent])
    }
    for (const node of document.querySelectorAll('.swatch path'))
        found.line.push([ratio(getComputedStyle(node).stroke, node.closest('li')), 'line'])
    return found
}"""
OVERFLOW = """() => [...document.querySelectorAll('body, body *')].filter(node =>
    !node.closest('.scroll') && !node.closest('svg')
    && node.getBoundingClientRect().right > innerWidth + 1
).map(node => node.outerHTML.slice(0, 80))"""
LETTERS = """() => [...document.querySelectorAll('.drawing text')]
    .map(text => text.getBoundingClientRect().height)"""
FOCUS = """() => {
    const node = document.activeElement, style = getComputedStyle(node)
    const box = node.getBoundingClientRect()
    return {
        html: node.outerHTML.slice(0, 120),
        outline: style.outlineStyle == 'none' ? 0 : parseFloat(style.outlineWidth),
        seen: box.width > 0 && box.bottom > 0 && box.top < innerHeight,
    }
}"""
REACHABLE = """() => [...document.querySelectorAll('a[href], summary, [tabindex="0"]')]
    .filter(node => node.checkVisibility()).map(node => node.outerHTML.slice(0, 120))"""

LISTEN = """node => { window.scrolled = new Promise((done, fail) => {
    node.addEventListener('scroll', () => done(), {once: true})
    setTimeout(() => fail(new Error('it does not scroll')), 10000)
}) }"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything that a page can have, and long names."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    history = RunHistory.of(log_of(separate=True))
    record = record_of(
        f" {LONG}", step=in_order(), plan=with_offload(plan_of(LONG)), history=history
    )
    path.write_text(page_of(record))
    return path


@contextmanager
def opened(chromium: Any, file: Path, width: int = 1440, **more: Any) -> Iterator[Any]:
    """Open a page; nothing but itself may be asked for, and nothing be complained about."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, **more)
    requests, said = list[str](), list[str]()
    context.on("request", lambda request: requests.append(request.url))
    context.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri())
    yield page
    assert requests == [file.as_uri()]
    assert said == []
    context.close()


def open_all(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_can_be_read_and_nothing_is_cut_off(
    chromium: Any, file: Path, scheme: str
) -> None:
    with opened(chromium, file, color_scheme=scheme) as page:
        for _ in range(2):
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
                assert wide[0] <= wide[1] == width
                assert page.evaluate(OVERFLOW) == []
                assert min(page.evaluate(LETTERS)) > 9
            found = page.evaluate(CONTRAST)
            assert len(found["text"]) > 100
            assert [one for one in found["text"] if one[0] < 4.5] == []
            assert len(found["line"]) >= 6
            assert [one for one in found["line"] if one[0] < 3] == []
            open_all(page)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) > 384) is (scheme == "light")


@pytest.mark.parametrize("epochs", [0, 1, 300])
def test_a_run_of_any_length_fits_a_telephone(chromium: Any, epochs: int, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    history = RunHistory.of(log_of(epochs, metric="iou"))
    path.write_text(page_of(record_of(history=history, plan=scaled(plan_of()))))
    with opened(chromium, path, 390, color_scheme="dark") as page:
        open_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate(OVERFLOW) == []
        assert page.locator(".drawing").count() >= 2


def test_figures_stand_side_by_side_where_the_page_is_wide(chromium: Any, file: Path) -> None:
    tops = {}
    for width in (360, 1440):
        with opened(chromium, file, width) as page:
            boxes = [page.locator(f"#{name}-figure").bounding_box() for name in ("loss", "metric")]
            tops[width] = [box["y"] for box in boxes]
            width_of = page.locator("main").bounding_box()["width"]
        assert width_of > 0.9 * width
    assert tops[1440][0] == tops[1440][1]
    assert tops[360][0] < tops[360][1]


def test_everything_is_reached_by_keyboard_in_order(chromium: Any, file: Path) -> None:
    with opened(chromium, file, 768) as page:
        expected = page.evaluate(REACHABLE)
        assert len(expected) > 15
        for one in expected:
            page.keyboard.press("Tab")
            found = page.evaluate(FOCUS)
            assert found["html"] == one
            assert found["outline"] >= 2, one
            assert found["seen"], one
        assert "Skip to the content" in expected[0]


def test_enter_opens_and_the_scroll_box_inside_is_next(chromium: Any, file: Path) -> None:
    with opened(chromium, file, 360) as page:
        for i in range(page.locator("details").count()):
            details = page.locator("details").nth(i)
            summary, box = details.locator("summary"), details.locator(".scroll")
            summary.focus()
            assert not box.is_visible()
            page.keyboard.press("Enter")
            assert box.is_visible()
            page.keyboard.press("Tab")
            assert box.evaluate("node => node == document.activeElement")
            if box.evaluate("node => node.scrollWidth > node.clientWidth"):
                box.evaluate(LISTEN)
                page.keyboard.press("ArrowRight")
                page.evaluate("window.scrolled")
                assert box.evaluate("node => node.scrollLeft") > 0
            page.keyboard.press("Shift+Tab")
            page.keyboard.press("Enter")
            assert not box.is_visible()


def test_the_skip_link_skips(chromium: Any, file: Path) -> None:
    with opened(chromium, file) as page:
        link = page.locator(".skip")
        assert link.bounding_box()["y"] < 0
        page.keyboard.press("Tab")
        assert link.bounding_box()["y"] >= 0
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('main') != null")


def test_the_page_needs_no_script(chromium: Any, file: Path) -> None:
    with opened(chromium, file, java_script_enabled=False) as page:
        assert page.get_by_role("heading", level=1).inner_text().startswith("cnn")
        page.locator("#loss-figure summary").click()
        assert page.locator("#loss-numbers").is_visible()
        assert page.locator("#loss-figure svg[role=img]").is_visible()


def test_what_is_drawn_is_named_to_those_who_do_not_see_it(chromium: Any, file: Path) -> None:
    with opened(chromium, file) as page:
        open_all(page)
        titles = ("Loss by epoch", "Accuracy by epoch", "Samples a second by step")
        for title in titles:
            assert page.get_by_role("img", name=title).count() == 1
            assert page.get_by_role("table", name=title).count() == 1
            assert page.get_by_role("region", name=title).count() == 1
        for role in ("main", "banner", "contentinfo"):
            assert page.get_by_role(role).count() == 1
        assert page.get_by_role("navigation", name="Sections").count() == 1
        assert page.get_by_role("img").count() == page.locator("figure").count()


def test_on_paper_it_is_black_on_white_and_complete(chromium: Any, file: Path) -> None:
    with opened(chromium, file, 720, color_scheme="dark") as page:
        open_all(page)
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
        assert [one for one in page.evaluate(CONTRAST)["text"] if one[0] < 4.5] == []
        assert not page.locator("nav").is_visible()
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_a_page_with_a_hostile_name_runs_nothing(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(page_of(record_of("<img src=x onerror=alert(1)><script>alert(2)</script>")))
    alerts = list[str]()
    with opened(chromium, path) as page:
        page.on("dialog", lambda dialog: alerts.append(dialog.message) or dialog.dismiss())
        assert "<script>alert(2)</script>" in page.get_by_role("heading", level=1).inner_text()
    assert alerts == []
