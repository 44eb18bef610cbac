"""A folder is a tier: every module is in one, and imports go down.

An import that goes up, in a circle, or hides in a function fails this test. So does an import by
which the command reaches what is not public.
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
from scripts import house

SOURCE = Path(__file__).parents[2] / "src"
FRONT = "anybatch"

# Lowest first: what lies in a folder may import its own folder and those before it.
FOLDERS = house.FOLDERS
BELOW_FRONT = FOLDERS.index("integrations") - 0.5
PUBLIC = ("devices", "errors", "kernels", "planning", "reports", "units")
"""Modules beside the folders that people import from, as they do from the package itself."""
AT_ROOT = dict.fromkeys((*PUBLIC, ""), BELOW_FRONT) | {"errors": -1, "__main__": len(FOLDERS)}
"""Files beside the folders, and the package itself with the public names."""
COMMAND = (f"{FRONT}.cli", f"{FRONT}.__main__")
LATE = f"{FRONT}.cli.cli"
"""The commands' options: the code of a command is imported when it runs."""
WITHOUT_TORCH = set(
    (
        "cli.allocator cli.cli cli.faults cli.options cli.process cli.settings "
        "conv.circles conv.divide conv.problem core.absent core.lazy core.plan "
        "core.plan_sections core.units memory.ledger memory.lockstep_budget offloading.course "
        "offloading.policy offloading.schedule "
        "offloading.unroll planner.search tools.gpus tools.profiled"
    ).split()
)
OF_INTEGRATIONS = ("transformers", "accelerate", "lightning", "trl", "nnunetv2")
"""Libraries that an integration is made for: it imports them, and nothing else does."""
OPTIONAL = ("matplotlib", "sklearn", "tensorboard", "torch.utils.tensorboard", "ultralytics")


class Import(NamedTuple):
    """One imported module, and whether it is inside a function."""

    name: str
    line: int
    inside: bool


