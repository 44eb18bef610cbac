"""What the pages say is run: their Python, their commands, and what they call missing."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import anybatch
from anybatch.cli.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SAID = re.compile(r"\s*print\(.*\)  # (.+)$").match


class Block(NamedTuple):
    """A fenced block and the line of the page at which it starts."""

    line: int
    text: str


def blocks(text: str, language: str) -> Iterator[Block]:
    """Yield the blocks of a page that are marked as `language`, in order."""
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(text.count("\n", 0, found.start(1)), found[1])


class Page:
    """A page whose Python runs in one namespace; a comment after a print is what it must print."""

    def __init__(self, name: str, text: str) -> None:
        self.names: dict[str, Any] = {"__name__": name, "print": self.tell}
        self.name, self.lines = name, text.splitlines()
        self.blocks = list(blocks(text, "python"))
        self.documented: set[int] = set()

    def run(self) -> dict[str, Any]:
        """Run the blocks in order and return their namespace; every promised print must come."""
        promised = set()
        for line, block in self.blocks:
            promised |= {line + i for i, code in enumerate(block.splitlines(), 1) if SAID(code)}
            # The empty lines give errors the page's own line numbers.
            exec(compile("\n" * line + block, self.name, "exec"), self.names)
        assert promised <= self.documented, (
            f"{self.name}: nothing printed at {promised - self.documented}"
        )
        return self.names

    def tell(self, *values: Any) -> None:
        """Stand in for print."""
        number = sys._getframe(1).f_lineno
        said = SAID(self.lines[number - 1])
        printed = " ".join(map(str, values))
        assert said is None or said[1] == printed, f"{self.name}:{number} printed {printed}"
        self.documented.add(number)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")  # Lightning calls torch so
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_the_code_of_a_page_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Page(path.name, path.read_text()).run()
    assert list(tmp_path.iterdir()) == []


def test_a_comment_that_is_not_what_is_printed_fails() -> None:
    page = "Text.\n\n```python\nx = 1\nprint(x)  # 1\nprint(x + 1)  # 3\n```\n"
    with pytest.raises(AssertionError, match="page:6 printed 2"):
        Page("page", page).run()


def test_a_promised_print_that_never_comes_fails() -> None:
    page = "```python\nif False:\n    print(1)  # 1\n```\n"
    with pytest.raises(AssertionError, match=r"page: nothing printed at \{3\}"):
        Page("page", page).run()


def test_the_first_example_is_ten_lines_and_takes_a_step() -> None:
    text = PAGES[0].read_text()
    first = next(blocks(text, "python"))
    assert len([line for line in first.text.splitlines() if line]) == 10
    names = Page("README.md", text).run()
    last = names["engine"].last
    assert last.samples == 1000
    assert last.predicted_bytes is not None
    assert last.micro_batches > 1
    assert last.predicted_bytes <= 256 * 1024
    assert names["engine"].plan.exact
    assert len(names["optimizer"].state) == 4


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield every line of the pages' shell blocks, as words."""
    for path in PAGES:
        for _, block in blocks(path.read_text(), "bash"):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[0] == "torchrun":
                    words = words[words.index("-m") + 1 :]
                yield path.name, words


def test_every_command_of_the_pages_is_one() -> None:
    group = typer.main.get_command(app)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    observed = set()
    for page, (program, name, *rest) in commands():
        observed.add((program, name))
        if program == "make":
            assert name in targets, f"{page}: make {name}"
        else:
            assert program == "anybatch", f"{page}: {program}"
            subcommand = group.commands[name]
            subcommand.make_context(name, list(rest)).close()  # refuses an unknown option
    assert {
        ("make", "demo"),
        ("make", "test"),
        ("anybatch", "train"),
        ("anybatch", "plan"),
        ("anybatch", "check"),
    } <= observed


def test_the_newcomers_hour_runs_from_the_first_command_to_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: Callable[[int], int]
) -> None:
    """Every command of that page, in its order, in an empty folder; a soak as it is written."""
    monkeypatch.chdir(tmp_path)
    size = str(counted(512))
    fewer = {"--batch-size 512": f"--batch-size {size}"}
    if size != "512":
        fewer |= {"--epochs 3": "--epochs 1", "--model resnet20": "--model cnn:16"}
    page = (ROOT / "docs" / "guide" / "first_hour.md").read_text()
    shorter, said = page, []
    for written, here in fewer.items():
        shorter = shorter.replace(written, here)
    for _, block in blocks(shorter, "bash"):
        for line in block.splitlines():
            words = shlex.split(line)[1:]
            threads = [] if words[0] == "report" else ["--threads", "1"]
            result = CliRunner().invoke(app, [*words, *threads])
            assert result.exit_code == 0, f"{line}\n{result.output}"
            said.append(result.output)
    assert len(said) == 9
    assert page.count("--batch-size 512") == 7
    assert page.count("--epochs 3") == 1
    assert "runner-up" in said[0]
    assert "an epoch of" in said[0]
    assert said[1].startswith("exact:")
    assert "R_O" in said[2]
    assert "of 8 workers" in said[8]
    assert (tmp_path / "plan.html").exists()
    assert (tmp_path / "runs" / "hour" / "report.html").exists()
    assert (tmp_path / "hour.html").read_text().startswith("<!doctype html>")
    assert "3 times as fast" in said[6]
    assert "Lemma 3.1" in said[6]
    assert "steps in 6 h: 1 GPU" in said[7]


def test_batchnorm_with_algorithm_1_and_what_is_compiled_is_refused() -> None:
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    literal = anybatch.Loss.algorithm1(nn.MSELoss())
    compiled = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    compiled.compile(backend="eager")
    for model, loss in [(nn.BatchNorm1d(3), literal), (compiled, nn.MSELoss())]:
        engine = anybatch.Engine(model, loss, micro_batch=2)
        with pytest.raises(anybatch.errors.NotExactError, match='Use batchnorm="local"'):
            engine.backward(x, y)
