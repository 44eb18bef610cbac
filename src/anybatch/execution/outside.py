"""Numbers and functions that a forward may compute with: in a model, in closures and in globals.

A counter or a switch may be in a plain attribute of a module, or in a list, a dict or an object
there. One that forward or a hook stores in a cell of a closure, in a global, in an attribute of a
function, of a class or of a file is as much a part of the model. So the functions of a user's
modules are searched, by the names that their code uses. Of a function its code is compared.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import count
from types import CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from anybatch.core import pytree
from anybatch.core.modules import DispatchMode
from anybatch.core.python_state import HOOKS, LIBRARIES, Attributes, names_of
from anybatch.errors import LossError
from anybatch.execution.proof.follow import Follow
from anybatch.execution.proof.places import in_rows, scalars

NUMBERS = (int, float, bool, str)
ITSELF: frozenset[type] = frozenset(
    (*NUMBERS, NoneType, torch.dtype, torch.device, torch.memory_format, torch.layout)
)
"""Classes of values that can be compared as they are."""

FIRST, SECOND, THIRD, LAST = HOOKS

CODE = frozenset((FunctionType, MethodType, partial))

TORCH, INSTALLED, OWN = range(3)
"""Whether a class of modules is the user's. torch's own store nothing in plain attributes."""

FEW = 64
"""Entries of a list or a dict above which it holds data."""

MOST = 500
"""Functions that are followed."""

DEPTH = 3
"""Depth of nested lists, dicts and objects that are searched."""

EVERYWHERE = ("_global_forward_pre_hooks", "_global_forward_hooks")
"""Hooks that torch calls for every module."""

Named = tuple[str, ...]

HELD = "held"
"""Last word of the name of a list, a dict or an object."""


def parts(modules: Iterable[tuple[str, nn.Module]]) -> tuple[Any, ...]:
    """Return the forwards and hooks of modules, for comparison.

    Args:
        modules: paths and modules.
    """
    # Classes, not ids: a new class may have the id of one that was freed
    # (test_a_class_that_takes_the_address_of_another_is_another).
    found: list[Any] = []
    for path, module in modules:
        cls, held = type(module), module.__dict__
        found += path, cls, getattr(cls, "forward", None), len(held)
        if "forward" in held:
            found.append(plain(held["forward"]))
        try:
            hooked = held[FIRST] or held[SECOND] or held[THIRD] or held[LAST]
        except KeyError:
            hooked = True
        if hooked:
            for hooks in HOOKS:
                found += hooks, *map(_of_hook, held.get(hooks, {}).values())
    for hooks in EVERYWHERE:
        found += map(_of_hook, getattr(of_all, hooks).values())
    return tuple(found)


def plain_numbers(
    modules: Iterable[tuple[str, nn.Module]],
) -> tuple[dict[Named, Any], list[tuple[Named, dict[str, Any]]]]:
    """Return the numbers, strings and functions in the plain attributes of a user's modules.

    Args:
        modules: paths and modules.

    Returns:
        (path, name of the attribute) -> the number, or the code of the function. And the places
        (path, name, HELD) of lists, dicts and objects that may hold some, each with the attributes
        of its module: not those of the modules of a package that is installed.
    """
    found: dict[Named, Any] = {}
    held: list[tuple[Named, dict[str, Any]]] = []
    of_all_modules, itself = Attributes.OWN, ITSELF  # read often
    for path, module in modules:
        origin = _origin(type(module))  # type: ignore[arg-type]
        if origin is TORCH:
            continue
        for name, value in module.__dict__.items():
            if name in of_all_modules:
                continue
            cls: type = type(value)
            if cls in itself:
                found[path, name] = value
            elif cls is FunctionType:
                found[path, name] = value.__code__
            elif origin is OWN:
                held.append(((path, name, HELD), module.__dict__))
    return found, held


def read_held(places: Iterable[tuple[Named, dict[str, Any]]]) -> dict[Named, Any]:
    """Return the contents of lists, dicts and objects in module attributes, for comparison."""
    return {at: plain(attributes.get(at[1])) for at, attributes in places}


def single_numbers(modules: Iterable[tuple[str, nn.Module]]) -> dict[Named, float]:
    """Return the tensors of one number that modules hold, but for counters of BatchNorm.

    Args:
        modules: paths and modules.

    Returns:
        (path, name) -> the number, which a device is waited for.
    """
    every = (
        ((path, name), tensor)
        for path, module in modules
        for held in (module._parameters, module._buffers, module.__dict__)
        for name, tensor in held.items()
        if name != "num_batches_tracked"
    )
    return {named: float(tensor.item()) for named, tensor in every if _single(tensor)}


def every_number(modules: Iterable[tuple[str, nn.Module]]) -> dict[Named, Any]:
    """Return the plain numbers in a user's modules, and in closures and globals they use.

    Args:
        modules: paths and modules.

    Returns:
        (path, name) -> value.
    """
    every = list(modules)
    numbers, held = plain_numbers(every)
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
    """Say whether a container only grew at its end."""
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
    for path, leaf in pytree.leaves(trees):
        if isinstance(leaf, Tensor):
            if singles and not leaf.dim() and _single(leaf):
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
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any] = ()) -> None:
        self._read: dict[Named, Callable[[], Any]] = {}
        self._tensors: dict[Named, Callable[[], Any]] = {}
        self._visited: set[int] = set()
        self._places: set[tuple[int, str, str]] = set()
        self._ahead: list[Any] = [one for one in functions if not isinstance(one, nn.Module)]
        for module in modules:
            for hooks in HOOKS:
                self._ahead += getattr(module, hooks, {}).values()
            if _origin(type(module)) is TORCH:  # type: ignore[arg-type]
                self._foreign(module)
            for parameter in module._parameters.values():
                if parameter is not None and parameter.__dict__:
                    held = parameter.__dict__
                    self._place(held, "a parameter", "attributes", partial(_same, held))
            if not _of_library(type(module)):
                self._ahead += [one for one in vars(module).values() if _function(one)]
                self._class(type(module))
        while self._ahead and len(self._visited) < MOST:
            self._follow(self._ahead.pop())

    def numbers(self) -> dict[Named, Any]:
        """Return the present numbers in the places; places without any are omitted."""
        if not self._read:
            return {}
        found = {named: read() for named, read in self._read.items()}
        return {named: value for named, value in found.items() if value is not None}

    def singles(self) -> dict[Named, float]:
        """Return the tensors of one number that the places hold, which a device is waited for."""
        held = {named: read() for named, read in self._tensors.items()}
        return {named: float(one.item()) for named, one in held.items() if _single(one)}

    def _foreign(self, module: nn.Module) -> None:
        """Record attributes that a user has set on a module of torch's own."""
        held, cls = vars(module), type(module)
        for name in held.keys() - Attributes.OWN - _named_in(cls):  # type: ignore[arg-type]
            self._place(held, cls.__name__, name, partial(held.get, name))

    def _class(self, cls: type) -> None:
        if id(cls) in self._visited:
            return
        self._visited.add(id(cls))
        for base in cls.__mro__:
            if not _of_library(base):
                held = vars(base)
                for name in [name for name in held if not name.startswith("__")]:
                    self._place(held, base.__name__, name, partial(held.get, name))

    def _follow(self, function: Any) -> None:
        if isinstance(function, MethodType):
            held = function.__self__
            self._place(held, function.__module__, "its object", partial(_same, held))
            self._ahead.append(function.__func__)
        elif id(function) in self._visited:
            return
        elif isinstance(function, partial):
            self._visited.add(id(function))
            self._place(function, "a partial", "its arguments", partial(_same, function))
            self._ahead += filter(
                _function, (function.func, *function.args, *function.keywords.values())
            )
        elif isinstance(function, FunctionType):
            if not _of_library(function):
                self._visited.add(id(function))
                self._code(function)
        elif isinstance(call := getattr(type(function), "__call__", None), FunctionType):  # noqa: B004
            self._visited.add(id(function))
            self._place(
                function, function.__module__, type(function).__name__, partial(_same, function)
            )
            self._class(type(function))
            self._ahead.append(call)

    def _code(self, function: FunctionType) -> None:
        """Record the places that are named by a function and by the functions inside it."""
        path, of_file = function.__name__, function.__globals__
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._place(cell, path, name, partial(_content, cell))
        names = names_of(function.__code__)
        for name in names & of_file.keys():
            value = of_file[name]
            self._place(of_file, function.__module__, name, partial(of_file.get, name))
            if isinstance(value, type | ModuleType) and not _of_library(value):
                self._attributes(value, names)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(type(one) not in ITSELF for one in defaults):
            self._place(function, path, "defaults", partial(_same, defaults))
        if vars(function):
            self._place(vars(function), function.__module__, path, partial(_same, vars(function)))

    def _attributes(self, value: type | ModuleType, names: Iterable[str]) -> None:
        """Note attributes of a class or a file that a function may read."""
        held = vars(value)
        for name in held.keys() & names:
            self._place(value, value.__name__, name, partial(held.get, name))

    def _place(self, holder: Any, path: str, name: str, read: Callable[[], Any]) -> None:
        """Note a place that holds a number, once, or follow the functions in it."""
        at = id(holder), path, name
        if at in self._places:
            return
        self._places.add(at)
        value = read()
        several = isinstance(value, list | tuple | dict) and len(value) <= FEW
        inside = [value] if not several else value.values() if type(value) is dict else [*value]
        self._ahead += [one for one in inside if _function(one) or _called(one)]
        if plain(value) is not None:
            names = (name if k == 1 else f"{name} {k}" for k in count(1))
            free = next(one for one in names if (path, one) not in self._read)
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

    Args:
        value: any.
        depth: nested lists, dicts and objects that are searched.

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
        return _few(value.values(), depth)
    if cls in CODE:
        return _of_code(value, depth)
    if isinstance(value, type | ModuleType):
        return None
    if isinstance(value, set | frozenset):
        return frozenset(one for one in value if type(one) in NUMBERS)
    if (state_of := GENERATORS.get(cls)) is not None:
        return repr(state_of(value))
    if cls.__module__ not in ("types", "argparse") and _of_library(cls):
        return repr(value) if cls is count else cls
    held = getattr(value, "__dict__", {})
    slots = [getattr(value, name, None) for name in getattr(cls, "__slots__", ())]
    return (cls, *_few([*held.values(), *slots], depth))


