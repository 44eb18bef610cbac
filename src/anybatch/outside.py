"""Numbers beside a model that its forward may compute with: in closures, globals and functions.

A counter in a plain attribute of a module is seen there. One that forward or a hook keeps in a cell
of a closure, in a global or in an attribute of a function is as much a part of the model. So the
functions of a person's modules are followed, by the names that their code uses, to plain numbers
and to what holds some: a list, a dict, an object, an ``itertools.count``.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from anybatch.kept import HOOKS, plain_numbers

NUMBERS = (int, float, bool, str)
FEW = 64
"""Entries of a list or a dict above which it holds data."""

MOST = 500
"""Functions that are followed."""

LIBRARIES = {"torch", "numpy", "anybatch", *sys.stdlib_module_names}

Named = tuple[str, str]


def every_number(modules: Iterable[tuple[str, nn.Module]]) -> dict[Named, Any]:
    """Return the plain numbers in a person's modules, and those beside them.

    Args:
        modules: paths and modules.

    Returns:
        (path, name) -> value.
    """
    every = list(modules)
    return plain_numbers(every) | Outside(module for _, module in every).numbers()


class Outside:
    """The places beside some modules that hold numbers.

    Args:
        modules: of a model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._read: dict[Named, Callable[[], Any]] = {}
        self._seen: set[int] = set()
        self._ahead: list[Any] = []
        for module in modules:
            for kind in HOOKS:
                self._ahead += getattr(module, kind, {}).values()
            if not _of_library(type(module)):
                self._ahead += [one for one in vars(module).values() if _function(one)]
                self._class(type(module))
        while self._ahead and len(self._seen) < MOST:
            self._follow(self._ahead.pop())

    def numbers(self) -> dict[Named, Any]:
        """Return what the places hold now; of a list of other things nothing."""
        found = {named: read() for named, read in self._read.items()}
        return {named: value for named, value in found.items() if value is not None}

    def _class(self, cls: type) -> None:
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        for base in cls.__mro__:
            if not _of_library(base):
                self._ahead += [one for one in vars(base).values() if _function(one)]

    def _follow(self, given: Any) -> None:
        if isinstance(given, MethodType):
            self._place("", type(given.__self__).__name__, partial(_same, given.__self__))
            self._ahead.append(given.__func__)
        elif isinstance(given, partial):
            self._ahead.append(given.func)
        elif isinstance(given, FunctionType):
            if id(given) not in self._seen and not _of_library(given):
                self._seen.add(id(given))
                self._code(given)
        elif isinstance(call := getattr(type(given), "__call__", None), FunctionType):  # noqa: B004
            self._place("", type(given).__name__, partial(_same, given))
            self._ahead.append(call)

    def _code(self, given: FunctionType) -> None:
        """Note what a function, and those inside it, name."""
        for name, cell in zip(given.__code__.co_freevars, given.__closure__ or (), strict=True):
            self._place(given.__name__, name, partial(_content, cell))
        for name in _names(given.__code__) & given.__globals__.keys():
            self._place("", name, partial(given.__globals__.get, name))
        defaults = (*(given.__defaults__ or ()), *(given.__kwdefaults__ or {}).values())
        if any(isinstance(one, list | dict) for one in defaults):
            self._place(given.__name__, "defaults", partial(_same, defaults))
        if vars(given):
            self._place("", given.__name__, partial(_same, vars(given)))

    def _place(self, path: str, name: str, read: Callable[[], Any]) -> None:
        """Note a place that holds a number, or follow the function in it."""
        value = read()
        if _function(value):
            self._ahead.append(value)
        elif plain(value) is not None:
            self._read[path, name] = partial(_plain_of, read)


def plain(value: Any) -> Any:
    """Return the numbers that a value is or holds, as what can be compared; None for others."""
    if type(value) in NUMBERS:
        return value
    if type(value) is count:
        return repr(value)
    if isinstance(value, list | deque | tuple):
        return _few(value, value)
    if isinstance(value, dict):
        return _few(value, value.values())
    held = getattr(value, "__dict__", None)
    if type(held) is not dict or isinstance(value, nn.Module | type):
        return None
    if type(value).__module__ != "types" and _of_library(type(value)):
        return None
    numbers = [(name, one) for name, one in held.items() if type(one) in NUMBERS]
    return tuple(numbers[:FEW]) or None


def _few(held: Any, values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the numbers among a few values, and those in lists among them; the rest is data."""
    if len(held) > FEW:
        return ()
    inside = (one if type(one) in NUMBERS else _inside(one) for one in values)
    return tuple(one for one in inside if one is not None)


def _inside(value: Any) -> Any:
    if type(value) not in (list, dict) or len(value) > FEW:
        return None
    values = value.values() if type(value) is dict else value
    return tuple(one for one in values if type(one) in NUMBERS) or None


def _plain_of(read: Callable[[], Any]) -> Any:
    return plain(read())


def _same(value: Any) -> Any:
    return value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _function(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | partial)


def _names(code: CodeType) -> set[str]:
    """Return the names that a function uses, and those inside it."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names}.union(*inner)


def _of_library(code: type | FunctionType) -> bool:
    """Say whether a class or a function is torch's, Python's or an installed package's."""
    name = code.__module__ or ""
    if name.split(".", maxsplit=1)[0] in LIBRARIES:
        return True
    if isinstance(code, FunctionType):
        return "site-packages" in code.__code__.co_filename
    return "site-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")
