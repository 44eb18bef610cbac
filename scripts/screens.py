"""Pictures of what a person sees: the site, the page of a run, two terminals and a notebook.

Nothing in them is typed by hand: the command runs in a terminal of its own, and what it wrote there
is drawn; pages are opened in a headless Chromium.

    python -m scripts.screens [--out docs/screens]
"""

import os
import pty
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from io import BytesIO, StringIO
from pathlib import Path
from platform import platform, system
from struct import pack
from tempfile import TemporaryDirectory
from termios import TIOCSWINSZ
from typing import Annotated, Any

import typer

from scripts.website import ROOT, build, lay_out

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DESKTOP, PHONE, COLORS = (1440, 900), (390, 844), 128
WORDS = "train --data digits --batch-size 256 --memory 6MiB --epochs 8 --out run"
CONTROL = re.compile(r"\x1b\[(\??\d*)([A-LhlKJ])|(\r|\n)")
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
NOTEBOOK = """
import torch, anybatch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
loss_fn = torch.nn.CrossEntropyLoss()
engine = anybatch.Engine(model, loss_fn, optimizer=optimizer, memory="512KiB", cache=None)
x, y = torch.randn(1000, 64), torch.randint(10, (1000,))
for _ in range(12):
    optimizer.zero_grad()
    engine.backward(x, y)
    optimizer.step()
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=list(ARGUMENTS))
        yield browser
        browser.close()


def typed(command: str, width: int, folder: Path) -> str:
    """Run a command in a folder and a terminal of `width` columns; return all that it wrote."""
    child, terminal = pty.fork()
    if not child:
        ioctl(0, TIOCSWINSZ, pack("HHHH", 40, width, 0, 0))
        os.environ.update(TERM="xterm-256color", COLUMNS=str(width))
        os.chdir(folder)
        os.execv(sys.executable, [sys.executable, "-m", "anybatch", *command.split()])
    written = BytesIO()
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            break
        written.write(part)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{command} failed:\n{written.getvalue().decode()}")
    return written.getvalue().decode()


def lines_of(written: str) -> list[str]:
    """Return the lines that stand on a terminal, colours in place, after all moves of the cursor.

    Only the moves of the command are known: to the begin of a line, up, and erasing.
    """
    lines, row, fresh, at = [""], 0, False, 0
    for found in [*CONTROL.finditer(written), None]:
        if text := written[at : found.start() if found else None]:
            lines[row], fresh = text if fresh else lines[row] + text, False
        if found is None:
            return [line for line in lines if line.strip()]
        at = found.end()
        count, kind, move = found.groups()
        if move == "\n":
            row, fresh = row + 1, False
            lines += [""] * (row == len(lines))
        elif move == "\r":
            fresh = True
        elif kind == "A":
            row -= int(count or 1)
        elif kind == "K":
            lines[row] = ""
    raise AssertionError


def terminal(command: str, written: str, width: int) -> str:
    """Return what stands on a terminal as SVG that loads nothing."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=width, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ anybatch {command}", style="bold"), highlight=False)
    for line in lines_of(written):
        console.print(Text.from_ansi(line), highlight=False, no_wrap=True, crop=True)
    return FONT.sub("", console.export_svg(title=f"{width} columns", unique_id="terminal"))


def picture(browser: Any, page: Path, out: Path, size: tuple[int, int], *, full: bool) -> None:
    """Write a picture of a page, of few colours."""
    from PIL import Image

    view = browser.new_page(viewport=dict(zip(("width", "height"), size, strict=True)))
    view.goto(page.as_uri())
    drawn = Image.open(BytesIO(view.screenshot(full_page=full))).convert("RGB")
    view.close()
    drawn.quantize(COLORS, dither=Image.Dither.NONE).save(out, optimize=True)


def notebook() -> str:
    """Return a page with the output of three cells."""
    here: dict[str, Any] = {}
    exec(compile(NOTEBOOK, "notebook", "exec"), here)
    engine = here["engine"]
    cells = {"engine.plan": engine.plan, "engine.last": engine.last}
    shown = (f"<p><code>{name}</code></p>{value._repr_html_()}" for name, value in cells.items())
    return (
        f"<!doctype html><meta charset=utf-8><body style='font: 14px sans-serif'>{''.join(shown)}"
    )


def main(*, out: Annotated[Path, typer.Option(help="Folder.")] = ROOT / "docs/screens") -> None:
    """Take all pictures of docs/screens.md anew."""
    out.mkdir(exist_ok=True)
    with TemporaryDirectory() as scratch, chromium() as browser:
        folder = Path(scratch)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        for width, until in ((80, None), (200, r"epoch 8/8 [^\r]*? 1\d/\d+[^\r]*")):
            (folder / str(width)).mkdir()
            written = typed(WORDS, width, folder / str(width))
            moment = re.search(until, written) if until else None
            text = terminal(WORDS, written[: moment.end() if moment else None], width)
            (out / f"train_{width}.svg").write_text(text)
        run = folder / "80" / "run" / "report.html"
        run.write_text(run.read_text().replace(platform(), system()))
        picture(browser, run, out / "report_desktop.png", DESKTOP, full=True)
        picture(browser, run, out / "report_phone.png", PHONE, full=False)
        (folder / "cells.html").write_text(notebook())
        picture(browser, folder / "cells.html", out / "notebook.png", (640, 200), full=True)
        (folder / "pages").mkdir()
        lay_out(ROOT, folder / "pages")
        build(folder / "pages", folder / "site")
        start = folder / "site" / "docs" / "start.html"
        picture(browser, start, out / "site_desktop.png", DESKTOP, full=False)
        picture(browser, start, out / "site_phone.png", PHONE, full=False)
    print("\n".join(f"{path.stat().st_size:>9,} {path}" for path in sorted(out.iterdir())))


if __name__ == "__main__":
    typer.run(main)