def _of_code(value: Any, depth: int) -> Any:
    """Return the code of a function or method, or the parts of a partial, for comparison."""
    if isinstance(value, partial):
        return _few((value.func, *value.args, *value.keywords.values()), depth)
    if isinstance(value, MethodType):
        return plain(value.__func__, depth)
    return value.__code__


def _few(values: Any, depth: int) -> tuple[Any, ...]:
    """Return the contents of a container with few entries; others are data."""
    if len(values) > FEW:
        return ()
    return tuple([one if type(one) in ITSELF else plain(one, depth - 1) for one in values])


def _of_hook(hook: Any) -> Any:
    """Return the code of a hook that is not this library's, for comparison."""
    own = (getattr(hook, "__module__", None) or "").startswith("anybatch.")
    return None if own else plain(hook)


def _single(value: Any) -> TypeGuard[Tensor]:
    """Say whether a value is a tensor of one number that can be read."""
    return isinstance(value, Tensor) and in_rows(value) and value.numel() == 1


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


def _called(value: Any) -> bool:
    """Say whether a value is a callable object of a user's class."""
    cls = type(value)
    call = getattr(cls, "__call__", None)  # noqa: B004
    own = isinstance(call, FunctionType) and not _of_library(cls)
    return own and not isinstance(value, nn.Module)


