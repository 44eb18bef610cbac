"""Numbers and functions that a forward may compute with: in a model, in closures and in globals.

A counter or a switch may be in a plain attribute of a module, or in a list, a dict or an object
there. One that forward or a hook stores in a cell of a closure, in a global, in an attribute of a
function, of a class or of a file is as much a part of the model. So the functions of a user's
modules are searched, by the names that their code uses. Of a function its code is compared.
"""

from __future__ import annotations

import dis
import logging
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, ValuesView
from datetime import date, time, timedelta
from functools import lru_cache, partial
from itertools import chain, count
from numbers import Number
from operator import attrgetter
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from anybatch.core import pytree
from anybatch.core.accelerators import autocast_types
from anybatch.core.modules import HOOKS, ITSELF
from anybatch.core.python_state import Attributes
from anybatch.core.reached import (
    ARRAYS,
    HOLDERS,
    NONE,
    SPECIAL,
    Relation,
    attributes,
    classes,
    content,
    installed,
    module_of,
    named,
    names_of,
    reached,
    stores_in_attributes,
)
from anybatch.execution.proof.places import in_rows

FIRST, SECOND, THIRD, LAST = HOOKS

TORCH, INSTALLED, OWN = range(3)
"""Whether a class of modules is the user's."""

SETTINGS = frozenset(
    "dim start_dim end_dim batch_first scale_grad_by_freq track_running_stats max_norm".split()
)
"""Attributes of torch's own modules that decide along which dimension they compute, or the like.
Others are not compared, since each takes time in every step."""

VALUES = (Number, np.generic, bytes, range, slice, date, time, timedelta)
"""Classes whose values cannot change (test_a_switch_of_any_kind_is_noticed)."""


def _environment() -> int:
    return hash(tuple(os.environ.items()))  # not the values: they would be kept


READ: dict[str, Callable[[], Any]] = {
    "environ": _environment,
    "getenv": _environment,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "get_default_dtype": torch.get_default_dtype,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "get_num_threads": torch.get_num_threads,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "is_autocast_enabled": lambda: tuple(map(torch.is_autocast_enabled, autocast_types())),
}
"""Names of settings of Python's and torch's that code may branch on -> their value."""

FEW = 64
"""Entries of a list or a dict above which it holds data."""

MOST = 20_000
"""Functions, classes and places that are followed."""

NESTED = 2_000
"""Values in lists, dicts and objects that are followed behind these: more would be data, and cost
a step milliseconds."""

DEPTH = 3
"""Depth of nested lists, dicts and objects that are searched."""

OF_NORMS = ("num_batches_tracked", "running_mean", "running_var")
"""Names of the buffers of BatchNorm, which change in every step."""

LATER = frozenset("getattr hasattr vars globals __dict__".split())
"""Names by which code reads one that may be there later."""

EVERYWHERE = ("_global_forward_pre_hooks", "_global_forward_hooks")
"""Hooks that torch calls for every module."""

Named = tuple[str, ...]

DIMENSIONS = attrgetter("ndim")

HELD = "held"
"""Last word of the name of a list, a dict or an object."""


def parts(modules: Iterable[tuple[str, nn.Module]]) -> tuple[Any, ...]:
    """Return the forwards and hooks of modules, for comparison."""
    # Classes, not ids: a new class may have the id of one that was freed
    # (test_a_class_that_takes_the_address_of_another_is_another).
    found: list[Any] = []
    for path, module in modules:
        cls, held = type(module), module.__dict__
        found += path, cls, getattr(cls, "forward", None), len(held)
        if "forward" in held:
            found.append(plain(held["forward"]))
        if held.get(FIRST) or held.get(SECOND) or held.get(THIRD) or held.get(LAST):
            every = [(at, _of_hook(one)) for at in HOOKS for one in held.get(at, {}).values()]
            # Ours are there in an inspection (test_hooks_of_an_inspection_are_no_change).
            found += [one for one in every if one[1] is not None]
    for hooks in EVERYWHERE:
        found += map(_of_hook, getattr(of_all, hooks).values())
    return tuple(found)


def hooked_everywhere() -> bool:
    """Say whether torch calls hooks for every module."""
    return bool(of_all._global_forward_pre_hooks or of_all._global_forward_hooks)


