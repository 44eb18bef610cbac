"""Python state that a loss function has: snapshot, comparison, restore.

torch tracks tensors. Counts, lists and other state of a loss are in Python: in attributes of the
loss and of objects that it uses, in cells of closures, in globals, in lists and dicts, in a
generator of random numbers. A loss that changes such state must be called once a step, on the full
batch; one that reads values that forward has stored on the model reads those of the last
micro-batch only. Both are found by comparison: every place that the functions can reach is listed
once, from their code, and its content is compared around each call.

    start ── forward ── changed here and read by the loss: refused
                  └── loss ── changed here: the loss is taken as coupled, and called once

Not listed are the globals of libraries, extension types, and objects looked up by name at run time
(``globals()``, a registry). State in such a place is found by its effect
(`anybatch.loss.calls`).
"""

from __future__ import annotations

import dis
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import _lru_cache_wrapper, partial
from io import IOBase
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch.core.modules import HOOKS, Modules, walk
from anybatch.core.reached import (
    ARRAYS,
    CONTAINERS,
    HOLDERS,
    MANY,
    SPECIAL,
    Relation,
    attributes,
    classes,
    module_of,
    names_of,
    namespace,
    of_library,
    reached,
    remembered,
    stores_in_attributes,
)
from anybatch.loss.holders import (
    ATOMS,
    SMALL,
    ArrayPlace,
    AttributesPlace,
    Change,
    Container,
    Depth,
    Place,
    Random,
    TensorPlace,
    Writes,
)
from anybatch.loss.replay import read_values
from anybatch.memory.fakes import is_fake

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

MOST = 20_000
"""Values that are followed; a function that reaches more holds a program, not state."""

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

Snapshot = list[Any]
"""The contents of every place, in their order."""


DERIVATIVES = {"grad", "backward", "autograd", "jacobian", "hessian", "hvp", "vhp", "vjp", "jvp"}
"""Names of torch's functions, and of a module of these, that differentiate."""


class LossState:
    """Every place where functions can have state.

    Args:
        functions: a loss, as the user wrote it.
        model: the model; its modules are compared, without their code. None (default) for none.

    Attributes:
        iterators: those of the functions, which cannot be restored.
        modules: the modules that they reach and that are not the model's, with paths.
        called: the model's modules that they reach, with paths; a call may move their buffers.
        caches: functions that remember their results.
        written_by_person: some code that they run is in no library.
        names_grad: some of it names an attribute `grad`.
        differentiates: some of it names a derivative.
    """

    def __init__(self, functions: Iterable[Any], model: nn.Module | None = None) -> None:
        self._functions, self._model = tuple(functions), model
        listing = _Listing(model)
        for fn in self._functions:
            listing.root(fn)
        listing.run()
        self._places = listing.places
        self._tensors = [place for place in self._places if isinstance(place, TensorPlace)]
        self.iterators, self.modules = listing.iterators, listing.modules
        self.called = listing.called
        self.caches = listing.caches
        self.written_by_person = listing.own
        self.names_grad = "grad" in listing.names
        self.differentiates = not listing.names.isdisjoint(DERIVATIVES)
        self._listed = self.snapshot()

    def __reduce__(self) -> Any:
        return LossState, (self._functions, self._model)

    def current(self) -> LossState:
        """Return the places as they are listed now: others, where they hold other objects."""
        for place, was in zip(self._places, self._listed, strict=True):
            if not place.same(was) and _leads_on(place, was):
                return LossState(self._functions, self._model)
        return self

    def still(self, values: list[Any]) -> bool:
        """Say whether no call of the functions changes state: they are torch's, or call these only.

        Args:
            values: list for those that the function reads. It remains empty of several functions,
                and where a call may change state.
        """
        values.clear()
        for fn in self._functions:
            if not read_values(fn, values):
                values.clear()
                return False
        if len(self._functions) > 1:
            values.clear()
        return True

    def snapshot(self, depth: Depth = Depth.QUICK) -> Snapshot:
        """Return the content of every place."""
        return [place.copy(depth) for place in self._places]

    def __bool__(self) -> bool:
        return bool(self._places or self.iterators or self.caches)

    def changes(self, since: Snapshot, *, drawn: bool = True) -> list[Change]:
        """Return the places with content other than in a snapshot.

        Args:
            since: the snapshot.
            drawn: generators of random numbers count. Default True.
        """
        return [
            change
            for place, was in zip(self._places, since, strict=True)
            if (drawn or not isinstance(place, Random)) and not place.same(was)
            for change in place.changes(was)
        ]

    def restore(self, snapshot: Snapshot) -> None:
        """Restore every place from a snapshot."""
        for place, was in zip(self._places, snapshot, strict=True):
            if not place.same(was):
                place.restore(was)

    def tensors(self) -> list[TensorPlace]:
        """Return the places that are tensors."""
        return self._tensors

    @contextmanager
    def large_restored(self) -> Iterator[None]:
        """Restore large tensors that the body writes to; snapshots copy those from then on."""
        large = [p for p in self.tensors() if p.tensor.nbytes > SMALL and not is_fake(p.tensor)]
        if not large:
            yield
            return
        writes = Writes((place.tensor for place in large), keep=True)
        try:
            with writes:
                yield
        finally:
            writes.put_back()
            for place in large:
                place.written |= writes.wrote(place.tensor)

    @contextmanager
    def uncounted(self, snapshot: Snapshot) -> Iterator[None]:
        """Let a snapshot take in writes of the body that are undone: they count as writes."""
        pairs = list(enumerate(zip(self._places, snapshot, strict=True)))
        tensors = [i for i, (p, was) in pairs if isinstance(p, TensorPlace) and p.same(was)]
        yield
        for i in tensors:
            snapshot[i] = self._places[i].copy(Depth.THOROUGH)

    def trained(self) -> set[int]:
        """Return the ids of the parameters of the model."""
        return set() if self._model is None else set(map(id, self._model.parameters()))

    def moving(self) -> set[int]:
        """Return the ids of the tensors that a call may move: a parameter that learns is none."""
        if not self._tensors:
            return set()
        every = [place.tensor for place in self._tensors]
        return {id(tensor) for tensor in every if not tensor.requires_grad}


