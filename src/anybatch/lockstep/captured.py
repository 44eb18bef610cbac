"""Tensors and numbers that a coupled function reads without getting them as arguments.

It is called once, with the rows of all. Other values that it reads, through a closure or an
attribute, are those of the micro-batch that happens to call it, and the result does not show it.

    a tensor that forward has made of samples      found where forward is followed
    numbers in its kernels (``1 / len(rows)``)     the same in two inspections of different sizes
    what its closure holds                         the same for all micro-batches, in each step
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from anybatch.core import pytree
from anybatch.core.modules import DispatchMode
from anybatch.core.python_state import SMALL, WRITTEN, memory_of
from anybatch.core.reached import (
    CONTAINERS,
    HOLDERS,
    MANY,
    Relation,
    attributes,
    module_of,
    named,
    names_of,
    of_library,
    reached,
    stores_in_attributes,
)
from anybatch.errors import LossError
from anybatch.execution.proof.follow import Follow
from anybatch.execution.proof.places import scalars


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
        return self._follow.has_samples(one)

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call, and refuse samples that are not among its arguments."""
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


VALUES = (int, float, complex, str, bytes)
CODE = (FunctionType, *HOLDERS)


def held(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function holds or names: closure, defaults, globals, attributes.

    Args:
        fn: a function, a method, a `functools.partial`, an object that is called.

    Yields:
        The name and the value: numbers, words, tensors and arrays, but of attributes that the code
        names no tensors; none of other types, which are the same object for all or made anew for
        each.
    """
    names, owners = set[str](), dict[int, tuple[str, Any]]()
    visited, waiting = set[Any](), [("", fn, True)]
    while waiting:
        name, value, entire = waiting.pop()
        if isinstance(value, CODE):
            waiting += _held_by(value, names) if id(value) not in visited else ()
            visited.add(id(value))
            continue
        if _has_names(value):
            owners[id(value)] = name, value
        for path, leaf in pytree.leaves([*value] if isinstance(value, deque) else value):
            if isinstance(leaf, VALUES) or (entire and isinstance(leaf, Tensor | np.ndarray)):
                yield f"{name}{path}", leaf
            if isinstance(leaf, str):
                names.add(leaf)  # getattr(options, "power")
            elif isinstance(leaf, WRITTEN) and memory_of(leaf) <= SMALL:
                own = leaf.tobytes() if isinstance(leaf, np.ndarray) else bytes(leaf)
                yield f"{name}{path}, its values", own
            elif isinstance(leaf, (*CODE, deque)):
                waiting.append((f"{name}{path}", leaf, entire))
        for name, owner in () if waiting else [*owners.values()]:
            waiting += _named_in(name, owner, names, visited)


def _is_data(value: Any) -> bool:
    return isinstance(value, CONTAINERS) and len(value) > MANY


def _has_names(value: Any) -> bool:
    """Say whether a value has attributes that a user's code may name."""
    if isinstance(value, ModuleType):
        return not of_library(value.__name__)
    cls: type = value if isinstance(value, type) else type(value)
    return not of_library(cls.__module__) or stores_in_attributes(cls)


Waiting = list[tuple[str, Any, bool]]
"""Names and values, and whether tensors among them count."""


def _held_by(function: Any, names: set[str]) -> Waiting:
    """Return the values and globals of a function; add the names of these to `names`."""
    found = [one for one in reached(function) if one.link is not Relation.ATTRIBUTE]
    if isinstance(function, FunctionType):
        file = function.__code__.co_filename
        if not of_library(module_of(function), file):
            own = names_of(function.__code__, texts=True)
            names |= own
            found += [one for one in named(function, own) if not _is_data(one.value)]
    return [(one.name, one.value, True) for one in found]


def _named_in(path: str, owner: Any, names: set[str], visited: set[Any]) -> Waiting:
    """Return the attributes of an object that code names, and the methods that it runs."""
    found: Waiting = []
    of_class = owner if isinstance(owner, type) else type(owner)
    runs = names | {"forward" if isinstance(owner, nn.Module) else "__call__"}
    for cls in of_class.__mro__:
        own = {} if of_library(cls.__module__) else vars(cls)
        found += [(f"{path}.{n}", own[n], False) for n in sorted(runs & own.keys())]
    every = {} if isinstance(owner, type) else attributes(owner)
    found += [(f"{path}.{n}", every[n], False) for n in sorted(names & every.keys())]
    new = [x for x in found if (id(owner), x[0]) not in visited and not _is_data(x[1])]
    visited.update((id(owner), one[0]) for one in new)
    return new