class PlainNumbers(NamedTuple):
    """Numbers, strings and functions in the plain attributes of modules.

    Attributes:
        numbers: (path, name of the attribute) -> the number, or the code of the function; of a
            user's modules the shapes of buffers, too.
        moving: those of `numbers` that may change though no attribute does, with their readers.
        held: the places (path, name, HELD) of lists, dicts and objects that may hold some, each
            with the attributes of its module: not those of the modules of an installed package.
    """

    numbers: dict[Named, Any]
    moving: dict[Named, Callable[[], Any]]
    held: list[tuple[Named, dict[str, Any]]]

    def now(self) -> dict[Named, Any]:
        """Return the present numbers, where no attribute has changed."""
        moving = self.moving
        return self.numbers | ({n: read() for n, read in moving.items()} if moving else {})


def plain_numbers(modules: Iterable[tuple[str, nn.Module]]) -> PlainNumbers:
    """Return the numbers, strings and functions in the plain attributes of modules."""
    found, moving = dict[Named, Any](), dict[Named, Callable[[], Any]]()
    held: list[tuple[Named, dict[str, Any]]] = []
    of_all_modules, itself = Attributes.OWN, ITSELF  # read often
    for path, module in modules:
        origin = _origin(type(module))  # type: ignore[arg-type]
        if origin is TORCH:
            for name in _settings(type(module)):  # type: ignore[arg-type]
                moving[path, name] = partial(module.__dict__.get, name)
                found[path, name] = module.__dict__.get(name)
            continue
        if origin is OWN and module._buffers:
            moving[path, "buffers"] = partial(_forms, module)
            found[path, "buffers"] = _forms(module)
        for name, value in module.__dict__.items():
            if name in of_all_modules:
                continue
            cls: type = type(value)
            if cls in itself:
                found[path, name] = value
            elif cls is FunctionType:
                moving[path, name] = partial(_plain_at, module.__dict__, name)
                found[path, name] = plain(value)
            elif origin is OWN:
                held.append(((path, name, HELD), module.__dict__))
    return PlainNumbers(found, moving, held)


def read_held(places: Iterable[tuple[Named, dict[str, Any]]]) -> dict[Named, Any]:
    """Return the contents of lists, dicts and objects in module attributes, for comparison."""
    values = ((at, attributes.get(at[1])) for at, attributes in places)
    return {at: one if isinstance(one, type) else plain(one) for at, one in values}


def _forms(module: nn.Module) -> Any:
    """Return the shapes and dtypes of the buffers of a module."""
    every = module._buffers.values()
    return tuple([None if one is None else (one.shape, one.dtype) for one in every])


def _plain_at(held: dict[str, Any], name: str) -> Any:
    return plain(held[name])


def few_numbers(modules: Iterable[tuple[str, nn.Module]]) -> dict[Named, Any]:
    """Return the tensors of few numbers that modules hold, but for those of BatchNorm.

    Returns:
        (path, name) -> the number or numbers, which a device is waited for.
    """
    every = (
        ((path, name), tensor)
        for path, module in modules
        for held in (module._parameters, module._buffers, module.__dict__)
        for name, tensor in held.items()
        if name not in OF_NORMS
    )
    return {named: _numbers_of(tensor) for named, tensor in every if _few_of(tensor)}


def every_number(modules: Iterable[tuple[str, nn.Module]]) -> dict[Named, Any]:
    """Return the plain numbers in a user's modules, and in closures and globals they use.

    Returns:
        (path, name) -> value.
    """
    every = list(modules)
    numbers, _, held = plain_numbers(every)
    return numbers | read_held(held) | Outside(module for _, module in every).numbers()


def first_moved(before: dict[Named, Any], after: dict[Named, Any]) -> str:
    """Return the path of a number that calls have moved; "" where none has.

    The contents of a list, a dict or an object of a module may grow: a log, or a buffer.
    """
    for at, value in after.items():
        was = before.get(at, value)
        if was != value and not (at[-1] == HELD and _grew(was, value)):
            return ".".join(one for one in at[:2] if one)
    return ""


def _grew(before: Any, after: Any) -> bool:
    if not (isinstance(before, tuple) and isinstance(after, tuple)):
        return bool(before == after)
    return len(after) >= len(before) and all(map(_grew, before, after))


def batch_constants(trees: Any, *, singles: bool) -> dict[Named, Any]:
    """Return the numbers and texts of a batch that are not rows.

    Args:
        trees: of a batch.
        singles: the numbers in tensors without dimensions, too, which a device is waited for.
    """
    found: dict[Named, Any] = {}
    if type(trees) is list and {*map(type, trees)} == {Tensor} and all(map(DIMENSIONS, trees)):
        return found  # all of them are rows
    for path, leaf in pytree.leaves(trees):
        if isinstance(leaf, Tensor):
            if singles and not leaf.dim() and _few_of(leaf):
                found["a tensor", path] = leaf.item()
        elif type(leaf) is str and len(leaf) > FEW:
            found[path, "text"] = hash(leaf)  # not the text: it would be kept
        elif type(leaf) in ITSELF:
            found[path, ""] = leaf
    return found


