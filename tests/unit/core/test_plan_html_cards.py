"""What a notebook shows: whole HTML, every text escaped, and the figures those of the plan."""

from __future__ import annotations

from html.parser import HTMLParser
from math import isclose
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch import Engine
from anybatch.core.plan import Plan, bar, considered, table
from anybatch.reports import Candidate, Memory, StepReport
from anybatch.units import show_bytes

VOID = {"br", "img", "hr"}


class Page(HTMLParser):
    """Reads HTML; every tag that is opened must be closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


class Named(nn.Sequential):
    """A model whose name is a person's own."""


def shown(it: Any) -> Page:
    page = Page(it._repr_html_())
    assert not {"script", "style", "link", "img"} & {tag for tag, _ in page.tags}
    assert not any(name in ("src", "href") for _, attrs in page.tags for name in attrs)
    return page


def trained(memory: str | None = "400KiB") -> Engine:
    model = Named(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 3))
    batch = torch.randn(64, 64), torch.randint(0, 3, (64,))
    options: dict[str, Any] = {"micro_batch": 16} if memory is None else {"memory": memory}
    engine = Engine(model, nn.CrossEntropyLoss(), **options)
    assert "none yet" in shown(engine).text
    engine.backward(*batch)
    return engine


def test_an_engine_shows_its_model_its_plan_and_its_last_step() -> None:
    engine = trained()
    page, plan, last = shown(engine), engine.plan, engine.last
    assert plan is not None
    assert plan.memory is not None
    assert last is not None
    assert "Named, 17,411 parameters" in page.text
    for part in (plan, last):
        assert shown(part).text in page.text
    for text in (
        f"{show_bytes(plan.memory.predicted)} of {show_bytes(plan.memory.budget)}",
        f"micro-batch {plan.micro_batch} samples",
        *(f"{name} {show_bytes(count)}" for name, count in plan.memory.owners),
        *plan.reasons,
        f"64 in {last.micro_batches} micro-batches of up to {last.micro_batch}",
    ):
        assert text in page.text
    assert len([tag for tag, _ in page.tags if tag == "summary"]) == 1  # opens by keyboard, too


def test_without_a_budget_there_is_no_bar() -> None:
    engine = trained(None)
    page = shown(engine)
    assert "role" not in {name for _, attrs in page.tags for name in attrs}
    assert "16 samples" in page.text


@pytest.mark.parametrize("budget", [1000, 400, 700])
def test_the_bar_is_as_long_as_the_bytes(budget: int) -> None:
    owners = (("saved", 400), ("a <b>", 250), ("states", 50))
    page = Page(bar(owners, budget))
    full = max(700, budget)
    styles = [str(attrs.get("style")) for tag, attrs in page.tags if tag == "span"]
    widths = [float(s.split("width:")[1].split("%")[0]) for s in styles if "inline-block" in s]
    for width, (_, count) in zip(widths, owners, strict=True):
        assert isclose(width, 100 * count / full, abs_tol=0.01)
    (left,) = [float(s.split("left:")[1].split("%")[0]) for s in styles if "absolute" in s]
    assert isclose(left, 100 * budget / full, abs_tol=0.01)
    assert "a <b> 250 B" in page.text


def test_every_text_is_escaped_and_all_candidates_have_a_line() -> None:
    evil = "<script>alert(1)</script>&"
    rows = (Candidate(2, 10, 1.0), Candidate(4, 20, 0.5), Candidate(8, 10**6))
    memory = Memory(100, evil, 20, ((evil, 20),), 5, 10**6, evil, rows)
    plan = Plan(4, "streaming", "in place", evil, True, (evil,), memory)
    page = shown(plan)
    assert page.text.count(evil) >= 4
    inside = Page(considered(memory, 4, offloaded=False))
    assert "4 20 B 0.5 chosen: the fastest timed" in inside.text
    assert "2 10 B 1 runner-up: 100 % slower" in inside.text
    assert "does not fit" in inside.text
    assert considered(Memory(1, "", 1, (), 1, 1, ""), 4, offloaded=False) == ""
    assert Page(table({evil: evil})).text == f"{evil} {evil}"


def test_a_step_says_what_it_moved_computed_again_and_did_again() -> None:
    loss: Tensor = torch.tensor(1.5)
    plain = StepReport(loss, 8, 4, 2, 0.1, None)
    assert "moved" not in shown(plain).text
    full = StepReport(loss, 8, 4, 2, 0.1, 900, 1000, 2048, 4096, 3)
    text = shown(full).text
    said = "loss 1.5", "900 B of 1000 B", "moved 2.0 KiB", "computed again 4.0 KiB", "retries 3"
    for part in said:
        assert part in text


def test_a_plan_whose_tensors_are_offloaded_says_so() -> None:
    model = nn.Sequential(nn.Linear(32, 512), *(nn.Tanh() for _ in range(8)), nn.Linear(512, 3))
    batch = torch.randn(64, 32), torch.randint(0, 3, (64,))
    options: dict[str, Any] = {"timed": False, "offload": "file", "memory": "1200KiB"}
    plan = anybatch.plan(model.float(), nn.CrossEntropyLoss(), batch, **options)
    assert plan.offload is not None
    assert "are offloaded in a step and return" in shown(plan).text


def test_what_prints_is_shown_as_it_prints_in_a_shell_and_a_notebook() -> None:
    model, loss = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), nn.CrossEntropyLoss()
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, loss, optimizer=optimizer, memory="1MiB")
    assert repr(engine) == "<Engine of Sequential: the first step makes its plan>"
    engine.backward(x, y)
    assert repr(engine) == "<Engine of Sequential: undivided, micro-batches of 12>"
    report = anybatch.check(model, loss, (x, y))
    profile = anybatch.profile([(x, y)] * 3, engine, optimizer, steps=2)
    shown = [report, profile, engine.timeline()]
    assert repr(engine.plan) == str(engine.plan)
    for one in shown:
        assert repr(one) == str(one)
        assert "".join(Page(one._repr_html_()).words).endswith(str(one))