def module_name(path: Path, source: Path) -> str:
    """`anybatch.loss.base` of `anybatch/loss/base.py`; a package is named by its folder."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place(module: str) -> float | None:
    """Return where a module stands among the folders; None for one outside them."""
    inner = module.removeprefix(FRONT).removeprefix(".").partition(".")[0]
    if inner in AT_ROOT:
        return AT_ROOT[inner]
    return FOLDERS.index(inner) if inner in FOLDERS else None


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
    late = module == LATE and within(found.name, COMMAND)
    if found.inside and not late and not within(found.name, OPTIONAL):
        return "is inside a function: only optional extras may be"
    if not found.inside and within(found.name, OPTIONAL):
        return "is an optional extra at the top of a file"
    here, there = place(module), place(found.name)
    if not within(module, (f"{FRONT}.integrations",)) and within(found.name, OF_INTEGRATIONS):
        return "is of a library that only an integration knows"
    if module.removeprefix(f"{FRONT}.") in WITHOUT_TORCH and within(found.name, ("torch",)):
        return "brings torch into a module without it"
    if not ours:
        return None
    if there is None or here is None:
        return "is of no known module"
    public = found.name in (FRONT, *(f"{FRONT}.{name}" for name in PUBLIC))
    if within(module, COMMAND) and not public and not within(found.name, COMMAND):
        return "is no public name: the command uses nothing else"
    return "goes up" if there > here else None


def faults(source: Path) -> list[str]:
    """Everything that breaks the layers below `source`, one sentence each."""
    texts = {module_name(p, source): p.read_text() for p in source.rglob("*.py")}
    packages = {module_name(p, source) for p in source.rglob("__init__.py")} - {FRONT}
    found = [f"{module} is in no folder" for module in sorted(texts) if place(module) is None]
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


def test_every_module_without_torch_is_there() -> None:
    there = {module_name(path, SOURCE).removeprefix(f"{FRONT}.") for path in SOURCE.rglob("*.py")}
    assert there >= WITHOUT_TORCH


def test_names_that_are_read_late_are_those_that_type_checkers_read() -> None:
    """Every public module that uses `lazy`: its table beside its imports under TYPE_CHECKING."""
    found = [path for path in (SOURCE / FRONT).glob("*.py") if " = lazy(" in path.read_text()]
    assert [path.name for path in sorted(found)] == ["__init__.py", "planning.py"]
    for path in found:
        tree = ast.parse(path.read_text())
        checked = next(node for node in tree.body if isinstance(node, ast.If))
        read = {
            (node.module, alias.name)
            for node in ast.walk(checked)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        table = next(ast.literal_eval(n) for n in ast.walk(tree) if isinstance(n, ast.Dict))
        late = {(home or FRONT, name) for home, names in table.items() for name in names.split()}
        assert late == read, path.name


def test_the_folders_are_those_of_the_package() -> None:
    there = {path.parent.name for path in (SOURCE / FRONT).glob("*/__init__.py")}
    assert there == set(FOLDERS)


PLANTED = [
    (
        "core/rng.py",
        "from anybatch.engine.engine import Engine",
        "of anybatch.engine.engine goes up",
    ),
    ("core/pytree.py", "from anybatch import Plan", "the import of anybatch goes up"),
    ("engine/engine.py", "import anybatch.cli.cli", "the import of anybatch.cli.cli goes up"),
    ("core/pytree.py", "from anybatch.core import batch", "a circle: "),
    ("cli/faults.py", "import anybatch.cli.train", "a circle: "),
    ("cli/faults.py", "from anybatch.core import units", "anybatch.core.units is no public name"),
    ("cli/faults.py", "from anybatch import core", "anybatch.core is no public name"),
    ("__main__.py", "import anybatch.engine.engine", "engine.engine is no public name"),
    ("core/rng.py", "from anybatch.units import show_bytes", "import of anybatch.units goes up"),
    ("core/plan.py", "from torch import Tensor", "import of torch brings torch into a module"),
    ("execution/step.py", "def f():\n    import math", "import of math is inside a function"),
    ("core/rng.py", "def f():\n    from anybatch.core import units", "units is inside a function"),
    ("cli/report/drawing.py", "from matplotlib import pyplot", "is an optional extra at the top"),
    ("loss/functionals.py", "from .known import TABLE", "is relative"),
    ("loss/__init__.py", "from torch import Tensor", "must be a docstring and nothing else"),
    ("core/rng.py", "import transformers", "is of a library that only an integration knows"),
    ("engine/engine.py", "import anybatch.integrations.install", "install goes up"),
    ("spare.py", "'''New.'''", "anybatch.spare is in no folder"),
    ("engine/engine.py", "import anybatch.spare", "import of anybatch.spare is of no known module"),
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
    path = tmp_path / FRONT / "cli" / "timeline.py"
    path.write_text(f"{path.read_text()}\ndef f():\n    import torch.utils.tensorboard\n")
    assert faults(tmp_path) == []


TESTS = Path(__file__).parents[1]
HOSTS = ("lightning", "nnunet", "transformers", "trl", "ultralytics")
OPEN = {FRONT, *(f"{FRONT}.{name}" for name in PUBLIC)} | {
    f"{FRONT}.integrations.{h}" for h in HOSTS
}
"""What people import, and all but tests of one module with them."""
KNOWN: dict[str, dict[str, str]] = {
    "it puts a fault, a watch or another size into the module": {
        "cli/test_auto.py": ("core.plan execution.signature offloading.parameters planner.planner"),
        "cli/test_budget.py": "engine.measurement",
        "devices/test_races.py": "offloading.saved_tensors planner.offload_memory",
        "exactness/test_collated.py": "execution.collated execution.proof.inspected",
        "exactness/test_contrastive.py": "core.batch loss.contrastive",
        "exactness/test_encoders.py": "loss.contrastive",
        "exactness/test_parameter_hooks.py": "execution.gradients",
        "exactness/test_ranks_away.py": "memory.spill",
        "exactness/test_ranks_early.py": (
            "distributed.buckets distributed.gradients planner.full_batch"
        ),
        "exactness/test_ranks_gradients.py": "distributed.buckets",
        "exactness/test_ranks_sharded.py": "distributed.fsdp execution.gradients",
        "exactness/test_tiles.py": "execution.tiles",
        "gpu/test_chunked.py": "planner.memory_model",
        "limits/test_chunked_budget.py": "loss.chunked_rows planner.memory_model",
        "limits/test_chunked_competing.py": (
            "loss.chunked_rows planner.decision planner.memory_model"
        ),
        "limits/test_no_trace.py": "core.transaction execution.proof.rows",
        "limits/test_plan_obeyed.py": "execution.streaming",
        "limits/test_ranks_fail.py": "distributed.buckets execution.gradients",
        "limits/test_ranks_memory.py": "distributed.coordinator",
        "limits/test_tiled_budget.py": "execution.tiles",
    },
    "the module does what it does on a device, or beside a host, alone": {
        "devices/test_absent.py": "tools.autocast",
        "devices/test_link.py": "core.accelerator core.batch execution.prefetch",
        "gpu/test_cuda.py": "core.accelerator core.batch execution.prefetch",
        "hosts/test_trl.py": "integrations.trl_documents",
        "integrations/test_accelerate_optimizer.py": "core.optimizers",
        "integrations/test_finders_out_of_memory.py": "core.oom",
        "integrations/test_transformers_overrides.py": "integrations.transformers_refused",
    },
    "it walks over trees, or names bytes and stages, as the library does": {
        "cli/report/test_page.py": "core.plan_sections",
        "cli/test_cli.py": "conv.convolutions",
        "cli/test_profiled.py": "tools.profiled",
        "cli/test_timeline.py": (
            "core.plan_sections memory.ledger memory.lockstep_budget offloading.course "
            "offloading.unroll"
        ),
        "exactness/test_by_sample.py": "core.pytree",
        "exactness/test_kept_outputs.py": "core.pytree",
        "integrations/test_transformers_evaluation.py": "core.pytree",
        "limits/test_budget.py": "core.optimizers",
        "limits/test_budget_limits.py": "core.pytree",
    },
    "the module is reached through the other one, or computes with what that one makes": {
        "unit/execution/full_batch_rng/test_kernels.py": (
            "execution.full_batch_rng.kernels execution.full_batch_rng.law"
        ),
        "unit/lockstep/test_scheduler_lanes.py": "core.barrier lockstep.scheduler",
        "unit/lockstep/test_sync_batchnorm_ranks.py": "core.moments lockstep.sync_batchnorm",
    },
}
"""Tests that import more, by the reason why they must, and what. This may only become shorter."""


def internals(test: Path, tests: Path, modules: set[str]) -> list[str]:
    """The modules that a test imports and should not: one is for a unit test, the command's own
    for a test of the command, and none for others."""
    folder = test.relative_to(tests).parts[0]
    every = {one.name for one in imports(test.read_text(), modules)} - OPEN
    found = sorted(name.removeprefix(f"{FRONT}.") for name in every if within(name, (FRONT,)))
    if folder == "cli":
        found = [name for name in found if not within(name, ("cli", "__main__"))]
    return found if len(found) > (folder == "unit") else []


def test_a_unit_test_imports_one_module_and_the_others_public_names() -> None:
    modules = {module_name(path, SOURCE) for path in SOURCE.rglob("*.py")}
    every = sorted(set(TESTS.rglob("test_*.py")) - set((TESTS / "repository").glob("*.py")))
    found = {str(path.relative_to(TESTS)): internals(path, TESTS, modules) for path in every}
    known = {name: names.split() for tests in KNOWN.values() for name, names in tests.items()}
    assert {name: names for name, names in found.items() if names} == known


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("unit", "from anybatch.core import rng\nfrom anybatch.core.units import show_bytes", 2),
        ("unit", "from anybatch.core import rng\nfrom anybatch.units import show_bytes", 0),
        ("cli", "import anybatch.cli.train\nfrom anybatch.core import rng", 1),
        ("cli", "import anybatch.cli.train\nimport anybatch.cli.build", 0),
        ("limits", "from anybatch.memory.meter import Meter", 1),
        ("limits", "from anybatch.integrations.transformers import Trainer", 0),
    ],
)
def test_a_test_that_imports_too_much_is_found(
    tmp_path: Path, name: str, text: str, found: int
) -> None:
    (tmp_path / name).mkdir()
    path = tmp_path / name / "test_a.py"
    path.write_text(text)
    modules = {module_name(path, SOURCE) for path in SOURCE.rglob("*.py")}
    assert len(internals(path, tmp_path, modules)) == found