def _leads_on(place: Any, was: Any) -> bool:
    """Say whether a place holds an object now that was not followed."""
    if isinstance(place, Place):
        return not isinstance(place.copy(), (*ATOMS, Tensor))
    if not isinstance(place, Container) or type(was) is int:
        return False
    held = place.held
    before = set(map(id, dict.values(was) if isinstance(was, dict) else was))
    return any(
        id(value) not in before and not isinstance(value, (*ATOMS, Tensor))
        for value in (dict.values(held) if isinstance(held, dict) else held)
    )


class _Listing:
    """One walk from functions to the places that they reach."""

    def __init__(self, model: nn.Module | None) -> None:
        self.places: list[Any] = []
        self.iterators: list[str] = []
        self.caches: list[Any] = []
        self.modules: Modules = []
        self.called: Modules = []
        self.own = False
        self._sets = False
        self._bare: list[tuple[FunctionType, str]] = []
        self._of_model = {id(m) for _, m in walk(model)} if model is not None else set()
        self._alive: list[Any] = []
        self._visited: set[Any] = set()
        self._names: set[str] = set()
        self._bearers: dict[int, Any] = {}
        self._open: list[tuple[Any, str]] = []
        self._ahead: list[tuple[Any, str, tuple[Any, str] | None]] = []

    @property
    def names(self) -> set[str]:
        """The names that the code of the functions uses."""
        return self._names

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
        if self._bearers:  # one place of all: a steady step asks each place
            self.places.append(AttributesPlace([*self._bearers.values()]))
        if self._sets:  # a function may get its first attribute in a call
            self.places += [Container(vars(fn), path, fn, None) for fn, path in self._bare]

    def _follow(self, value: Any, path: str, via: tuple[Any, str] | None) -> None:
        if isinstance(value, ATOMS):
            if type(value) is str and value.isidentifier():
                self._names.add(value)  # getattr(model, name)
            return
        if id(value) in self._visited or len(self._visited) > MOST:
            return
        self._visited.add(id(value))
        self._alive.append(value)
        if isinstance(value, Tensor | np.ndarray):
            self._values(value, path, via)
        elif isinstance(value, CONTAINERS):
            self._container(value, path, via)
        elif isinstance(value, tuple | frozenset):
            self._ahead += [(one, path, via) for one in value]
        elif isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, FunctionType):
            self._function(value, path)
        elif isinstance(value, HOLDERS):
            self._holder(value, path, via)
        else:
            self._other(value, path)

    def _values(self, value: Any, path: str, via: tuple[Any, str] | None) -> None:
        if isinstance(value, Tensor):
            if not is_lazy(value) and not value.is_inference():
                self.places.append(TensorPlace(value, path, via))
                self._bearers[id(value)] = value
        else:
            self.places.append(ArrayPlace(value, path, via))

    def _container(self, value: Any, path: str, via: tuple[Any, str] | None) -> None:
        self.places.append(Container(value, path, None, via))
        if len(value) > MANY:
            return  # data, not a log
        named = isinstance(value, dict)
        for key, one in dict.items(value) if named else enumerate(value):
            self._ahead.append((one, f"{path}[{key!r}]", via))

    def _holder(self, value: Any, path: str, via: tuple[Any, str] | None) -> None:
        if isinstance(value, partial):
            self._bearers[id(value)] = value
        elif isinstance(value, _lru_cache_wrapper):
            self.caches.append(value)
        elif isinstance(value, ContextVar):
            self.places.append(Place(value, value.name, path))
        for link, name, one, _ in reached(value):
            at = name or path or ("self" if link is Relation.OBJECT else "")
            self._ahead.append((one, at, via if isinstance(value, BuiltinFunctionType) else None))
        self._ahead += [(one, path, None) for one in remembered(value)]

    def _other(self, value: Any, path: str) -> None:
        if isinstance(value, ModuleType):
            self._python_module(value, path)
        elif isinstance(value, type):
            if not of_library(value.__module__):
                self._open.append((value, path))
        elif not self._extension(value, path):
            self._instance(value, path)

    def _extension(self, value: Any, path: str) -> bool:
        """List an object with its state in C; return whether it is one."""
        if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
            self.places.append(Random(value, path))
        elif isinstance(value, Iterator):
            if not isinstance(value, IOBase):
                self.iterators.append(path)
        elif isinstance(value, ARRAYS):
            self.places.append(ArrayPlace(value, path, None))
        else:
            return False
        return True

    def _instance(self, value: Any, path: str) -> None:
        if not of_library(type(value).__module__):
            self.own = True
            self._object(value, path)
        elif stores_in_attributes(type(value)):
            self._library_object(value, path)
        elif type(value).__module__.split(".")[0] == "anybatch":  # it holds what a person gave
            self._ahead += [(one, path, None) for one in namespace(value).values()]

    def _python_module(self, module: ModuleType, path: str) -> None:
        name = module.__name__
        if name in ("random", "numpy.random") or (name == "numpy" and "random" in self._names):
            if "random" not in self._visited:
                self._visited.add("random")
                self.places.append(Random(None, "random" if name == "random" else "numpy.random"))
        elif name == "os" and "environ" in self._names:
            self._ahead.append((module.environ, f"{path}.environ", None))
        elif not of_library(name, getattr(module, "__file__", None) or ""):
            self._open.append((module, path))

    def _function(self, fn: FunctionType, path: str) -> None:
        module = module_of(fn)
        library = of_library(module, fn.__code__.co_filename)
        if library and module.split(".")[0] in ("torch", "numpy"):
            self._names.add(fn.__name__)  # code may have another name for it
            compiled = getattr(fn, "_torchdynamo_orig_callable", None)
            self._ahead.append((compiled, path, None))
            return
        dot = f"{path}." if path else ""
        for link, name, one, holder in reached(fn):
            if link is Relation.ATTRIBUTE:
                self._ahead.append((one, dot + name, (fn, name)))
            elif link is not Relation.CELL or id(holder) not in self._visited:
                self._ahead.append((one, name, None))
                if link is Relation.CELL:
                    self._visited.add(id(holder))
                    self.places.append(Place(holder, name, name))
        self.own |= not library
        if vars(fn):
            self.places.append(Container(vars(fn), dot + fn.__name__, fn, None))
        elif not library:
            self._bare.append((fn, dot + fn.__name__))
        if not library:  # whose globals are its caches
            self._code(fn)

    def _code(self, fn: FunctionType) -> None:
        found = names_of(fn.__code__, texts=True)
        self._names |= found
        self._sets |= _sets(fn.__code__)
        for name in found & fn.__globals__.keys():
            self._name(fn.__globals__, name, name)
        for name in _made(fn.__code__) - fn.__globals__.keys():
            self.places.append(Place(fn.__globals__, name, name))

    def _name(self, holder: Any, name: str, path: str) -> None:
        """Follow the value of a name in a module or a class."""
        if (id(holder), name) in self._visited:
            return
        self._visited.add((id(holder), name))
        value = holder[name] if type(holder) is dict else vars(holder)[name]
        fixed = isinstance(value, FunctionType | ModuleType | type | BuiltinFunctionType)
        # To read a descriptor runs code of its own.
        if not fixed and not (isinstance(holder, type) and hasattr(type(value), "__get__")):
            self.places.append(Place(holder, name, path))
        self._ahead.append((value, path, None))

    def _library_object(self, value: Any, path: str) -> None:
        """Follow all that an object of a library holds: its code is not read for names."""
        held = namespace(value)
        if type(held) is dict:
            self.places.append(Container(held, path, value, None))
            self._ahead += [(one, f"{path}.{n}", (value, n)) for n, one in held.items()]

    def _object(self, value: Any, path: str) -> None:
        held = namespace(value)
        if type(held) is dict:
            self.places.append(Container(held, path, value, None))
        self._open.append((value, path))
        self._ahead.append((type(value), type(value).__name__, None))

    def _module(self, module: nn.Module, path: str) -> None:
        ours = id(module) in self._of_model
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if any(t is not None and is_lazy(t) for t in tensors):
            return
        held = vars(module)
        self.places.append(Container(held, path, module, None))
        (self.called if ours else self.modules).append((path, module))
        if not ours:
            buffers = held.get("_buffers")
            for named in (buffers, held.get("_parameters")):
                if type(named) is dict and named:
                    self.places.append(Container(named, path, module, None))
                    self._ahead += [(t, f"{path}.{n}", (module, n)) for n, t in named.items()]
        for hooks in () if ours else HOOKS:
            self._ahead += [(hook, path, None) for hook in getattr(module, hooks, {}).values()]
        self._bearers.update((id(t), t) for t in tensors if t is not None)
        inner = [(n, m) for n, m in module._modules.items() if m is not None]
        self._ahead += [(m, f"{path}.{n}", None) for n, m in inner]
        if not of_library(type(module).__module__):
            self.own |= not ours
            own = [(n, one) for n, one in held.items() if n not in OF_TORCH]
            self._ahead += [(one, f"{path}.{n}", (module, n)) for n, one in own]
            for cls in type(module).__mro__:
                if not ours and "forward" in vars(cls) and not of_library(cls.__module__):
                    self._ahead.append((vars(cls)["forward"], path, None))
        self._open.append((module, path))

    def _named(self, value: Any, path: str) -> None:
        if isinstance(value, ModuleType):
            for name in self._names & vars(value).keys():
                self._name(vars(value), name, f"{path}.{name}")
        elif isinstance(value, type):
            for cls in classes(value):
                if not of_library(cls.__module__):
                    for name in vars(cls).keys() & (self._names | SPECIAL):
                        self._name(cls, name, f"{path}.{name}")
        else:
            self._attributes(value, path)

    def _attributes(self, value: Any, path: str) -> None:
        if isinstance(value, nn.Module):  # what it holds has been followed
            for cls in type(value).__mro__:
                own = set[str]() if of_library(cls.__module__) else vars(cls).keys() - {"forward"}
                for name in own & self._names:
                    self._name(cls, name, f"{path}.{name}")
            return
        held = namespace(value)
        for name, one in attributes(value).items():
            if name in self._names and (id(value), name) not in self._visited:
                self._visited.add((id(value), name))
                if name not in held:  # a slot
                    self.places.append(Place(value, name, f"{path}.{name}"))
                self._ahead.append((one, f"{path}.{name}", (value, name)))


def _sets(code: CodeType) -> bool:
    """Say whether a function, or one inside it, gives an attribute to an object."""
    inner = [_sets(one) for one in code.co_consts if isinstance(one, CodeType)]
    words = {"setattr", "vars", "__dict__"} & {*code.co_names}
    return bool(words or any(i.opname == "STORE_ATTR" for i in dis.get_instructions(code))) or any(
        inner
    )


def _made(code: CodeType) -> set[str]:
    """Return the global names that a function, or one inside it, assigns."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    return found.union(*(_made(one) for one in code.co_consts if isinstance(one, CodeType)))
