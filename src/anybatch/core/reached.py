"""Values that a callable reaches, one step at a time: those it holds, and those its code names.

torch tracks tensors. All else that a forward or a loss computes with is in Python: a number in a
closure, a switch in a file, a list of an object. Every walk that lists, compares or restores such
state takes its steps from here, and decides itself what it records and where it ends:

    function   cells, attributes, defaults, the globals that its code names
    method     its function, its object        partial    its function, its arguments
    property   its getter and setter           cached     the function, and the results that it has
    object     its attributes and slots        view       the dict or the list behind it

A step follows references. It calls no function of the user's but attribute hooks of an object, so a
value that a property computes is not among them: its function is.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import weakref
from array import array
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from collections.abc import Set as AbstractSet
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum, auto
from functools import _lru_cache_wrapper, cached_property, lru_cache, partial, partialmethod
from itertools import chain, repeat
from threading import local
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

CONTAINERS = (dict, list, set, deque)
VIEWS = (MappingProxyType, KeysView, ValuesView, ItemsView, memoryview)
"""A test for a dict, or for bytes, that another name holds."""

ARRAYS = (array, bytearray, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
"""Values in C, which Python may write to."""

HOLDERS: tuple[type, ...] = (
    *(MethodType, BuiltinFunctionType, partial, partialmethod, staticmethod, classmethod),
    *(property, cached_property, _lru_cache_wrapper, ContextVar, weakref.ref, *VIEWS),
)
"""Objects around a function, or around other objects."""

SPECIAL = frozenset(
    "__call__ __getattr__ __setattr__ __getitem__ __setitem__ __iter__ __enter__ __exit__ __len__ "
    "__contains__ __float__ __int__ __bool__ __add__ __radd__ __mul__ __rmul__ __iadd__ __get__ "
    "__getattribute__ __missing__ __next__ __index__".split()
)
"""Methods that code calls without a name."""

LIBRARIES = {"torch", "numpy", "anybatch", *sys.stdlib_module_names}
"""Top-level packages without state of a user's code."""

NAMESPACES = {"types", "argparse", "collections", "queue", "weakref", "os", "multiprocessing"}
"""Modules of the standard library whose objects store their contents in plain attributes."""

OPTIMIZERS = "torch.optim"
"""Where torch's optimizers and schedules are, which also do."""

MANY = 1000
"""Entries of a container, or remembered results, above which those inside are skipped."""

NONE: Any = object()
"""Stands for the value of a name that does not exist."""


class Relation(Enum):
    """Relation of a value to the one that holds it."""

    PART = auto()
    OBJECT = auto()
    CELL = auto()
    DEFAULT = auto()
    ARGUMENT = auto()
    ATTRIBUTE = auto()
    GLOBAL = auto()


class ReachedValue(NamedTuple):
    """A value, and where it is.

    Attributes:
        link: its relation to the value that holds it.
        name: as the code writes it; "" for a part, which has none.
        value: `NONE` where a name has none yet.
        holder: the cell, the globals, or the object with the attribute.
    """

    link: Relation
    name: str
    value: Any
    holder: Any


def reached(value: Any) -> Iterator[ReachedValue]:
    """Yield the values that a callable, or an object around one, holds; no globals."""
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield ReachedValue(Relation.CELL, name, content(cell), cell)
        for name, one in value.__dict__.items():
            yield ReachedValue(Relation.ATTRIBUTE, name, one, value)
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        # Of more defaults than arguments, which Python permits, the last ones count.
        defaults = zip(names[::-1], (value.__defaults__ or ())[::-1], strict=False)
        for name, one in chain(defaults, (value.__kwdefaults__ or {}).items()):
            yield ReachedValue(Relation.DEFAULT, name, one, value)
    elif isinstance(value, MethodType):
        yield ReachedValue(Relation.PART, "", value.__func__, value)
        yield ReachedValue(Relation.OBJECT, "", value.__self__, value)
    elif isinstance(value, partial):
        yield ReachedValue(Relation.PART, "", value.func, value)
        for name, one in zip(_parameters(value.func), value.args, strict=False):
            yield ReachedValue(Relation.ARGUMENT, name, one, value)
        yield ReachedValue(Relation.PART, "", value.keywords, value)
    else:
        for one in _parts(value):
            yield ReachedValue(Relation.PART, "", one, value)


