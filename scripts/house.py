"""The figures of the house: how the code is arranged, counted from the source, beside their goals.

A figure that has a goal is a ratchet, too: a test compares it with the last one that was written to
docs/house.json, and it may only become better. A process of its own traces what a step enters.

    python -m scripts.house            print the table
    python -m scripts.house --write    write docs/house.json
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "anybatch"
WRITTEN = ROOT / "docs" / "house.json"
COMMAND = ("cli", "__main__.py")
FOLDERS = (
    "core memory loss distributed conv offloading execution lockstep planner engine tools "
    "integrations cli".split()
)
"""The folders of the package, the lowest tier first."""
LONG_FILE, LONG_FUNCTION = 600, 60
HEADLESS = re.compile(r"\b(what|who|whom|whose|whatever|whoever|somebody|nobody)\b", re.IGNORECASE)
BANNED = frozenset(
    "away leave come stay told heard hearing seen met known given taken kept apart beside room "
    "turn dice everyone alone unison crew kind allowed asked lean narrow look whole somebody "
    "nobody whatever".split()
)
"""Words of this project's own; house style has one term of the field for each."""
DICE_LOSS = re.compile(r"\bDice (loss|coefficient)\b|^(bce_dice(_per_image)?|dice_coefficient)$")
"""The field's name of a loss, in words and in names, beside dice that are no RNG state any more."""


class Figure(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the row, in words.
        goal: the most that is to be reached; None where there is none.
    """

    name: str
    goal: int | None


FIGURES = {
    "files": Figure("files of the library, without the command", 90),
    "lines": Figure("lines of the library, without the command", 36_000),
    "command_lines": Figure("lines of the command", 8_500),
    "root_items": Figure("items in the package's root folder", 14),
    "upward_imports": Figure("imports between folders that go up", 0),
    "long_files": Figure(f"files above {LONG_FILE} lines", 0),
    "long_functions": Figure(f"functions above {LONG_FUNCTION} lines", 0),
    "second_step_files": Figure("files entered by a second plain streaming step", 20),
    "second_step_functions": Figure("functions entered by it", 120),
    "first_step_files": Figure("files entered by the first step of BatchNorm with a budget", 50),
    "first_step_functions": Figure("functions entered by it", 500),
    "again_exceptions": Figure("internal exceptions", 1),
    "again_handlers": Figure("handlers of these", 1),
    "headless": Figure("first lines of docstrings with a headless what, who or whatever", 0),
    "banned_lines": Figure("first lines of docstrings with a banned word", 0),
    "banned_names": Figure("definitions named with a banned word", 0),
    "repeated_classes": Figure("class names that are defined more than once", 0),
    "comment_lines": Figure("lines that are a comment", None),
    "imported": Figure("modules of ours that `anybatch.Engine` loads", 90),
    "imported_command": Figure("libraries of the command that `import anybatch` loads", 0),
    "public_names": Figure("public names of the package", 17),
    "readme_lines": Figure("lines of the README", 150),
}

# What an import loads, and what steps enter. Which functions are entered must not follow how busy
# the machine is: the clock counts readings.
TRACE = """
import itertools
import sys
import time
import torch
from torch import nn
from torch.nn import functional as F

time.perf_counter = time.monotonic = itertools.count(0.0, 0.001).__next__
import anybatch

anybatch.Engine
print(sum(name.partition(".")[0] == "anybatch" for name in sys.modules))
print(sum(name in sys.modules for name in ("rich", "typer", "PIL", "jinja2", "platformdirs")))
print(len(anybatch.__all__))

entered, ours = set(), anybatch.__file__.removesuffix("__init__.py")

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(ours):
        entered.add((frame.f_code.co_filename, frame.f_code.co_qualname))

def trace(engine, batch):
    entered.clear()
    sys.setprofile(note)
    engine.backward(*batch)
    sys.setprofile(None)
    print(len({file for file, _ in entered}), len(entered))

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
batch = torch.randn(16, 8), torch.randint(3, (16,))
engine = anybatch.Engine(plain, F.cross_entropy, micro_batch=4)
engine.backward(*batch)
trace(engine, batch)
images = torch.randn(16, 3, 8, 8), torch.randint(3, (16,))
norm = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
model = nn.Sequential(norm, nn.Linear(8 * 36, 3))
trace(anybatch.Engine(model, F.cross_entropy, memory="80KiB", micro_batch=4, cache=None), images)
"""


class House:
    """The source below a folder, parsed.

    Args:
        source: of the package.
    """

    def __init__(self, source: Path = SOURCE) -> None:
        self.source = source
        self.texts = {path: path.read_text() for path in sorted(source.rglob("*.py"))}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self.nodes = {path: list(ast.walk(tree)) for path, tree in self.trees.items()}

    def command(self, path: Path) -> bool:
        """Say whether a file is of the command."""
        within = path.relative_to(self.source).parts
        return within[0] in COMMAND

    @cached_property
    def definitions(self) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
        """All classes and functions."""
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for nodes in self.nodes.values() for node in nodes if isinstance(node, kinds)]

    def summaries(self) -> Iterator[str]:
        """Yield the first line of each docstring."""
        for node in [*self.trees.values(), *self.definitions]:
            text = ast.get_docstring(node)
            if text:
                yield text.splitlines()[0]

    def names(self) -> Iterator[str]:
        """Yield the name of each module, class, function, argument, variable and attribute."""
        for path, nodes in self.nodes.items():
            yield path.stem
            for node in nodes:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield node.name
                elif isinstance(node, ast.arg):
                    yield node.arg
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    yield node.attr

    def internal(self) -> set[str]:
        """Return the names of exceptions that only code of the package is to catch."""
        bases = {node.name: {ast.unparse(base) for base in node.bases} for node in self.classes}
        found = {"Exception", "BaseException", "RuntimeError", "ValueError"}
        while more := {name for name, of in bases.items() if of & found} - found:
            found |= more
        errors = self.trees.get(self.source / "errors.py", ast.Module([], []))
        public = {node.name for node in errors.body if isinstance(node, ast.ClassDef)}
        commands = {
            node.name
            for path, nodes in self.nodes.items()
            if self.command(path)
            for node in nodes
            if isinstance(node, ast.ClassDef)
        }
        return (found & set(bases)) - public - commands

    @property
    def classes(self) -> list[ast.ClassDef]:
        """All classes."""
        return [node for node in self.definitions if isinstance(node, ast.ClassDef)]

    def handlers(self) -> int:
        """Return how many handlers there are of internal exceptions."""
        internal = self.internal()
        return sum(
            bool(internal & set(re.findall(r"\w+", ast.unparse(node.type))))
            for nodes in self.nodes.values()
            for node in nodes
            if isinstance(node, ast.ExceptHandler) and node.type is not None
        )

    def upward(self) -> int:
        """Return how many imports go from a folder to one that comes later in `FOLDERS`."""
        found, order = 0, FOLDERS
        for path, nodes in self.nodes.items():
            here = path.relative_to(self.source).parts
            if len(here) < 2 or here[0] not in order:
                continue
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and node.module:
                    parts = node.module.split(".")
                    if parts[0] == "anybatch" and len(parts) > 1 and parts[1] in order:
                        found += order.index(parts[1]) > order.index(here[0])
        return found


def words(name: str) -> set[str]:
    """Return the words of an identifier in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def printed(code: str) -> list[int]:
    """Return the numbers that a fresh process prints."""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(word) for word in made.stdout.split()]


