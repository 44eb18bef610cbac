"""docs/api/: the docstrings of the public names, as they are in the source.

A documentation builder would bring a theme, a server and a dozen packages for pages of plain
text. The docstrings already have fixed sections (Args, Returns, Raises ...), so it is a walk
over ``anybatch.__all__`` and the public modules that turns a section into a list.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from textwrap import dedent
from types import ModuleType
from typing import Any

import anybatch
from anybatch import devices, errors, kernels, planning, reports, units

HEAD = """# API

Every public name. Written from the docstrings by `make docs`: do not edit. The
[other pages](../README.md) show these names at work.

| page | names |
| --- | --- |"""
PAGES = {
    "engine": ("An engine", ("Engine",)),
    "plan": ("A plan", ("Plan",)),
    "batches": ("Batches and models", ("LazyBatch", "Encoders", "joint")),
    "losses": (
        "Losses",
        ("Loss", "contrastive", "coupled", "gather_batch", "chunked_losses"),
    ),
    "batchnorm": ("BatchNorm", ("Adaptive", "Plateau", "global_batchnorm")),
    "memory": ("Memory and kernels", ("convolutions", "offload", "offload_states")),
    "tools": ("Tools", ("check", "plan", "profile")),
    "state": ("Devices: groups, limits, states", ("Group", "MemoryLimit", "RNGState")),
    "steps": (
        "Reports: steps",
        (
            "OffloadReport",
            "OffloadedStates",
            "Report",
            "StatesReport",
            "StepReport",
            "StepTimeline",
        ),
    ),
    "trainings": ("Reports: whole trainings", ("Pace", "Profile", "Scale", "ScaleRow")),
}
"""Pages of names that are read together; every other name is on the page of its module."""
MODULES = (units, devices, planning, kernels, reports, errors)
"""Public modules, in the order of the page; what is in `anybatch` itself comes before them."""
SECTIONS = "Args|Attributes|Returns|Raises|Example|Source"
LISTS = {"Args", "Attributes", "Raises"}
WIDTH = 100


def sections(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield ``(section, text)`` in order; text outside of any section has the name ""."""
    name, lines = "", list[str]()
    for line in docstring.splitlines():
        start = re.match(rf"({SECTIONS}):\s*(.*)", line)
        after = name in LISTS or name == "Example" or not lines or not lines[-1].strip()
        if start or (name and line and not line.startswith(" ") and after):
            yield name, dedent("\n".join(lines)).strip()
            name, lines = (start[1], [start[2]]) if start else ("", [line])
        else:
            lines.append(line)
    yield name, dedent("\n".join(lines)).strip()


def entries(text: str) -> list[tuple[str, str]]:
    """Return ``(name, meaning)`` of each line ``name: meaning`` and of what is indented below."""
    found = list[tuple[str, str]]()
    for line in text.splitlines():
        if line.startswith(" "):
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
        else:
            name, _, meaning = line.partition(": ")
            found.append((name, meaning))
    return found


def prose(docstring: str) -> str:
    """Return a docstring as markdown."""
    parts = []
    for name, text in sections(docstring):
        if name in LISTS:
            rows = [f"- `{entry}`: {meaning}" for entry, meaning in entries(text)]
            parts.append(f"**{name}**\n\n" + "\n".join(rows))
        elif name == "Example":
            parts.append(f"**Example**\n\n```pycon\n{text}\n```")
        elif name:
            parts.append(f"**{name}**: {text}")
        elif text:
            parts.append(text)
    return "\n\n".join(parts)


def signature(name: str, function: Callable[..., Any]) -> str:
    """Return ``name(x: int, *, y=1) -> str`` as written, one argument a line where it is long."""
    found = inspect.signature(function)
    arguments, previous = list[str](), None
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        starred = parameter.VAR_POSITIONAL in (previous, parameter.kind)
        if parameter.kind is parameter.KEYWORD_ONLY and previous != parameter.kind and not starred:
            arguments.append("*")
        previous = parameter.kind
        arguments.append(_argument(parameter))
    returns = "" if found.return_annotation in ("None", found.empty) else _type(found)
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){returns}"
    return f"```text\n{line}\n```"


