"""Every refusal of the library is on the pages "why it refused", by the words it begins with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from anybatch import errors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "anybatch"
PAGES = ROOT / "docs" / "refused"
WORDS = 12
"""Words of a message that must be on a page at most: up to a value, or to what came instead."""
VALUE = "\0"
"""Stands for a value in a message."""
INTERNAL = {
    "integrations/lightning_step.py: something is computed": "caught where the step is skipped",
    "planner/offload_memory.py: below the floor": "caught by the search for a smaller plan",
}
"""Messages that no person gets, with the reason."""
PASSED_ON = {
    "execution/proof/verdict.py: self.meets": "a sentence of the proof: those are read one by one",
    "execution/step.py: str(error)": "the sentence of another error",
    "lockstep/gathered.py: what": "the class makes the sentence, which is that of core/norm.py",
}
"""Messages that are made somewhere else, which is read too."""


class Site(NamedTuple):
    """A place that makes an error: its module, and its message with holes for values."""

    module: str
    text: str


@cache
def trees() -> dict[str, ast.Module]:
    """Return every module of the library but the command's, parsed."""
    paths = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for name, path in paths.items() if "cli/" not in name}


def family() -> set[str]:
    """Return the names of the public errors, and of every class that is one of them."""
    found = {name for name, value in vars(errors).items() if isinstance(value, type)}
    for _ in range(3):
        for tree in trees().values():
            classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
            found |= {one.name for one in classes if found & set(map(ast.unparse, one.bases))}
    return {name for name in found if name.endswith("Error")}


@cache
def constants() -> dict[str, ast.expr | None]:
    """Return the expressions that names stand for: constants, and what functions return.

    A name of two modules stands for nothing by itself, and is looked up as ``module:name``.
    """
    found: dict[str, ast.expr | None] = {}
    for module, tree in trees().items():
        for node in ast.walk(tree):
            name, value = "", None
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, node.value
            elif isinstance(node, ast.FunctionDef):
                returns = [one for one in ast.walk(node) if isinstance(one, ast.Return)]
                name, value = node.name, returns[-1].value if returns else None
            if name and value is not None:
                found[name] = None if name in found else value
                found.setdefault(f"{module}:{name}", value)
    return found


def text_of(module: str, node: ast.expr, depth: int = 2) -> str:
    """Return the text of an expression, with a hole for each value that is not known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{[^}]*\}", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        known = (part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
        return "".join(map(str, known))
    if isinstance(node, ast.BinOp):
        return text_of(module, node.left) + text_of(module, node.right)
    called = node.func if isinstance(node, ast.Call) else node
    if isinstance(called, ast.Attribute) and called.attr == "format":
        called = called.value
    if isinstance(called, ast.Name) and depth:
        known = constants()
        value = known.get(f"{module}:{called.id}") or known.get(called.id)
        if value is not None:
            return text_of(module, value, depth - 1)
    return VALUE


def errors_made() -> Iterator[tuple[str, ast.expr]]:
    """Yield the module of every call of a public error, and its first argument."""
    names = family()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                made = node.func
                name = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
                if name in names:
                    yield module, node.args[0]


def sites() -> Iterator[Site]:
    """Yield every place that makes a public error; the proof's sentences are among them."""
    for module, made in errors_made():
        text = text_of(module, made)
        reasoned = text.startswith(f"{VALUE}, and ")  # the reasons are below
        if not reasoned and f"{module}: {ast.unparse(made)}" not in PASSED_ON:
            yield Site(module, text)
    for module, tree in trees().items():
        if module.startswith("execution/proof/"):
            yield from (Site(module, text) for text in sentences(module, tree))
    skipped = constants()["integrations/transformers_refused.py:SKIPPED"]
    assert isinstance(skipped, ast.Dict)
    for value in skipped.values:
        assert isinstance(value, ast.Tuple)
        yield Site("integrations/transformers_refused.py", text_of("", value.elts[0]))


def sentences(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield the refusals that a module of the proof makes without raising them."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    inner = {id(part) for one in strings for part in one.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docs | inner:
            text = text_of(module, node, 0)
            if " must " in text:
                yield text


def beginning(text: str) -> str:
    """Return the first words of a message that no value interrupts: what it requires."""
    text = text.partition(", and ")[0]
    runs = [re.sub(r"\s+", " ", run).strip(" ,:;.()") for run in text.split(VALUE)]
    long = next((run for run in runs if len(run.split()) >= 3), max(runs, key=len))
    return " ".join(long.split()[:WORDS]).rstrip(",:")


@cache
def told() -> str:
    """Return all that the pages say, as one line."""
    return re.sub(r"\s+", " ", " ".join(page.read_text() for page in sorted(PAGES.glob("*.md"))))


def missing() -> list[str]:
    """Return the refusals that no page has."""
    found = {f"{site.module}: {beginning(site.text)}" for site in sites()}
    words = {one: one.partition(": ")[2] for one in found - set(INTERNAL)}
    return sorted(one for one, said in words.items() if not said or said not in told())


def test_every_refusal_is_on_a_page() -> None:
    assert missing() == []


def test_what_is_left_out_is_still_made() -> None:
    made = {f"{site.module}: {beginning(site.text)}" for site in sites()}
    assert set(INTERNAL) <= made
    assert set(PASSED_ON) <= {f"{module}: {ast.unparse(one)}" for module, one in errors_made()}


def test_a_refusal_without_an_entry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    new = ast.parse('raise NotExactError(f"a new limit must be told, and {x} is not: tell it")')
    monkeypatch.setitem(trees(), "core/new.py", new)
    assert missing() == ["core/new.py: a new limit must be told"]


def test_messages_are_found_through_constants_values_and_functions() -> None:
    found = {beginning(site.text) for site in sites()}
    assert "forward must make the graph that it differentiates, because it also runs" in found
    assert "a loss is called as loss_fn" in found  # a function makes it
    assert "must be computed like those of several" in found  # a value comes first
    assert len(found) > 200
