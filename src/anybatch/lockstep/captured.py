"""Tensors and numbers that a coupled function reads without getting them as arguments.

It is called once, with the rows of all. Other values that it reads, through a closure or an
attribute, are those of the micro-batch that happens to call it, and the result does not show it.

    a tensor that forward has made of samples      found where forward is followed
    numbers in its kernels (``1 / len(rows)``)     the same in two inspections of different sizes
    what its closure holds                         the same for all micro-batches, in each step
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from anybatch.core import pytree
from anybatch.core.modules import DispatchMode
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
        return self._follow.masks.of(one) is not None

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