class Outside:
    """Places with numbers that some modules may read: closures, globals, attributes.

    Args:
        modules: of a model.
        functions: more that are followed. Default: there are none.

    Attributes:
        reads_grad: a method of a module, or a function that it loads, reads an attribute `grad`.
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any] = ()) -> None:
        self.reads_grad = False
        self._read: dict[Named, Callable[[], Any]] = {}
        self._tensors: dict[Named, Callable[[], Any]] = {}
        self._visited: dict[int, Any] = {}  # which live as long, or another would have the id
        self._places: set[tuple[int, str, str]] = set()
        self._attributed: list[tuple[Any, int]] = []
        self._loads = True
        self._numbered: Counter[Named] = Counter()
        self._ahead, self._nested = list[tuple[Any, int]](), deque[tuple[Any, int]]()
        for one in functions:
            if not isinstance(one, nn.Module):
                self._place(one, "a function", type(one).__name__, partial(_same, one))
        for module in modules:
            for hooks in HOOKS:
                self._ahead += ((one, 0) for one in getattr(module, hooks, {}).values())
            if _origin(type(module)) is TORCH:  # type: ignore[arg-type]
                self._foreign(module)
            for parameter in module._parameters.values():
                if parameter is not None and parameter.__dict__:
                    held = parameter.__dict__
                    self._place(held, "a parameter", "attributes", partial(_same, held))
            if not _of_library(type(module)):
                own = vars(module).keys() - Attributes.OWN
                self._ahead += ((one, 0) for n, one in vars(module).items() if n in own)
                self._class(type(module))
        self._follow_all()
        # An attribute may have the name of a function: what code loads has been followed before.
        self._loads, self._ahead = False, self._attributed
        self._follow_all()

    def _follow_all(self) -> None:
        """Follow functions and classes, and nested values when none of these is left."""
        for _ in range(NESTED):
            while self._ahead and len(self._visited) < MOST:
                self._follow(*self._ahead.pop())
            if not self._nested:
                return
            self._follow(*self._nested.popleft())

    def numbers(self) -> dict[Named, Any]:
        """Return the present numbers in the places; places without any are omitted."""
        if not self._read:
            return {}
        found = {named: read() for named, read in self._read.items()}
        return {named: value for named, value in found.items() if value is not None}

    def tensors(self) -> dict[Named, Any]:
        """Return the tensors that the places hold at present."""
        return {named: read() for named, read in self._tensors.items()}

    def few_numbers(self) -> dict[Named, Any]:
        """Return the tensors of few numbers that the places hold, which a device is waited for."""
        held = self._tensors.items()
        return {named: _numbers_of(one) for named, read in held if _few_of(one := read())}

    def _foreign(self, module: nn.Module) -> None:
        """Record attributes that a user has set on a module of torch's own."""
        held, cls = vars(module), type(module)
        for name in held.keys() - Attributes.OWN - _named_in(cls):  # type: ignore[arg-type]
            self._place(held, cls.__name__, name, partial(held.get, name))

    def _class(self, cls: type) -> None:
        self._visited[id(cls)] = cls
        for base in classes(cls):
            if not _of_library(base):
                held = vars(base)
                self._names(base, base.__name__, held)
                if issubclass(base, nn.Module):
                    methods = (one for one in held.values() if isinstance(one, FunctionType))
                    self.reads_grad |= any(_reads_grad(one.__code__) for one in methods)
                for name in [n for n in held if n in SPECIAL or not n.startswith("__")]:
                    self._place(held, base.__name__, name, partial(held.get, name))

    def _follow(self, value: Any, depth: int) -> None:
        """Follow the values that a value holds, and those that its code names.

        Args:
            value: that a place holds, or that is in it.
            depth: how far inside; what a place does not show any more is one of its own.
        """
        if type(value) in ITSELF or isinstance(value, Tensor | nn.Module):
            return
        if id(value) in self._visited:
            return
        if depth == DEPTH and not isinstance(value, type | FunctionType | ModuleType):
            self._place(value, "nested", type(value).__name__, partial(_same, value))
            return
        self._visited[id(value)] = value
        if isinstance(value, FunctionType):
            if not _of_library(value):
                self._code(value)
        elif isinstance(value, type):
            if not _of_library(value):
                self._class(value)
        elif not isinstance(value, ModuleType):
            for one in self._inside(value):
                code = isinstance(one, (FunctionType, type, *HOLDERS))
                (self._ahead if code else self._nested).append((one, depth + 1))

    def _inside(self, value: Any) -> list[Any]:
        if isinstance(value, HOLDERS):
            found = [*reached(value)]
            for one in found:
                if one.link is Relation.OBJECT:
                    place = type(one.value).__module__, "its object"
                    self._place(one.value, *place, partial(_same, one.value))
            return [one.value for one in found]
        if isinstance(value, dict):
            value = dict.values(value)
        if isinstance(value, list | tuple | set | frozenset | deque | ValuesView):
            return [*value] if len(value) <= FEW else []
        cls: type = type(value)
        if not _of_library(cls):
            self._ahead.append((cls, 0))
        return [] if _is_opaque(cls) else [*attributes(value).values()]

    def _code(self, function: FunctionType) -> None:
        """Record the places that are named by a function and by the functions inside it."""
        path, names = function.__name__, names_of(function.__code__)
        self._read |= {("a setting", name): READ[name] for name in names & READ.keys()}
        for link, name, _, holder in reached(function):
            if link is Relation.CELL:
                self._place(holder, path, name, partial(_content, holder))
        self.reads_grad |= self._loads and _reads_grad(function.__code__)
        loaded = _loaded(function.__code__) if self._loads else names
        for _, name, value, holder in named(function, names):
            (self._ahead if name in loaded else self._attributed).append((value, 0))
            self._place(holder, function.__module__, name, partial(holder.get, name), leads=False)
            if isinstance(value, ModuleType) and not _of_library(value):
                self._attributes(value, names)
            if isinstance(value, FunctionType | ModuleType) and names & LATER:
                self._names(value, value.__name__, vars(value))
        if "globals" in names:
            self._names(function, function.__module__, function.__globals__)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(type(one) not in ITSELF for one in defaults):
            self._place(function, path, "defaults", partial(_same, defaults))
        if vars(function):
            self._place(vars(function), function.__module__, path, partial(_same, vars(function)))

    def _names(self, holder: Any, path: str, held: Any) -> None:
        """Record how many names there are: code may read one that is not there yet."""
        self._place(holder, path, "names", partial(len, held), leads=False)

    def _attributes(self, module: ModuleType, names: frozenset[str]) -> None:
        """Record attributes of a file that a function may read, and of the files in it."""
        held = vars(module)
        for name in held.keys() & names:
            inside = held[name]
            new = (id(module), module.__name__, name) not in self._places
            self._place(module, module.__name__, name, partial(held.get, name))
            if new and isinstance(inside, ModuleType) and not _of_library(inside):
                self._attributes(inside, names)

    def _place(
        self, holder: Any, path: str, name: str, read: Callable[[], Any], *, leads: bool = True
    ) -> None:
        """Record a place; its value is followed where it `leads` there."""
        at = id(holder), path, name
        if at in self._places:
            return
        self._places.add(at)
        value = read()
        if leads:
            self._ahead.append((value, 0))
        if plain(value) is not None:
            self._numbered[path, name] += 1
            several = self._numbered[path, name]
            free = name if several == 1 else f"{name} {several}"
            self._read[path, free] = partial(_plain_of, read)
            if isinstance(value, Tensor):
                self._tensors[path, free] = read


