"""Python state that a rehearsal moves, and that must be as it was: counters, logs, running means.

A copy of a model shares its hooks, and what these close over, with the original; a loss is a plain
function with state of its own. torch tracks neither. So reachable state is recorded as references,
and restored after the dry run: the attributes of modules and other objects, cells of closures,
global names, and the contents of lists, dicts and sets.

    hook ──closure──> list [a, b]        rehearsed: [a, b, fake, fake]        put back: [a, b]
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)
PLAIN = (*CONTAINERS, int, float, bool, str, tuple, type(None), Tensor)

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


MANY = 1000
"""Entries of a container, above which those inside it are skipped."""


class PythonState:
    """Snapshot of the Python state that functions and objects hold.

    Attributes:
        held: the containers that were noted.
    """

    def __init__(self) -> None:
        self.held: list[Any] = []
        self._visited: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    def modules(self, modules: Iterable[nn.Module], *, attributes: bool) -> None:
        """Record the state that modules and their hooks hold.

        Args:
            modules: those of a step.
            attributes: note those of the modules too; False where they are copies.
        """
        for module in modules:
            tensors = [*module._parameters.values(), *module._buffers.values()]
            made_late = any(t is not None and is_lazy(t) for t in tensors)
            if attributes and not made_late:
                self.container(vars(module))
            if not isinstance(module, ScriptModule):  # whose class has no function
                self.function(type(module).forward)
                self._class(type(module))
                for value in list(vars(module).values()):
                    if isinstance(value, FunctionType | MethodType | partial):
                        self.function(value)
            for attribute in HOOKS:
                for hook in list(getattr(module, attribute, {}).values()):
                    self.function(hook)

    def function(self, fn: Any) -> None:
        """Record the state that a function, a method or a callable object holds."""
        if id(fn) in self._visited or isinstance(fn, nn.Module | type):
            return
        self._visited.add(id(fn))
        if isinstance(fn, partial):
            for held in (fn.func, *fn.args, *fn.keywords.values()):
                self._value(held)
        elif isinstance(fn, MethodType):
            self.function(fn.__func__)
            self._value(fn.__self__)
        elif not isinstance(fn, FunctionType):
            if callable(fn) and hasattr(fn, "__dict__"):
                self.container(vars(fn))
        elif not (fn.__module__ or "").startswith("torch."):
            self._closure(fn)

    def container(self, held: Any) -> None:
        """Record the entries of a list, dict or set, and those of the containers in it."""
        if id(held) in self._visited:
            return
        self._visited.add(id(held))
        was = held.copy()
        self.held.append(held)
        self._undo.append(partial(fill, held, was))
        if len(was) > MANY:
            return  # data, not a log
        for inside in was.values() if isinstance(was, dict) else was:
            if type(inside) in CONTAINERS:
                self.container(inside)

    def put_back(self) -> None:
        """Make all of it as it was."""
        for undo in self._undo:
            undo()

    def _class(self, cls: type) -> None:
        """Record the plain attributes of a user's class."""
        for base in cls.__mro__:
            own = not base.__module__.startswith(("torch.", "builtins", "anybatch."))
            if own and id(base) not in self._visited:
                self._visited.add(id(base))
                was = dict(vars(base))
                self._undo.append(partial(_fill_class, base, was))
                for value in was.values():
                    if type(value) in CONTAINERS:
                        self.container(value)
                    elif isinstance(value, FunctionType):
                        self.function(value)

    def _closure(self, fn: FunctionType) -> None:
        for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self._value(value)
        for cell in fn.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # nothing yet
                continue
            self._undo.append(partial(setattr, cell, "cell_contents", value))
            self._value(value)
        self.container(fn.__dict__)
        names = names_of(fn.__code__)
        for name in names:
            value = fn.__globals__.get(name, fn)
            if isinstance(value, ModuleType) and not of_library(value.__name__):
                for inside in names:
                    self._global(vars(value), inside)
            else:
                self._global(fn.__globals__, name)

    def _global(self, held: dict[str, Any], name: str) -> None:
        """Note the value of a global name, and the state that a function, class or object holds.

        A table that a helper keeps by size would hold tensors without data
        (test_tables_of_helpers_hold_no_fakes).
        """
        value = held.get(name)
        if name in held and type(value) in PLAIN:
            self._undo.append(partial(held.__setitem__, name, value))
            self._value(value)
        elif isinstance(value, FunctionType) and len(self._visited) < MANY:
            if not of_library(value.__module__ or ""):
                self.function(value)
        elif isinstance(value, type):
            if not of_library(value.__module__):
                self._class(value)
        elif not callable(value) and not of_library(type(value).__module__):
            self._value(value)

    def _value(self, value: Any) -> None:
        if type(value) in CONTAINERS:
            self.container(value)
        elif callable(value):
            self.function(value)
        elif type(value).__module__ != "builtins" and not isinstance(value, Tensor | nn.Module):
            self.container(getattr(value, "__dict__", {}))


class Attributes:
    """The plain attributes of a user's modules: few enough to be recorded in every step.

    Args:
        modules: of a model.
    """

    OWN = frozenset(vars(nn.Module()))

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._was: list[tuple[Any, Any]] = []
        for module in filter(_theirs, modules):
            held = vars(module)
            self._was.append((held, held.copy()))
            for name, value in held.items():
                if name not in self.OWN and type(value) in CONTAINERS and len(value) <= MANY:
                    self._was.append((value, value.copy()))

    def put_back(self) -> None:
        """Make them as they were."""
        for held, was in self._was:
            fill(held, was)


def of_library(name: str) -> bool:
    """Say whether a file is torch's, numpy's, Python's or this library's."""
    return name.split(".", maxsplit=1)[0] in LIBRARIES


LIBRARIES = {"torch", "numpy", "anybatch", *sys.stdlib_module_names}
"""Top-level packages without state of a user's forward."""


def _theirs(module: nn.Module) -> bool:
    """Say whether a class is the user's: torch's own store nothing in plain attributes."""
    return not type(module).__module__.startswith("torch.nn.")


def fill(held: Any, was: Any) -> None:
    """Restore the entries of a container; a list or dict with the same entries is not written."""
    same = len(held) == len(was)
    if isinstance(held, dict):
        for key in [key for key in held if key not in was]:
            del held[key]
        held.update({k: v for k, v in was.items() if k not in held or held[k] is not v})
    elif isinstance(held, set):
        held.clear()
        held.update(was)
    elif not (same and all(a is b for a, b in zip(held, was, strict=True))):
        held.clear()
        held.extend(was)


def _fill_class(cls: type, was: dict[str, Any]) -> None:
    """Make a class have the plain attributes that it had."""
    for name in [name for name in vars(cls) if name not in was and not name.startswith("_")]:
        delattr(cls, name)
    for name, value in was.items():
        if type(value) in PLAIN and vars(cls).get(name) is not value and not name.startswith("__"):
            setattr(cls, name, value)


def names_of(code: CodeType) -> set[str]:
    """Return the names that a function uses, and those inside it."""
    inner = [names_of(one) for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names}.union(*inner)
