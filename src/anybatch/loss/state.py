"""Python state that a loss function has: snapshot, comparison, restore.

torch knows tensors. What a loss counts, appends or remembers lies in Python: in attributes of the
loss and of objects that it uses, in cells of closures, in globals, in lists and dicts, in a
generator of random numbers. A loss that changes such state must be called once a step, on the whole
batch; one that reads what forward has left on the model reads that of the last micro-batch only.
Both are found by comparison: every place that the functions can get at is listed once, from their
code, and its content is compared around each call.

    start ── forward ── changed here and read by the loss: refused
                  └── loss ── changed here: the loss is taken as coupled, and called once

Not listed are the globals of libraries, extension types, and what is found by its name at run time
(``globals()``, a registry, a context variable).
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import _lru_cache_wrapper, partial
from io import IOBase
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.kept import HOOKS, MANY, fill
from anybatch.modules import Modules, walk
from anybatch.rng import Dice
from anybatch.undo import same_values

ATOMS = (int, float, bool, str, bytes, complex, type(None))
CONTAINERS = (dict, list, set, deque)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

MOST = 20_000
"""Values that are followed; a function that reaches more holds a program, not state."""

SMALL = 64 * 1024
"""Bytes of a tensor or an array of which a snapshot may hold a copy."""

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

LIBRARIES = {"torch", "numpy", "anybatch", *sys.stdlib_module_names}
NAMESPACES = ("types", "argparse")
"""Modules of the standard library whose objects are plain attributes."""

_NONE: Any = object()


class Change(NamedTuple):
    """One place whose content is another than it was.

    Attributes:
        path: as the loss writes it.
        owner: the object with an attribute of that name; None where the loss names the place.
        name: of that attribute.
    """

    path: str
    owner: Any
    name: str


class _Container:
    """The content of a list, dict, set or deque, or the attributes of an object."""

    def __init__(self, held: Any, path: str, owner: Any, via: tuple[Any, str] | None) -> None:
        self.held, self.path, self.owner, self.via = held, path, owner, via

    def copy(self) -> Any:
        return self.held.copy() if len(self.held) <= MANY else len(self.held)

    def same(self, was: Any) -> bool:
        held = self.held
        if type(was) is int:
            return len(held) == was
        if len(held) != len(was):
            return False
        if isinstance(held, dict):
            if self.owner is None and held.keys() != was.keys():
                return False
            held, was = held.values(), was.values()
        return all(map(is_, held, was)) or all(map(_same, held, was))

    def changes(self, was: Any) -> Iterator[Change]:
        """Yield what is not as it was; all of a list, which has no names, is one place."""
        if self.owner is None or type(was) is int:
            owner, name = self.via or (None, self.path)
            yield Change(self.path, owner, name)
            return
        held = self.held
        for name in {**held, **was}:
            if not _same(held.get(name, _NONE), was.get(name, _NONE)):
                yield Change(f"{self.path}.{name}", self.owner, name)

    def restore(self, was: Any) -> None:
        held = self.held
        if type(was) is not int:
            fill(held, was)
        elif isinstance(held, list):  # a long one can only have grown
            del held[was:]
        else:
            while len(held) > was and isinstance(held, dict):
                held.popitem()


class _Place:
    """A cell of a closure, a global, an attribute of a class or a slot."""

    owner = None

    def __init__(self, holder: Any, name: str, path: str) -> None:
        self.holder, self.name, self.path = holder, name, path

    def copy(self) -> Any:
        holder = self.holder
        if isinstance(holder, CellType):
            try:
                return holder.cell_contents
            except ValueError:  # nothing yet
                return _NONE
        if type(holder) is dict:
            return holder.get(self.name, _NONE)
        return getattr(holder, self.name, _NONE)

    def same(self, was: Any) -> bool:
        now = self.copy()
        return now is was or _same(now, was)

    def changes(self, was: Any) -> Iterator[Change]:
        del was
        slot = not isinstance(self.holder, CellType | dict | type)
        yield Change(self.path, self.holder if slot else None, self.name)

    def restore(self, was: Any) -> None:
        holder = self.holder
        if isinstance(holder, CellType):
            if was is _NONE:
                del holder.cell_contents
            else:
                holder.cell_contents = was
        elif type(holder) is dict:
            if was is _NONE:
                holder.pop(self.name, None)
            else:
                holder[self.name] = was
        elif was is _NONE:
            delattr(holder, self.name)
        else:
            setattr(holder, self.name, was)


class _Values:
    """The values of a tensor or an array that is written to in place."""

    def __init__(self, tensor: Any, path: str, via: tuple[Any, str] | None) -> None:
        self.tensor, self.path, self.via = tensor, path, via
        self._counts = isinstance(tensor, Tensor)
        self.large = tensor.nbytes > SMALL

    def copy(self) -> Any:
        return (self.tensor._version, None) if self._counts else self.tensor.copy()

    def values(self) -> Any:
        if not self._counts or self.large:
            return self.copy()
        return self.tensor._version, self.tensor.detach().clone()

    def same(self, was: Any) -> bool:
        if self._counts:
            version, values = was
            if self.tensor._version == version:
                return True
            return values is not None and same_values(self.tensor, values)
        return np.array_equal(self.tensor, was, equal_nan=self.tensor.dtype.kind in "fc")

    def changes(self, was: Any) -> Iterator[Change]:
        del was
        owner, name = self.via or (None, self.path)
        yield Change(self.path, owner, name)

    def restore(self, was: Any) -> None:
        if not self._counts:
            self.tensor[...] = was
        elif was[1] is not None:
            with torch.no_grad():
                self.tensor.copy_(was[1])


class _Random:
    """The state of a generator of random numbers, or of Python's and numpy's global ones."""

    def __init__(self, generator: Any, path: str) -> None:
        self.generator, self.path = generator, path

    def copy(self) -> Any:
        generator = self.generator
        if generator is None:
            return Dice.now()
        if isinstance(generator, random.Random):
            return generator.getstate()
        if isinstance(generator, np.random.Generator):
            return generator.bit_generator.state
        return generator.get_state()

    def same(self, was: Any) -> bool:
        now = self.copy()
        if isinstance(was, Dice):
            return bool(now.others_as(was))
        if isinstance(was, Tensor):
            return torch.equal(now, was)
        return repr(now) == repr(was) if isinstance(was, dict) else bool(_tuple(now) == _tuple(was))

    def changes(self, was: Any) -> Iterator[Change]:
        del was
        yield Change(self.path, None, self.path)

    def restore(self, was: Any) -> None:
        generator = self.generator
        if isinstance(was, Dice):
            random.setstate(was.python)
            np.random.set_state(was.numpy)
        elif isinstance(generator, random.Random):
            generator.setstate(was)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = was
        else:
            generator.set_state(was)


def _tuple(state: Any) -> Any:
    return tuple(s.tobytes() if isinstance(s, np.ndarray) else s for s in state)


def _same(a: Any, b: Any) -> bool:
    """Say whether two values are one object, or equal numbers or texts."""
    if a is b:
        return True
    kind = type(a)
    return kind is type(b) and kind in ATOMS and bool(a == b or (a != a and b != b))


Snapshot = list[Any]
"""What every place held, in their order."""


class LossState:
    """Every place where functions can have state.

    Args:
        functions: a loss, as the person gave it.
        model: the model; its modules are compared, and their code is not followed. None (default)
            for none.

    Attributes:
        iterators: what the functions may draw from, and nothing can put back.
        modules: the modules that they reach and that are not the model's, with paths.
        caches: functions that remember their results.
    """

    def __init__(self, functions: Iterable[Any], model: nn.Module | None = None) -> None:
        self._functions, self._model = tuple(functions), model
        listing = _Listing(model)
        for fn in self._functions:
            listing.root(fn)
        listing.run()
        self._places = listing.places
        self.iterators, self.modules = listing.iterators, listing.modules
        self.caches = listing.caches
        self._listed = self.snapshot()

    def __reduce__(self) -> Any:
        return LossState, (self._functions, self._model)

    def current(self) -> LossState:
        """Return the places as they are listed now: others, where they hold other objects."""
        for place, was in zip(self._places, self._listed, strict=True):
            if not place.same(was) and _leads_on(place, was):
                return LossState(self._functions, self._model)
        return self

    def snapshot(self, *, values: bool = False) -> Snapshot:
        """Return what every place holds.

        Args:
            values: small tensors are copied, so that writes to them can be undone. Default False.
        """
        if not values:
            return [place.copy() for place in self._places]
        return [p.values() if isinstance(p, _Values) else p.copy() for p in self._places]

    def __bool__(self) -> bool:
        return bool(self._places or self.iterators or self.caches)

    def changes(self, since: Snapshot, *, drawn: bool = True) -> list[Change]:
        """Return the places whose content is another than in a snapshot.

        Args:
            since: the snapshot.
            drawn: generators of random numbers count. Default True.
        """
        return [
            change
            for place, was in zip(self._places, since, strict=True)
            if (drawn or not isinstance(place, _Random)) and not place.same(was)
            for change in place.changes(was)
        ]

    def restore(self, snapshot: Snapshot) -> None:
        """Make every place hold what it did."""
        for place, was in zip(self._places, snapshot, strict=True):
            if not place.same(was):
                place.restore(was)


def _leads_on(place: Any, was: Any) -> bool:
    """Say whether a place holds an object now that was not followed."""
    if isinstance(place, _Place):
        return not isinstance(place.copy(), (*ATOMS, Tensor))
    if not isinstance(place, _Container) or type(was) is int:
        return False
    held = place.held
    before = set(map(id, was.values() if isinstance(was, dict) else was))
    return any(
        id(value) not in before and not isinstance(value, (*ATOMS, Tensor))
        for value in (held.values() if isinstance(held, dict) else held)
    )


class _Listing:
    """One walk from functions to the places that they reach."""

    def __init__(self, model: nn.Module | None) -> None:
        self.places: list[Any] = []
        self.iterators: list[str] = []
        self.caches: list[Any] = []
        self.modules: Modules = []
        self._of_model = {id(m) for _, m in walk(model)} if model is not None else set()
        self._alive: list[Any] = []
        self._seen: set[Any] = set()
        self._names: set[str] = set()
        self._open: list[tuple[Any, str]] = []
        self._ahead: list[tuple[Any, str, tuple[Any, str] | None]] = []

    def root(self, fn: Any) -> None:
        """Begin at a function; its own name is left out of the paths."""
        name = "" if isinstance(fn, FunctionType | MethodType | partial) else type(fn).__name__
        self._ahead.append((fn, name, None))

    def run(self) -> None:
        """Follow everything; attributes of objects only under names that the code uses."""
        while self._ahead:
            while self._ahead:
                self._follow(*self._ahead.pop())
            for value, path in self._open:
                self._named(value, path)

    def _follow(self, value: Any, path: str, via: tuple[Any, str] | None) -> None:
        if isinstance(value, ATOMS):
            if type(value) is str and value.isidentifier():
                self._names.add(value)  # getattr(model, name)
            return
        if id(value) in self._seen or len(self._seen) > MOST:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, Tensor | np.ndarray):
            self._values(value, path, via)
        elif isinstance(value, CONTAINERS):
            self._container(value, path, via)
        elif isinstance(value, tuple | frozenset):
            self._ahead += [(one, path, via) for one in value]
        elif isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, FunctionType | MethodType | BuiltinFunctionType | partial):
            self._callable(value, path, via)
        else:
            self._other(value, path)

    def _values(self, value: Any, path: str, via: tuple[Any, str] | None) -> None:
        if isinstance(value, Tensor):
            if not is_lazy(value) and not value.is_inference():
                self.places.append(_Values(value, path, via))
        elif value.nbytes <= SMALL and value.dtype.kind != "O":
            self.places.append(_Values(value, path, via))

    def _container(self, value: Any, path: str, via: tuple[Any, str] | None) -> None:
        self.places.append(_Container(value, path, None, via))
        if len(value) > MANY:
            return  # data, not a log
        named = isinstance(value, dict)
        for key, one in value.items() if named else enumerate(value):
            self._ahead.append((one, f"{path}[{key!r}]", via))

    def _callable(self, value: Any, path: str, via: tuple[Any, str] | None) -> None:
        if isinstance(value, partial):
            bound = (value.func, value.args, value.keywords)
            self._ahead += [(one, path, None) for one in bound]
        elif isinstance(value, MethodType):
            self._ahead += [(value.__func__, path, None), (value.__self__, path or "self", None)]
        elif isinstance(value, FunctionType):
            self._function(value, path)
        elif not isinstance(value.__self__, ModuleType | type):  # list.append, random.random
            self._ahead.append((value.__self__, path, via))

    def _other(self, value: Any, path: str) -> None:
        if isinstance(value, GENERATORS):
            self.places.append(_Random(value, path))
        elif isinstance(value, Iterator):
            if not isinstance(value, IOBase):
                self.iterators.append(path)
        elif isinstance(value, ModuleType):
            self._python_module(value, path)
        elif isinstance(value, _lru_cache_wrapper):
            self.caches.append(value)
            self._ahead.append((value.__wrapped__, path, None))
        elif isinstance(value, type):
            if not _of_library(value.__module__):
                self._open.append((value, path))
        elif type(value).__module__ in NAMESPACES or not _of_library(type(value).__module__):
            self._object(value, path)

    def _python_module(self, module: ModuleType, path: str) -> None:
        name = module.__name__
        if name in ("random", "numpy.random") or (name == "numpy" and "random" in self._names):
            if "random" not in self._seen:
                self._seen.add("random")
                self.places.append(_Random(None, "random" if name == "random" else "numpy.random"))
        elif not _of_library(name, getattr(module, "__file__", None) or ""):
            self._open.append((module, path))

    def _function(self, fn: FunctionType, path: str) -> None:
        library = _of_library(fn.__module__ or "", fn.__code__.co_filename)
        if library and (fn.__module__ or "").split(".")[0] in ("torch", "numpy"):
            compiled = getattr(fn, "_torchdynamo_orig_callable", None)
            self._ahead.append((compiled, path, None))
            return
        dot = f"{path}." if path else ""
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                place = _Place(cell, name, name)
                self.places.append(place)
                self._ahead.append((place.copy(), name, None))
        if vars(fn):
            self.places.append(_Container(vars(fn), dot + fn.__name__, fn, None))
            self._ahead += [(one, f"{dot}{n}", (fn, n)) for n, one in vars(fn).items()]
        self._ahead.append((fn.__defaults__ or (), fn.__name__, None))
        self._ahead += [(one, name, None) for name, one in (fn.__kwdefaults__ or {}).items()]
        if library:
            return  # its globals are its caches
        found = _names(fn.__code__)
        self._names |= found
        for name in found & fn.__globals__.keys():
            self._name(fn.__globals__, name, name)

    def _name(self, holder: Any, name: str, path: str) -> None:
        """Follow what has a name in a module or a class."""
        if (id(holder), name) in self._seen:
            return
        self._seen.add((id(holder), name))
        value = holder[name] if type(holder) is dict else vars(holder)[name]
        if isinstance(value, property):
            self._ahead += [(f, path, None) for f in (value.fget, value.fset) if f is not None]
        elif isinstance(value, staticmethod | classmethod):
            self._ahead.append((value.__func__, path, None))
        else:
            fixed = (FunctionType, ModuleType, type, BuiltinFunctionType)
            if not isinstance(value, fixed) and not hasattr(type(value), "__set__"):
                self.places.append(_Place(holder, name, path))
            self._ahead.append((value, path, None))

    def _object(self, value: Any, path: str) -> None:
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            self.places.append(_Container(held, path, value, None))
        self._open.append((value, path))
        self._ahead.append((type(value), type(value).__name__, None))

    def _module(self, module: nn.Module, path: str) -> None:
        ours = id(module) in self._of_model
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if any(t is not None and is_lazy(t) for t in tensors):
            return
        held = vars(module)
        self.places.append(_Container(held, path, module, None))
        if not ours:
            self.modules.append((path, module))
            buffers = held.get("_buffers")
            if type(buffers) is dict and buffers:
                self.places.append(_Container(buffers, path, module, None))
                self._ahead += [(b, f"{path}.{n}", (module, n)) for n, b in buffers.items()]
        for kind in () if ours else HOOKS:
            self._ahead += [(hook, path, None) for hook in getattr(module, kind, {}).values()]
        inner = [(n, m) for n, m in module._modules.items() if m is not None]
        self._ahead += [(m, f"{path}.{n}", None) for n, m in inner]
        if not _of_library(type(module).__module__):
            own = [(n, one) for n, one in held.items() if n not in OF_TORCH]
            self._ahead += [(one, f"{path}.{n}", (module, n)) for n, one in own]
            for cls in type(module).__mro__:
                if not ours and "forward" in vars(cls) and not _of_library(cls.__module__):
                    self._ahead.append((vars(cls)["forward"], path, None))
        self._open.append((module, path))

    def _named(self, value: Any, path: str) -> None:
        """Follow what the code names of a Python module, a class or an object."""
        if isinstance(value, ModuleType):
            for name in self._names & vars(value).keys():
                self._name(vars(value), name, f"{path}.{name}")
        elif isinstance(value, type):
            for cls in value.__mro__:
                if not _of_library(cls.__module__):
                    for name in vars(cls).keys() & (self._names | SPECIAL):
                        self._name(cls, name, f"{path}.{name}")
        else:
            self._attributes(value, path)

    def _attributes(self, value: Any, path: str) -> None:
        module = isinstance(value, nn.Module)
        for cls in type(value).__mro__:
            if _of_library(cls.__module__):
                continue
            if module:  # what it keeps has been followed, and its class has what the code calls
                for name in vars(cls).keys() & self._names:
                    if name != "forward":
                        self._name(cls, name, f"{path}.{name}")
                continue
            slots = vars(cls).get("__slots__", ())
            for name in {slots} if isinstance(slots, str) else set(slots) & self._names:
                if (id(value), name) not in self._seen:
                    self._seen.add((id(value), name))
                    place = _Place(value, name, f"{path}.{name}")
                    self.places.append(place)
                    self._ahead.append((place.copy(), place.path, (value, name)))
        held: dict[str, Any] = {} if module else getattr(value, "__dict__", {})
        for name in self._names & held.keys():
            if (id(value), name) not in self._seen:
                self._seen.add((id(value), name))
                self._ahead.append((held[name], f"{path}.{name}", (value, name)))


SPECIAL = frozenset(
    "__call__ __getattr__ __setattr__ __getitem__ __setitem__ __iter__ __enter__ __exit__ __len__ "
    "__contains__ __float__ __int__ __bool__ __add__ __radd__ __mul__ __rmul__ __iadd__".split()
)
"""Methods that code calls without a name."""


def _of_library(module: str, file: str = "") -> bool:
    return module.split(".", maxsplit=1)[0] in LIBRARIES or "site-packages" in file


def _names(code: CodeType) -> set[str]:
    """Return the names and the texts like names in a function, and in those inside it."""
    found = set(code.co_names)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            found |= _names(one)
        elif type(one) is str and one.isidentifier():
            found.add(one)
    return found
