"""Snapshot and restore of the Python state that a rehearsal moves, and its comparison.

A copy of a model shares its hooks, and what these close over, with the original; a loss is a plain
function with state of its own. torch tracks neither. So reachable state is recorded as references,
and restored after the dry run: the attributes of modules and other objects, cells of closures,
global names, and the contents of lists, dicts and sets.

    hook ──closure──> list [a, b]        rehearsed: [a, b, fake, fake]        put back: [a, b]
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import product
from math import prod
from operator import is_
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from anybatch.core.modules import HOOKS
from anybatch.core.reached import (
    ARRAYS,
    CONTAINERS,
    HOLDERS,
    MANY,
    NONE,
    Relation,
    classes,
    installed,
    module_of,
    names_of,
    namespace,
    of_library,
    reached,
    slots,
)

WRITTEN = (*ARRAYS, np.ndarray)
SMALL = 64 * 1024
"""Bytes of an array that is copied."""

PLAIN = {
    *(list, dict, OrderedDict, defaultdict, set, deque),
    *(int, float, bool, str, tuple, NoneType, Tensor),
}

ATOMS = {int, float, bool, str, tuple, NoneType}
FUNCTIONS = (FunctionType, *HOLDERS)
REACHES = (*FUNCTIONS, *CONTAINERS)
"""Values of a class in which others are reached."""
BEYOND = (nn.Module, type)
"""Their own attributes are recorded elsewhere. Tuples, as a dry run asks 50,000 times."""


class PythonState:
    """Snapshot of the Python state that functions and objects hold.

    Attributes:
        held: the containers that were noted.
    """

    def __init__(self) -> None:
        self.held: list[Any] = []
        self._visited: set[Any] = set()
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
        if id(fn) in self._visited or isinstance(fn, BEYOND):
            return
        self._visited.add(id(fn))
        if not isinstance(fn, FUNCTIONS):
            if callable(fn):
                self._object(fn)
            return
        if isinstance(fn, FunctionType) and module_of(fn).startswith("torch."):
            return
        for link, _, value, holder in reached(fn):
            if link is Relation.CELL and value is not NONE:
                self._undo.append(partial(setattr, holder, "cell_contents", value))
            if link is not Relation.ATTRIBUTE:
                self._value(value)
        if isinstance(fn, FunctionType):
            self.container(fn.__dict__)
            self._globals(fn)

    def container(self, held: Any) -> None:
        """Record the entries of a list, dict or set, and those of the containers in it."""
        if id(held) in self._visited:
            return
        self._visited.add(id(held))
        was = entries_of(held)
        self.held.append(held)
        self._undo.append(partial(fill, held, was))
        if len(was) > MANY:
            return  # data, not a log
        for inside in was.values() if isinstance(was, dict) else was:
            self._inside(inside)

    def put_back(self) -> None:
        """Make all of it as it was."""
        for undo in self._undo:
            undo()

    def _class(self, cls: type) -> None:
        """Record the plain attributes of a user's class."""
        for base in classes(cls):
            own = not base.__module__.startswith(("torch.", "builtins", "anybatch."))
            if own and id(base) not in self._visited:
                self._visited.add(id(base))
                was = dict(vars(base))
                self._undo.append(partial(_fill_class, base, was))
                for value in was.values():
                    if type(value) not in ATOMS and isinstance(value, REACHES):
                        self._value(value)

    def _globals(self, fn: FunctionType) -> None:
        names = names_of(fn.__code__)
        for name in names & fn.__globals__.keys():
            self._global(fn.__globals__, name, names)

    def _global(self, held: dict[str, Any], name: str, names: frozenset[str]) -> None:
        """Record the value of a global name, and the state of a function, class, file or object.

        A table that a helper keeps by size would hold tensors without data
        (test_tables_of_helpers_hold_no_fakes).
        """
        value = held[name]
        if isinstance(value, ModuleType):
            if not of_library(value.__name__) and (id(value), name) not in self._visited:
                self._visited.add((id(value), name))
                for inside in names & vars(value).keys():
                    self._global(vars(value), inside, names)
        elif type(value) in PLAIN:
            self._undo.append(partial(held.__setitem__, name, value))
            self._value(value)
        elif isinstance(value, FunctionType) and len(self._visited) < MANY:
            if not of_library(module_of(value)):
                self.function(value)
        elif isinstance(value, type) or (
            not callable(value) and not of_library(type(value).__module__)
        ):
            self._value(value)

    def _value(self, value: Any) -> None:
        if isinstance(value, (*CONTAINERS, *WRITTEN)):
            self._inside(value)
        elif isinstance(value, type):
            if not of_library(value.__module__):
                self._class(value)
        elif callable(value) or isinstance(value, HOLDERS):
            self.function(value)
        elif type(value).__module__ != "builtins" and not isinstance(value, Tensor | nn.Module):
            self._object(value)

    def _inside(self, value: Any) -> None:
        """Record a container, an array, or an object of a user's, that another one holds."""
        if isinstance(value, CONTAINERS):
            self.container(value)
        elif isinstance(value, WRITTEN):
            fixed = isinstance(value, np.ndarray) and not value.flags.writeable
            if memory_of(value) <= SMALL and not fixed:
                with suppress(ValueError):  # one of C with pointers has no copy
                    self._undo.append(partial(write, value, copy(value)))
        elif not (
            callable(value)
            or installed(type(value).__module__)
            or isinstance(value, Tensor | nn.Module)
        ):
            self._object(value)

    def _object(self, value: Any) -> None:
        """Record the attributes of an object, and its slots."""
        self.container(namespace(value))
        if id(value) in self._visited or len(self._visited) > MANY:
            return
        self._visited.add(id(value))
        for name in slots(type(value)):  # type: ignore[arg-type]
            one = getattr(value, name, NONE)
            self._undo.append(partial(_fill_slot, value, name, one))
            self._inside(one)