def _of_library(code: type | FunctionType | ModuleType) -> bool:
    """Say whether a class, a function or a file is torch's, Python's or an installed package's."""
    if isinstance(code, FunctionType):
        return _installed(code.__module__ or "") or "site-packages" in code.__code__.co_filename
    return _installed(code.__name__ if isinstance(code, ModuleType) else code.__module__)


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
def _installed(name: str) -> bool:
    if name.split(".", maxsplit=1)[0] in LIBRARIES:
        return True
    return "site-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")


# Tensors and numbers that a coupled function reads without getting them as arguments.
#
# It is called once, with the rows of all. Other values that it reads, through a closure or an
# attribute, are those of the micro-batch that happens to call it, and the result does not show it.
#
#     a tensor that forward has made of samples      found where forward is followed
#     numbers in its kernels (``1 / len(rows)``)     the same in two inspections of different sizes
#     what its closure holds                         the same for all micro-batches, in each step


class CapturedSamples(DispatchMode):
    """Dispatch mode that records each kernel of a function, and sample tensors not passed to it.

    Args:
        leaves: its tensor arguments.
        did: the kernels are added to, with the numbers that Python gives to them.

    Attributes:
        found: the shape of a tensor that it was not given and that belongs to samples; None for
            none, and where forward is not followed.
    """

    supports_higher_order_operators = False

    def __init__(self, leaves: Iterable[Tensor], did: list[Any]) -> None:
        super().__init__()
        self.found: tuple[int, ...] | None = None
        self._did = did
        self._own = {id(one): weakref.ref(one) for one in leaves}  # or all of it would stay
        modes = _get_current_dispatch_mode_stack()
        self._follow = next((mode for mode in modes if isinstance(mode, Follow)), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel."""
        kwargs = kwargs or {}
        self._did.append((func, scalars(func, args, kwargs)))
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor) and self._is_of_samples(one):
                self.found = tuple(one.shape)
        result = func(*args, **kwargs)
        made = (one for one in tree_leaves(result) if isinstance(one, Tensor))
        self._own.update((id(one), weakref.ref(one)) for one in made)
        return result

    def _is_of_samples(self, one: Tensor) -> bool:
        own = self._own.get(id(one))
        if self._follow is None or (own is not None and own() is one):
            return False
        return self._follow.masks.of(one) is not None

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call, and refuse samples that are not among its arguments.

        Raises:
            LossError: it computes with samples that it was not given.
        """
        try:
            with self:
                return call()
        finally:
            if self.found is not None:  # an error of shapes follows from it
                raise LossError(
                    "a coupled function must get the rows that it computes with as arguments, and "
                    f"{name} reads a tensor of shape {self.found} which forward has made of some "
                    "of the samples (through a closure or an attribute): pass the rows as an "
                    "argument, and compute means, counts and the like inside of the function"
                )


def held(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function holds: closure, defaults, arguments of a partial.

    Args:
        fn: a function, a method, a `functools.partial`; anything else holds nothing that shows.

    Yields:
        The name and the value: numbers, words, tensors and arrays; none of other types, which are
        the same object for all or made anew for each.
    """
    visited: set[int] = set()
    waiting = [("", fn)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, FunctionType | MethodType | partial):
            if id(value) not in visited:
                visited.add(id(value))
                waiting += _parts(value)
            continue
        for path, leaf in pytree.leaves(value):
            if isinstance(leaf, Tensor | np.ndarray | int | float | complex | str | bytes):
                yield f"{name}{path}", leaf


def _parts(fn: Any) -> list[tuple[str, Any]]:
    if isinstance(fn, partial):
        return [("", fn.func), ("args", fn.args), ("keywords", fn.keywords)]
    if isinstance(fn, MethodType):
        return [("", fn.__func__)]
    found = [("defaults", fn.__defaults__ or ()), ("defaults", fn.__kwdefaults__ or {})]
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # a name that has no value yet
            continue
    return found
