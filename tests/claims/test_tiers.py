"""Who may import whom: every module is in one tier, and imports go down.

The table is the architecture (design, section 3). A new file fails this test until it has a tier;
an import that goes up, sideways, in a circle, or hides in a function fails it too.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FRONT = "anybatch"

# Lowest first; a name stands for the module and, if it is a package, for all that is in it.
TIERS = {
    "base": "errors units links",
    "parts of plans": "_absent _divisions _memory _pace _scale proof.evidence",
    "cards": "cards",
    "pure": "_plan timeline choice",
    "room": "room filling",
    "sharing": "sharing",
    "profiling": "profiling",
    "above": "above duel",
    "outofcore": "outofcore step_timeline conv",  # but for those named below
    "scale": "scale",
    "scaled": "scaled",
    "generators": "generators",
    "ground": "accelerator accelerators "
    "functions tree modules rng exactness batch device undo gradients buffers batchnorm "
    "joint loss graph step taken _coupled beside collated hanging outside alike encoders parts "
    "rounding guard look records refusals memory_errors "
    "first_pass second_pass retry hidden meter fakes case given discover memory kinds kept "
    "reach updates measure repeatable stage full_size "
    "meeting norm unseen checksums nameless stores threads copier book hold pager paged paging "
    "slots turns workers lanes notes surroundings ranks dice gathered segments states.optimizers "
    "states.parts prepared proof execution",
    "mechanisms": "undivided stream gather",
    "offload": "outofcore.saved outofcore.rules outofcore.recipes outofcore.weights "
    "outofcore.watch outofcore.mover outofcore.execute outofcore.keeping outofcore.known "
    "outofcore.hooked spill states _states conv.plans conv.spectra conv.staged conv.fourier "
    "conv.algorithms conv.execute conv.measuring conv.search conv.costs conv.calls conv.heard "
    "conv.intercept conv.chooser conv.engaged conv.telling conv.warm _convolutions engaged",
    "lockstep": "lockstep",
    "rehearsal": "rehearse",
    "probe": "diagnose forecast probe",
    "ladder": "ladder lean widths touching",
    "budget": "budget",
    "foreseen": "foreseen describe depict leaving narrow",
    "staying": "staying",
    "contest": "contest",
    "asked": "asked workspaces precedent",
    "decision": "decision",
    "planner": "planner",
    "runner": "runner facts",
    "trial": "trial",
    "arranged": "as_it_was arranged",
    "engine": "engine",
    "loaders": "profiling.loaders",
    "watched": "profiling.watched",
    "profile": "_profile goals",
    "question": "question",
    "public": "_check planning _offload",
    "integrations": "integrations",
    "front": "",
    "apps": "apps __main__",
}
LAYERED_INSIDE = {"outofcore", "profiling", "scale", "ground", "offload", "integrations", "apps"}
"""Tiers whose modules may import each other, without a circle; elsewhere that is sideways."""
WITHOUT_TORCH = {
    *("base", "parts of plans", "cards", "pure", "room", "profiling", "sharing", "above"),
    *("outofcore", "scale", "scaled"),
}
OF_INTEGRATIONS = ("transformers", "accelerate", "lightning")
"""Libraries that an integration is made for: it imports them, and nothing else does."""
OPTIONAL = ("matplotlib", "sklearn", "tensorboard", "torch.utils.tensorboard")


class Import(NamedTuple):
    """One imported module, and whether it is inside a function."""

    name: str
    line: int
    inside: bool


def module_name(path: Path, source: Path) -> str:
    """`anybatch.loss.rows` of `anybatch/loss/rows.py`; a package is named by its folder."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tiers_of(module: str) -> list[str]:
    """The tiers that claim a module by the longest name; it must be one."""
    inner = module.removeprefix(FRONT).removeprefix(".")
    claims = [
        (len(name), tier)
        for tier, names in TIERS.items()
        for name in names.split()
        if inner == name or inner.startswith(f"{name}.")
    ]
    most = max(claims, default=(0, ""))[0]
    front = ["front"] if module == FRONT else []
    return front + [tier for length, tier in claims if length == most]


def within(name: str, packages: tuple[str, ...]) -> bool:
    """Say whether `name` is one of `packages` or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imports(text: str, modules: set[str]) -> Iterator[Import]:
    """Every import of a file; `from package import x` is of `package.x` where that is a module."""
    for node, inside in read(text).imports:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            package = "." * node.level + (node.module or "")
            joined = [f"{package}.{alias.name}" for alias in node.names]
            names = [name if name in modules else package for name in joined]
        for name in dict.fromkeys(names):
            yield Import(name, node.lineno, inside)


class Read(NamedTuple):
    """What a file says: its import statements, each with whether it is inside a function."""

    imports: list[tuple[ast.Import | ast.ImportFrom, bool]]
    only_docstring: bool


@cache
def read(text: str) -> Read:
    """What a file says. Of a copy of all files with one changed, only that one is new."""
    tree = ast.parse(text)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = {
        id(sub) for node in ast.walk(tree) if isinstance(node, functions) for sub in walk(node)
    }
    found = [
        (node, id(node) in inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    return Read(found, len(tree.body) == 1 and ast.get_docstring(tree) is not None)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, itself left out."""
    for child in ast.iter_child_nodes(node):
        yield child
        yield from walk(child)