class Attributes:
    """The plain attributes of a user's modules: few enough to be recorded in every step.

    Args:
        modules: of a model, but torch's own, which store nothing in them.
    """

    OWN = frozenset(vars(nn.Module()))

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._was: list[tuple[Any, Any]] = []
        for module in modules:
            held = module.__dict__
            self._was.append((held, held.copy()))
            for name, value in held.items():
                if name not in self.OWN and isinstance(value, CONTAINERS) and len(value) <= MANY:
                    self._was.append((value, entries_of(value)))

    def put_back(self) -> None:
        """Make them as they were."""
        for held, was in self._was:
            fill(held, was)

    def changed(self) -> bool:
        """Say whether any has another value, or a container of them another entry."""
        return any(_ids(held) != _ids(was) for held, was in self._was)

    def counts(self) -> AttributeCounts:
        """Return the present numbers and logs."""
        return AttributeCounts([held for held, _ in self._was])


def _ids(container: Any) -> list[int]:
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]


NO_ATTRIBUTES = Attributes(())
"""No attributes."""


class AttributeCounts:
    """Numbers and logs in attributes at one time, without other values: they may be activations.

    Args:
        containers: attributes of modules, and the containers in them.
    """

    def __init__(self, containers: Iterable[Any]) -> None:
        every = list(containers)
        self._numbers = [(held, _numbers(held)) for held in every if isinstance(held, dict)]
        self._logs = [(held, list(held)) for held in every if isinstance(held, list | deque)]

    def put_back(self) -> None:
        """Make them as they were."""
        for held, was in self._numbers:
            for key in [key for key in was if dict.get(held, key) != was[key]]:
                held[key] = was[key]  # ``update`` of a Counter adds
        for log, entries in self._logs:
            fill(log, entries)

    def added(self) -> Callable[[], None]:
        """Return a function that adds once more, to numbers and logs, all that was added since."""
        sums = [
            (held, {key: now - was[key] for key, now in _numbers(held).items() if key in was})
            for held, was in self._numbers
        ]
        entries = [(log, appended(log, was) or []) for log, was in self._logs]

        def add() -> None:
            for held, more in sums:
                now = _numbers(held)
                for key in [key for key in more if more[key] and key in now]:
                    held[key] = now[key] + more[key]
            for log, new in entries:
                log.extend(new)

        return add


def appended(log: Any, was: Sequence[Any]) -> list[Any] | None:
    """Return the entries after those of before; None where these are not at its beginning.

    A deque that is full has lost its first ones.
    """
    entries, full = list(log), len(log) == getattr(log, "maxlen", None)
    for lost in range(len(was) + 1 if full else 1):
        left = was[lost:]
        if len(entries) >= len(left) and all(map(is_, entries, left)):
            return entries[len(left) :]
    return None


def _numbers(held: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in dict.items(held) if type(value) in (int, float)}


def entries_of(held: Any) -> Any:
    """Return a copy of a container, of Python's own class.

    A class of a person's may make its keys and values where they are read, and copy itself only
    with arguments (test_a_container_of_a_persons_class_is_left_as_it_is).
    """
    if isinstance(held, dict):
        return dict(dict.items(held))
    if isinstance(held, deque):
        return deque(held, held.maxlen)
    if isinstance(held, list):
        return list.copy(held)
    return set(held) if isinstance(held, set) else held.copy()


def fill(held: Any, was: Any) -> None:
    """Restore the entries of a container; a list or dict with the same entries is not written."""
    same = len(held) == len(was)
    if isinstance(held, dict):
        # Those of its base: a subclass may have other entries where it is read or written
        # (test_a_dict_with_entries_of_its_own_is_left_as_it_is).
        base = OrderedDict if isinstance(held, OrderedDict) else dict
        for key in [key for key in dict.keys(held) if key not in was]:
            base.__delitem__(held, key)
        for key, value in was.items():
            if dict.get(held, key, NONE) is not value:
                base.__setitem__(held, key, value)
    elif isinstance(held, set):
        held.clear()
        held.update(was)
    elif not (same and all(a is b for a, b in zip(held, was, strict=True))):
        held.clear()
        held.extend(was)