GENERATORS: dict[type, Callable[[Any], Any]] = {
    random.Random: lambda generator: generator.getstate(),
    np.random.Generator: lambda generator: generator.bit_generator.state,
    np.random.RandomState: lambda generator: generator.get_state(),
}
"""Generators of random numbers that are no global ones -> their state."""


def plain(value: Any, depth: int = DEPTH) -> Any:
    """Return the numbers and functions that a value is or holds, for comparison.

    Returns:
        Of tensors, modules and all other values, only the class; None of classes and files.
    """
    cls: type = type(value)
    if cls in ITSELF:
        return value
    if not depth or isinstance(value, Tensor | nn.Module):
        return cls
    if isinstance(value, list | tuple | deque):
        return _few(value, depth)
    if isinstance(value, dict):
        return _few([*chain.from_iterable(dict.items(value))], depth, 2 * FEW)
    if cls is FunctionType:
        cells = [*map(_content, value.__closure__ or ())]
        return (value.__code__, *_few(cells, depth)) if cells else value.__code__
    if isinstance(value, type | ModuleType):
        return None
    if isinstance(value, HOLDERS):  # of a method its function: its object is a place of its own
        return _few([one.value for one in reached(value) if one.link is not Relation.OBJECT], depth)
    if isinstance(value, set | frozenset):
        few = [one for one in value if type(one) in ITSELF or len(value) <= FEW]
        return frozenset(one if type(one) in ITSELF else plain(one, depth - 1) for one in few)
    if _is_opaque(cls):
        return _of_library_class(value)
    return (cls, *_few(attributes(value).values(), depth))