def edge_fault(module: str, found: Import) -> str | None:
    """What is wrong with one import, or None."""
    ours = found.name == FRONT or found.name.startswith(f"{FRONT}.")
    if found.name.startswith("."):
        return "is relative: write the whole name"
    if found.inside and not within(found.name, OPTIONAL):
        return "is inside a function: only optional extras may be"
    if not found.inside and within(found.name, OPTIONAL):
        return "is an optional extra at the top of a file"
    (tier,) = tiers_of(module)
    if tier != "integrations" and within(found.name, OF_INTEGRATIONS):
        return "is of a library that only an integration knows"
    if tier in WITHOUT_TORCH and within(found.name, ("torch",)):
        return f"brings torch into the {tier} tier"
    if not ours:
        return None
    order, target = list(TIERS), tiers_of(found.name)
    if len(target) != 1:
        return "is of no known module"
    if target[0] == tier and tier not in LAYERED_INSIDE:
        return f"goes sideways in the {tier} tier"
    if order.index(target[0]) > order.index(tier):
        return f"goes up from {tier} to {target[0]}"
    return None


def faults(source: Path) -> list[str]:
    """Everything that breaks the layers below `source`, one sentence each."""
    texts = {module_name(p, source): p.read_text() for p in source.rglob("*.py")}
    packages = {module_name(p, source) for p in source.rglob("__init__.py")} - {FRONT}
    found = [
        f"{module} is in {len(tiers_of(module))} tiers, not in one"
        for module in sorted(texts)
        if len(tiers_of(module)) != 1
    ]
    if found:
        return found
    for package in sorted(packages):
        if not read(texts[package]).only_docstring:
            found.append(f"{package}/__init__ must be a docstring and nothing else")
    graph: dict[str, set[str]] = {}
    for module, text in sorted(texts.items()):
        every = list(imports(text, set(texts)))
        graph[module] = {one.name for one in every if one.name in texts}
        for one in every:
            fault = edge_fault(module, one)
            if fault is not None:
                found.append(f"{module}, line {one.line}: the import of {one.name} {fault}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"a circle: {' <- '.join(error.args[1])}")
    return found


def test_imports_go_down() -> None:
    assert faults(SOURCE) == []


def test_no_tier_names_a_module_that_is_gone() -> None:
    there = {module_name(path, SOURCE) for path in SOURCE.rglob("*.py")}
    named = {f"{FRONT}.{name}" for names in TIERS.values() for name in names.split()}
    assert named <= there


PLANTED = [
    (
        "rng.py",
        "from anybatch.engine import Engine",
        "import of anybatch.engine goes up from ground",
    ),
    ("tree.py", "from anybatch import Plan", "import of anybatch goes up from ground to front"),
    ("engine.py", "import anybatch.apps.cli", "anybatch.apps.cli goes up from engine to apps"),
    ("gather.py", "from anybatch.stream import stream", "goes sideways in the mechanisms tier"),
    ("tree.py", "from anybatch import step", "a circle: "),
    ("apps/faults.py", "import anybatch.apps.train", "a circle: "),
    ("_plan.py", "from torch import Tensor", "import of torch brings torch into the pure tier"),
    ("step.py", "def f():\n    import math", "import of math is inside a function"),
    ("step.py", "def f():\n    from anybatch import tree", "anybatch.tree is inside a function"),
    ("apps/curves.py", "from matplotlib import pyplot", "is an optional extra at the top"),
    ("loss/rows.py", "from .known import TABLE", "is relative"),
    ("loss/__init__.py", "from torch import Tensor", "must be a docstring and nothing else"),
    ("step.py", "import transformers", "is of a library that only an integration knows"),
    ("engine.py", "import anybatch.integrations.install", "goes up from engine to integrations"),
    ("spare.py", "'''New.'''", "anybatch.spare is in 0 tiers, not in one"),
    ("engine.py", "import anybatch.spare", "import of anybatch.spare is of no known module"),
]


@pytest.mark.parametrize(("name", "line", "fault"), PLANTED, ids=[p[2][-40:] for p in PLANTED])
def test_a_planted_import_is_found(tmp_path: Path, name: str, line: str, fault: str) -> None:
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE / FRONT, tmp_path / FRONT, ignore=skip)
    path = tmp_path / FRONT / name
    before = path.read_text() if path.exists() else ""
    path.write_text(f"{before}\n{line}\n")
    found = faults(tmp_path)
    assert any(fault in one for one in found), found


def test_an_optional_extra_may_be_imported_where_it_is_used(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / FRONT, tmp_path / FRONT)
    path = tmp_path / FRONT / "apps" / "curves.py"
    path.write_text(f"{path.read_text()}\ndef f():\n    import torch.utils.tensorboard\n")
    assert faults(tmp_path) == []