def _fill_class(cls: type, was: dict[str, Any]) -> None:
    for name in [name for name in vars(cls) if name not in was and not name.startswith("_")]:
        delattr(cls, name)
    for name, value in was.items():
        if type(value) in PLAIN and vars(cls).get(name) is not value and not name.startswith("__"):
            setattr(cls, name, value)


def memory_of(values: Any) -> int:
    """Return the bytes of an array of numpy, of the standard library, or of C."""
    return int(values.nbytes) if isinstance(values, np.ndarray) else memoryview(values).nbytes


def write(held: Any, was: Any) -> None:
    """Restore the values of an array: of numpy, of the standard library, or of C."""
    if isinstance(held, np.ndarray):
        held[...] = was
    elif isinstance(held, array):  # which may have grown
        held[:] = array(held.typecode, bytes(was))
    elif isinstance(held, bytearray):
        held[:] = was
    else:
        np.frombuffer(held, np.uint8)[:] = np.frombuffer(was, np.uint8)


def _fill_slot(holder: Any, name: str, was: Any) -> None:
    """Restore the value of a slot; one that was empty stays as it is."""
    if was is not NONE and getattr(holder, name, NONE) is not was:
        setattr(holder, name, was)


# Comparison of tensors piece by piece, in few bytes beyond their own.
#
# Outputs of a language model are larger than all else that a few rows hold. A difference of two
# such tensors is one more of them, and a choice of some entries is three, for their places are
# int64. So the largest difference is that of all pieces, of which one is there at a time:
#
#     |a - b|       a piece of a ━━━━┃····┃····┃····        numbers so far: the largest difference,
#                   a piece of b ━━━━┃····┃····┃····        the largest entry

PARTS = 16
"""Pieces of a tensor, at least."""

LEAST = 1 << 12
"""Elements of a piece, of a tensor that has so many: fewer would save no page."""

MOST = 1 << 20
"""Elements of a piece at most: a kernel on more of them is no faster."""

Place = tuple[slice, ...]


def places(shape: Sequence[int], parts: int = PARTS) -> Iterator[Place]:
    """Yield the places of the pieces of a tensor of this shape; they cover it, and do not meet.

    Args:
        shape: of the tensor.
        parts: at least so many pieces, of a large tensor. Default `PARTS`.
    """
    count = prod(shape)
    if not count:
        return
    most = _most(count, parts)
    cut = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= most), 0)
    each = max(1, most // prod(shape[cut + 1 :]))
    for before in product(*map(range, shape[:cut])):
        outer = tuple(slice(at, at + 1) for at in before)
        if cut == len(shape):
            yield outer
        for begin in range(0, shape[cut], each) if cut < len(shape) else ():
            yield (*outer, slice(begin, begin + each))


def _most(count: int, parts: int = PARTS) -> int:
    return min(MOST, max(LEAST, count // parts))


def difference(a: Tensor, b: Tensor, turned: int | None = None) -> tuple[float, float]:
    """Return the largest difference and the largest entry of `a`; only finite entries count.

    Args:
        a: a tensor.
        b: another of its shape.
        turned: the dimension along which `a` is in reverse order. Default None: it is not.
    """
    a, b = a.detach(), b.detach()
    found = _none(a), _none(a)  # they stay on the device until all pieces are done
    for place in places(b.shape):
        found = _largest(found, _part(a, place, turned), b[place])
    return float(found[0]), float(found[1])


def rehearse_difference(b: Tensor) -> None:
    """Allocate as `difference` does for two tensors like this one, by the same kernels."""
    if not b.numel():
        return
    piece = b.new_empty(min(b.numel(), _most(b.numel())))
    _largest((_none(b), _none(b)), piece, piece)


def _none(a: Tensor) -> Tensor:
    return torch.zeros((), dtype=a.dtype.to_real(), device=a.device)


def _largest(found: tuple[Tensor, Tensor], a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest difference and the largest entry so far, with two pieces more."""
    left_out = (a.isfinite() & b.isfinite()).logical_not_()
    distance = (a - b).abs().masked_fill_(left_out, 0).amax()
    entry = a.abs().masked_fill_(left_out, 0).amax()
    return torch.maximum(found[0], distance), torch.maximum(found[1], entry)


def equal(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors of one shape hold the same numbers."""
    if b.numel() <= MOST:
        return torch.equal(a, b)
    return all(torch.equal(a[place], b[place]) for place in places(b.shape, parts=1))


def _part(tensor: Tensor, place: Place, turned: int | None) -> Tensor:
    """Return the piece at a place, of a tensor in reverse order along a dimension."""
    if turned is None:
        return tensor[place]
    if turned >= len(place):
        return tensor[place].flip(turned)
    size, there = tensor.shape[turned], place[turned]
    mirrored = slice(max(size - there.stop, 0), size - there.start)
    return tensor[(*place[:turned], mirrored, *place[turned + 1 :])].flip(turned)