def figures(house: House) -> dict[str, int]:
    """Return every figure by its name."""
    command = {path for path in house.texts if house.command(path)}
    lengths = {path: text.count("\n") for path, text in house.texts.items()}
    functions = [node for node in house.definitions if not isinstance(node, ast.ClassDef)]
    named = Counter(node.name for node in house.classes)
    imported, libraries, public, second_files, second, first_files, first = printed(TRACE)
    return {
        "files": len(lengths) - len(command),
        "lines": sum(lines for path, lines in lengths.items() if path not in command),
        "command_lines": sum(lengths[path] for path in command),
        "root_items": sum(
            item.name not in ("__pycache__", "py.typed") for item in house.source.iterdir()
        ),
        "upward_imports": house.upward(),
        "long_files": sum(lines > LONG_FILE for lines in lengths.values()),
        "long_functions": sum(
            (node.end_lineno or 0) - node.lineno >= LONG_FUNCTION for node in functions
        ),
        "second_step_files": second_files,
        "second_step_functions": second,
        "first_step_files": first_files,
        "first_step_functions": first,
        "again_exceptions": len(house.internal()),
        "again_handlers": house.handlers(),
        "headless": sum(bool(HEADLESS.search(line)) for line in house.summaries()),
        "banned_lines": sum(
            bool(words(DICE_LOSS.sub("", line)) & BANNED) for line in house.summaries()
        ),
        "banned_names": sum(
            bool(words(DICE_LOSS.sub("", name)) & BANNED) for name in house.names()
        ),
        "repeated_classes": sum(count > 1 for count in named.values()),
        "comment_lines": sum(
            line.lstrip().startswith("#")
            for text in house.texts.values()
            for line in text.splitlines()
        ),
        "imported": imported,
        "imported_command": libraries,
        "public_names": public,
        "readme_lines": (ROOT / "README.md").read_text().count("\n"),
    }


def table(found: dict[str, int]) -> str:
    """Return the figures as a table in markdown."""
    rows = ["| | today | goal |", "|---|---:|---:|"]
    for key, (name, goal) in FIGURES.items():
        rows.append(f"| {name} | {found[key]:,} | {'' if goal is None else f'{goal:,}'} |")
    return "\n".join(rows)


def folders(house: House) -> str:
    """Return the lines of each folder as a table: code, docstrings and comments, empty ones."""
    counts = {folder: Counter[str]() for folder in FOLDERS}
    for path, tree in house.trees.items():
        folder, lines = path.relative_to(house.source).parts[0], house.texts[path].splitlines()
        texts = [
            node.body[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node)
        ]
        inside = {n for text in texts for n in range(text.lineno - 1, text.end_lineno or 0)}
        for number, line in enumerate(lines if folder in counts else []):
            word = number in inside or line.lstrip().startswith("#")
            counts[folder]["words" if word else "code" if line.strip() else "empty"] += 1
    rows = ["| folder | code | docstrings, comments | empty |", "|---|---:|---:|---:|"]
    for folder, found in {**counts, "all": sum(counts.values(), Counter[str]())}.items():
        rows.append(f"| {folder} | {found['code']:,} | {found['words']:,} | {found['empty']:,} |")
    return "\n".join(rows)


def worse(found: dict[str, int], before: dict[str, int]) -> list[str]:
    """Return a sentence for each figure that has a goal and is further from it than before."""
    return [
        f"{name}: {before[key]:,} before, and {found[key]:,} now"
        for key, (name, goal) in FIGURES.items()
        if goal is not None and found[key] > max(before[key], goal)
    ]


def main(*, write: Annotated[bool, typer.Option(help=f"write {WRITTEN.name}")] = False) -> None:
    """Print the table, and say what has become worse."""
    source = House()
    found = figures(source)
    print(table(found), folders(source), sep="\n\n")
    if write:
        WRITTEN.write_text(json.dumps(found, indent=1) + "\n")
    else:
        print(*worse(found, json.loads(WRITTEN.read_text())), sep="\n")


if __name__ == "__main__":
    typer.run(main)