def _is_opaque(cls: type) -> bool:
    """Say whether attributes of its objects are not compared: a schedule moves in each step."""
    return _of_library(cls) and (
        cls.__module__.startswith("torch.") or not stores_in_attributes(cls)
    )


def _of_library_class(value: Any) -> Any:
    """Return a value of a class of Python's, numpy's or torch's in comparable form."""
    cls: type = type(value)
    if (state_of := GENERATORS.get(cls)) is not None:
        return repr(state_of(value))
    if isinstance(value, VALUES):
        return cls, repr(value)
    if isinstance(value, torch.optim.Optimizer):  # whose rates a schedule moves
        return cls, *(plain(group, 1) for group in value.param_groups)
    if isinstance(value, logging.Logger):
        return value.getEffectiveLevel()
    if isinstance(value, ARRAYS):
        return cls, bytes(value) if memoryview(value).nbytes <= FEW else None
    if cls is np.ndarray:
        return value.shape, value.dtype, value.tobytes() if value.size <= FEW else None
    return repr(value) if cls is count else cls


def _few(values: Any, depth: int, most: int = FEW) -> tuple[Any, ...]:
    """Return the contents of a container with few entries; others are data."""
    if len(values) > most:
        return ()
    return tuple([one if type(one) in ITSELF else plain(one, depth - 1) for one in values])


def _of_hook(hook: Any) -> Any:
    """Return the code of a hook that is not this library's, for comparison."""
    own = (getattr(hook, "__module__", None) or "").startswith("anybatch.")
    return None if own else plain(hook)


def _few_of(value: Any) -> TypeGuard[Tensor]:
    """Say whether a value is a tensor of few numbers; several that are trained change anyway."""
    if not (isinstance(value, Tensor) and in_rows(value)):
        return False
    return value.numel() == 1 or (value.numel() <= FEW and not value.requires_grad)


def _numbers_of(tensor: Tensor) -> Any:
    return float(tensor.item()) if tensor.numel() == 1 else str(tensor.tolist())


def _plain_of(read: Callable[[], Any]) -> Any:
    return plain(read())


def _reads_grad(code: CodeType) -> bool:
    """Say whether code reads `.grad`, but for functions of that name (``torch.autograd.grad``)."""
    before = ""
    for one in dis.get_instructions(code):
        reads = one.argval == "grad" and one.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if reads and before not in ("autograd", "func"):
            return True
        before = one.argval
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return any(map(_reads_grad, inner))


@lru_cache(maxsize=1000)
def _loaded(code: CodeType) -> frozenset[str]:
    """Return the names that code loads as globals, without those of attributes."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(found.union(*map(_loaded, inner)))


def _same(value: Any) -> Any:
    return value


def _content(cell: CellType) -> Any:
    found = content(cell)
    return None if found is NONE else found


def _of_library(code: type | FunctionType | ModuleType) -> bool:
    """Say whether a class, a function or a file is torch's, Python's or an installed package's."""
    if isinstance(code, FunctionType):
        return installed(module_of(code)) or "site-packages" in code.__code__.co_filename
    return installed(code.__name__ if isinstance(code, ModuleType) else code.__module__)


@lru_cache(maxsize=1000)
def _origin(cls: type) -> int:
    if cls.__module__.startswith("torch.nn."):
        return TORCH
    return INSTALLED if _of_library(cls) else OWN


@lru_cache(maxsize=1000)
def _named_in(cls: type) -> frozenset[str]:
    """Return the names that a class of modules uses for itself."""
    functions = [one for base in cls.__mro__ for one in vars(base).values()]
    return frozenset().union(
        *(names_of(f.__code__) for f in functions if isinstance(f, FunctionType))
    )


@lru_cache(maxsize=1000)
def _settings(cls: type) -> frozenset[str]:
    return SETTINGS & _named_in(cls)
