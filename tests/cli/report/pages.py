"""What is told to a page, and a page read back as a tree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

from tests.cli.test_timeline import ordered, timed

from anybatch import Plan
from anybatch.cli.report.history import Envelope, RunHistory
from anybatch.cli.report.record import RunRecord
from anybatch.core.plan import OffloadPlan
from anybatch.core.plan_sections import (
    Candidate,
    Division,
    Divisions,
    Evidence,
    Memory,
    Pace,
    Scale,
    ScaleRow,
)

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect", "line"}
MIB = 1 << 20


@dataclass
class Node:
    """An element: its children are elements and texts."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        """Yield this element and all below it, in order."""
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, *tags: str) -> list[Node]:
        """Return all elements below that have one of these tags, in order."""
        return [one for one in self.walk() if one.tag in tags]

    def by_id(self, name: str) -> Node:
        (found,) = [one for one in self.walk() if one.attributes.get("id") == name]
        return found

    @property
    def text(self) -> str:
        """All words below, one space between."""
        return " ".join(" ".join(self._texts()).split())

    def _texts(self) -> Iterator[str]:
        for child in self.children:
            if isinstance(child, str):
                yield child
            else:
                yield from child._texts()

    def cells(self) -> list[list[str]]:
        """Return the rows of a table's body."""
        (body,) = self.all("tbody")
        return [[cell.text for cell in row.all("th", "td")] for row in body.all("tr")]

    def has(self, word: str) -> bool:
        return word in self.attributes.get("class", "").split()


class _Reader(HTMLParser):
    """Reads a page, and refuses one in which an element is left open or closed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Node("")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open[-1].tag == tag, f"{tag} is closed, {self.open[-1].tag} is open"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.open[-1].children.append(data)


def read(html: str) -> Node:
    """Return a page as a tree."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == [reader.root]
    return reader.root


def log_of(
    epochs: int = 3,
    each: int = 4,
    metric: str = "accuracy",
    loss: Callable[[int], float] = float,
    *,
    separate: bool = False,
) -> bytes:
    """Return a metrics.jsonl of so many epochs, of `each` steps; `separate` splits their seconds.

    R_O is 1/4 but in the first step, whose memory is measured.
    """
    lines = list[dict[str, Any]]()
    for epoch in range(1, epochs + 1):
        for step in range((epoch - 1) * each + 1, epoch * each + 1):
            found = {"kind": "step", "epoch": epoch, "step": step, "loss": loss(step), "lr": 0.1}
            seconds = 0.01 + step / 1000
            found |= {"samples": 64, "micro_batches": 2, "seconds": seconds}
            found |= {"peak_bytes": MIB if step == 1 else None, "images_per_second": 64 / seconds}
            if separate:
                found |= {"computing_seconds": 8 * seconds / 9, "waiting_seconds": seconds / 9}
            if separate and step == 1:
                found |= {"computing_seconds": seconds, "waiting_seconds": 7 * seconds}
            lines.append(found)
        row = {"kind": "epoch", "epoch": epoch, "step": epoch * each, "metric": metric}
        row |= {"train_loss": 2.5 / epoch, "test_loss": 2.75 / epoch, "seconds": 1.0}
        row |= {f"train_{metric}": 1 - 0.5 / epoch, f"test_{metric}": 1 - 0.625 / epoch}
        lines.append(row | {"images_per_second": 1.0})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def plan_of(text: str = "cross-entropy", reasons: Sequence[str] = ("one pass",)) -> Plan:
    """Return a plan with candidates of every fate, and convolutions."""
    candidates = (
        Candidate(16, MIB, 2.0),
        Candidate(32, 2 * MIB, 1.5),
        Candidate(48, 3 * MIB),
        Candidate(64, 9 * MIB),
    )
    owners = (("activations", MIB), (text, MIB), ("buffers", 0))
    kernel = (("kernel", "forward"), ("channels", 3), ("filters", 8), ("window", (7, 5)))
    parts = ((24, "fft", 0.25, MIB, 0.125), (24, "fft", 0.25, MIB, 0.125), (16, text, 0.5, 5, 0.0))
    return Plan(
        micro_batch=32,
        mechanism="streaming",
        accumulate="in place",
        loss=text,
        exact=Evidence("shown", "each sample was followed to its own row alone", 1),
        reasons=tuple(reasons),
        memory=Memory(4 * MIB, "as given", 2 * MIB, owners, MIB // 2, 9 * MIB, text, candidates),
        convolutions=Divisions(2 * MIB, "all", MIB, (Division(kernel, 64, parts, 4.5),)),
    )


def scaled(plan: Plan, text: str = "") -> Plan:
    """Return the plan with seconds of whole steps, and what more GPUs would bring."""
    points = ((1, 1.0, 1.0), (2, 1.875, 1.75), (8, 4.0, 3.5))
    rows = tuple(ScaleRow(g, 2 / fast, fast, fast / g, lemma) for g, fast, lemma in points)
    found = Scale(rows, 2, f"twice as fast{text}", 3, 8, (f"nothing{text}",))
    return replace(plan, pace=Pace(2.0, (1.5, 2.5), 9, 0.25, epoch=90), scale=found)


def with_offload(plan: Plan) -> Plan:
    """Return the plan with a candidate whose saved tensors leave."""
    assert plan.memory is not None
    more = replace(plan.memory.candidates[0], offloaded=True)
    memory = replace(plan.memory, candidates=(*plan.memory.candidates, more))
    return replace(plan, memory=memory, offload=OffloadPlan("file", None, (1, 1), 1, 1, 1))


def record_of(text: str = "", **more: Any) -> RunRecord:
    """Return a run that has everything a page can show; `text` is in each word of a person's."""
    config = {
        "settings": {"data": f"digits{text}", "batch_size": 64, "memory": "4MiB", "seed": 3},
        "recipe": {"model": f"cnn{text}", "epochs": 3, "lr": 0.1, "optimizer": f"sgd{text}"},
        "data": {"task": "classification", "size": [8, 8], "notes": [f"a note{text}"]},
        "process": {"threads": 1, "device": "cpu", "malloc": "tight"},
        "versions": {"torch": f"2{text}"},
    }
    end = {"steps": 12, "epochs": 3, "seconds": 75.5, "parameters": 999, "resumed": 1}
    step = timed()
    made = RunRecord(
        "train",
        config,
        {**end, "interrupted": False, "stopped": None},
        RunHistory.of(log_of()),
        scaled(plan_of(f"cross-entropy{text}", (f"one pass{text}",)), text),
        Envelope.of(replace(step, title=f"{step.title}{text}")),
        (f"something is missing{text}",) if text else (),
    )
    return replace(made, **more)


def in_order() -> Envelope:
    """Return a step whose order is known and whose times are not."""
    return Envelope.of(ordered())