def _parts(value: Any) -> list[Any]:
    """Return the functions, or the values, of an object that wraps some."""
    match value:
        case property():
            return [one for one in (value.fget, value.fset) if one is not None]
        case staticmethod() | classmethod():
            return [value.__func__]
        case cached_property():
            return [value.func]
        case partialmethod():
            return [value.func, value.args, value.keywords]
        case _lru_cache_wrapper():
            return [value.__wrapped__]
        case BuiltinFunctionType():  # list.append; that of random.random is a module
            return [] if isinstance(value.__self__, ModuleType | type) else [value.__self__]
        case ContextVar():
            return [value.get(None)]
        case weakref.ref():
            return [value()]
        case memoryview():
            return [_get(value, "obj")]  # a released one has none
    return gc.get_referents(value) if isinstance(value, VIEWS) else []


def named(function: FunctionType, names: AbstractSet[str]) -> Iterator[ReachedValue]:
    """Yield the globals of a function among some names."""
    held = function.__globals__
    for name in names & held.keys():
        yield ReachedValue(Relation.GLOBAL, name, held[name], held)


@lru_cache(maxsize=1000)
def slots(cls: type) -> tuple[str, ...]:
    """Return the names of the slots of a class, those of its bases too."""
    found = []
    for base in cls.__mro__:
        own = vars(base).get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes and the slots of an object; `NONE` for a slot without a value."""
    held, names = namespace(value), slots(type(value))  # type: ignore[arg-type]
    return {**held, **{n: _get(value, n) for n in names}} if names else held


def namespace(value: Any) -> Any:
    """Return the attributes of an object without its slots: a dict, or the view of a class's."""
    found = _get(value, "__dict__")
    return found if isinstance(found, dict | MappingProxyType) else {}


def _get(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, NONE)
    except Exception:  # an attribute hook of the user's, which may raise anything
        return NONE


def classes(cls: type) -> tuple[type, ...]:
    """Return the bases of a class, and those of its own class: a metaclass has properties, too."""
    return *cls.__mro__, *type.mro(type(cls))


def content(cell: CellType) -> Any:
    """Return the content of a cell; `NONE` where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return NONE


@lru_cache(maxsize=10_000)
def names_of(code: CodeType, *, texts: bool = False) -> frozenset[str]:
    """Return the names that a function uses, and those inside it.

    Args:
        code: of the function.
        texts: texts like names count, too: ``getattr(model, "name")``. Default False.
    """
    found = set(code.co_names)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            found |= names_of(one, texts=texts)
        elif texts and type(one) is str and one.isidentifier():
            found.add(one)
    return frozenset(found)


def of_library(name: str, file: str = "") -> bool:
    """Say whether a module, by its name or its file, is torch's, Python's or installed."""
    return str(name).split(".", maxsplit=1)[0] in LIBRARIES or "site-packages" in str(file)


def module_of(function: FunctionType) -> str:
    """Return the module of a function; of a user's that wraps one of a library, the user's."""
    said = function.__module__ or ""  # which functools.wraps copies
    own = function.__globals__.get("__name__") or said
    return str(own if of_library(said) else said)


@lru_cache(maxsize=1000)
def installed(name: str) -> bool:
    """Say whether a module, by its name, is torch's, Python's or of an installed package."""
    return of_library(name, getattr(sys.modules.get(name), "__file__", None) or "")


def stores_in_attributes(cls: type) -> bool:
    """Say whether the objects of a library's class have all their contents in attributes."""
    name = str(cls.__module__)  # which a class may set
    root = name.split(".", maxsplit=1)[0]
    return root in NAMESPACES or name.startswith(OPTIMIZERS) or issubclass(cls, local)


def _parameters(function: Any) -> Iterator[str]:
    """Yield the names that a callable has for its positional arguments, and then its own."""
    with suppress(Exception):  # of C, or an object that computes its signature
        yield from inspect.signature(function).parameters
    name = _get(function, "__name__")
    yield from repeat("" if name is NONE else name)


def remembered(cached: Any) -> list[Any]:
    """Return the results that a ``functools.cache`` remembers; those of all else are none."""
    if not isinstance(cached, _lru_cache_wrapper):
        return []
    found = [one for one in gc.get_referents(cached) if type(one) is dict]
    values = [one for results in found[:1] for one in list(results.values())[:MANY]]
    links = [one for one in values if type(one).__name__ == "_lru_list_elem"]
    results = [one for one in values if type(one).__name__ != "_lru_list_elem"]
    return results + [one for link in links for one in gc.get_referents(link)]