def own(cls: type) -> dict[str, Any]:
    """Return the attributes of a class and of its bases that are no public names."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("anybatch.")]
    hidden = [base for base in bases if base is cls or base.__name__ not in anybatch.__all__]
    return {name: value for base in hidden[::-1] for name, value in vars(base).items()}


def members(cls: type) -> dict[str, tuple[str, Any]]:
    """Return name -> (kind, function) of the public methods and properties of a class.

    An abstract class is used through its constructors, so only these are listed.
    """
    found = {}
    for name, value in own(cls).items():
        made_by = isinstance(value, staticmethod | classmethod)
        if name.startswith("_") or (inspect.isabstract(cls) and not made_by):
            continue
        if isinstance(value, property):
            found[name] = ("property", value.fget)
        elif made_by:
            found[name] = ("constructor", value.__func__)
        elif inspect.isfunction(value) and name != "forward":
            found[name] = ("method", value)
    return found


def is_error(value: Any) -> bool:
    """Say whether a public name is an exception."""
    return isinstance(value, type) and issubclass(value, Exception)


def public() -> dict[str, Any]:
    """Return the public names and what they stand for; those of other modules are last."""
    found = {name: getattr(anybatch, name) for name in anybatch.__all__}
    names = {name: value for name, value in found.items() if not inspect.ismodule(value)}
    return names | dict(sorted(one for module in MODULES for one in _names(module)))


def reference() -> dict[str, str]:
    """Return the pages of docs/api by their names."""
    names: dict[str, list[str]] = {page: [] for page in PAGES}
    parts: dict[str, list[str]] = {page: [f"# {title}"] for page, (title, _) in PAGES.items()}
    for name, value in public().items():
        module = _home(name, value)
        own = module.__name__.rpartition(".")[2]
        page = next((page for page, (_, some) in PAGES.items() if name in some), own)
        if page not in parts:
            names[page], parts[page] = [], [_title(module)]
        names[page].append(name)
        parts[page] += _entry(name, value)
    listed = [
        f"| [{parts[page][0].splitlines()[0][2:]}]({page}.md) | {_links(page, some)} |"
        for page, some in names.items()
    ]
    pages = {page: "\n\n".join(some) + "\n" for page, some in parts.items()}
    return {"README": "\n".join([HEAD, *listed]) + "\n"} | pages


def _links(page: str, names: list[str]) -> str:
    return ", ".join(f"[`{name}`]({page}.md#{name.lower()})" for name in names)


def _entry(name: str, value: Any) -> list[str]:
    """Return the parts of a page that are about a name."""
    if is_error(value):
        bases = " and ".join(f"`{base.__name__}`" for base in value.__bases__)
        return [f"## {name}", prose(_doc(value)), f"Caught as {bases} too."]
    members = _members(name, value) if isinstance(value, type) else ()
    return [f"## {name}", *_head(name, value), prose(_doc(value)), *members]


def _title(module: ModuleType) -> str:
    """Return the heading of a module's names."""
    name = module.__name__.rpartition(".")[2]
    return f"# {name.title()}\n\n{_doc(module)} `{module.__name__}` has them."


def _home(name: str, value: Any) -> ModuleType:
    """Return the module that a public name is imported from."""
    return next((one for one in MODULES if getattr(one, name, None) is value), anybatch)


def _names(module: ModuleType) -> list[tuple[str, Any]]:
    """Return the public names of a module and what they stand for."""
    own = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    return [(name, getattr(module, name)) for name in getattr(module, "__all__", own)]


def _head(name: str, value: Any) -> list[str]:
    made_by_us = dataclasses.is_dataclass(value) or inspect.isabstract(value)
    home = _home(name, value)
    return [] if made_by_us or home is reports else [signature(f"{home.__name__}.{name}", value)]


def _members(owner: str, cls: type) -> Iterator[str]:
    for name, (role, function) in members(cls).items():
        yield f"### {owner}.{name}"
        constructs = role == "constructor"
        before = f"{_home(owner, cls).__name__}.{owner}" if constructs else owner.lower()
        if role == "property":
            yield f"```text\n{before}.{name}{_type(inspect.signature(function))}\n```"
        else:
            yield signature(f"{before}.{name}", function)
        yield prose(_doc(function))


def _doc(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _type(found: inspect.Signature) -> str:
    return f" -> {_words(found.return_annotation)}"


def _argument(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.kind is parameter.VAR_POSITIONAL:
        text = f"*{text}"
    if parameter.annotation is not parameter.empty:
        text += f": {_words(parameter.annotation)}"
    default = re.sub(r"<built-in function (\w+)>", r"\1", repr(parameter.default))
    return text if parameter.default is parameter.empty else f"{text} = {default}"


def _words(annotation: Any) -> str:
    annotation = getattr(annotation, "__forward_arg__", annotation)  # that of a named tuple
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
