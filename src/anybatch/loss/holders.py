"""Places that hold Python state: their content, a comparison with it, and putting it back.

A place is compared around every call of a loss, so a steady step compares only identities, lengths,
and torch's count of writes. A first step and a dry run compare values, too: a write through
``.data`` or an array of numpy moves no count, and an entry of a long list no length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import IntEnum
from itertools import starmap
from operator import is_
from types import CellType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.core.modules import is_spread, storage_of
from anybatch.core.python_state import entries_of, fill, memory_of, write
from anybatch.core.reached import MANY, NONE, content
from anybatch.core.rng import RNGState
from anybatch.core.transaction import same_values
from anybatch.memory.fakes import is_fake, paged
from anybatch.memory.meter import written_by

ATOMS = (int, float, bool, str, bytes, complex, type(None))

SMALL = 64 * 1024
"""Bytes of a tensor or an array whose values every step may copy."""

LARGE = 256 * 1024**2
"""Bytes of an array whose values a first step or a rehearsal may copy."""


class Depth(IntEnum):
    """Depth of a snapshot of a place: enough to detect a change, to undo one, or every value."""

    QUICK = 0
    UNDO = 1
    THOROUGH = 2


class Change(NamedTuple):
    """Place with changed content.

    Attributes:
        path: as the loss writes it.
        owner: the object with an attribute of that name; None where the loss names the place.
        name: of that attribute.
    """

    path: str
    owner: Any
    name: str


class StatePlace:
    """A place with content; a change of it is one of the place."""

    owner: Any = None
    path: str
    via: tuple[Any, str] | None = None

    def changes(self, was: Any) -> Iterator[Change]:
        """Yield the place."""
        del was
        owner, name = self.via or (None, self.path)
        yield Change(self.path, owner, name)


class Container(StatePlace):
    """The content of a list, dict, set or deque, or the attributes of an object."""

    def __init__(self, held: Any, path: str, owner: Any, via: tuple[Any, str] | None) -> None:
        self.held, self.path, self.owner, self.via = held, path, owner, via

    def copy(self, depth: Depth) -> Any:
        """Return the content; of a long one only the length, where not every value is noted."""
        every = depth is Depth.THOROUGH or len(self.held) <= MANY
        return entries_of(self.held) if every else len(self.held)

    def same(self, was: Any) -> bool:
        """Return whether the content is unchanged."""
        held = self.held
        if type(was) is int:
            return len(held) == was
        if isinstance(held, dict):
            if self.owner is None and dict.keys(held) != was.keys():
                return False
            held, was = dict.values(held), was.values()
        if len(held) != len(was):
            return False
        return all(map(is_, held, was)) or all(map(same_value, held, was))

    def changes(self, was: Any) -> Iterator[Change]:
        """Yield each changed place; a list has no names and is one place."""
        if self.owner is None or type(was) is int:
            yield from super().changes(was)
            return
        held = entries_of(self.held)
        for name in {**held, **was}:
            if not same_value(held.get(name, NONE), was.get(name, NONE)):
                yield Change(f"{self.path}.{name}", self.owner, name)

    def restore(self, was: Any) -> None:
        """Restore the content."""
        held = self.held
        if type(was) is not int:
            fill(held, was)
        elif isinstance(held, list):  # a long one can only have grown
            del held[was:]
        else:
            while len(held) > was and isinstance(held, dict):
                held.popitem()


class AttributesPlace:
    """The attributes of tensors and of `functools.partial`: few have any.

    They are compared where values are, in a first step and in a rehearsal: a model may have
    thousands of tensors.
    """

    owner = None

    def __init__(self, holders: Sequence[Any]) -> None:
        self.holders = holders

    def copy(self, depth: Depth) -> list[dict[str, Any]] | None:
        """Return the attributes of each holder; None where values are not recorded."""
        return [vars(one).copy() for one in self.holders] if depth is Depth.THOROUGH else None

    def same(self, was: list[dict[str, Any]] | None) -> bool:
        """Return whether the attributes are unchanged, as far as they were recorded."""
        return was is None or all(map(_same_attributes, map(vars, self.holders), was))

    def changes(self, was: list[dict[str, Any]]) -> Iterator[Change]:
        """Yield changed attributes by name only: reads of a tensor's attributes are not traced."""
        for now, before in zip(map(vars, self.holders), was, strict=True):
            for name in {**now, **before}:
                if not same_value(now.get(name, NONE), before.get(name, NONE)):
                    yield Change(name, None, name)

    def restore(self, was: list[dict[str, Any]]) -> None:
        """Give each the attributes that it had."""
        for one, before in zip(self.holders, was, strict=True):
            fill(vars(one), before)


def _same_attributes(now: Mapping[str, Any], was: Mapping[str, Any]) -> bool:
    return now.keys() == was.keys() and all(same_value(now[name], was[name]) for name in now)


class Place:
    """A cell of a closure, a global, an attribute of a class or a slot."""

    owner = None

    def __init__(self, holder: Any, name: str, path: str) -> None:
        self.holder, self.name, self.path = holder, name, path

    def copy(self, depth: Depth = Depth.QUICK) -> Any:
        """Return the value, or `NONE`."""
        del depth
        holder = self.holder
        if isinstance(holder, CellType):
            return content(holder)
        if type(holder) is dict:
            return holder.get(self.name, NONE)
        if isinstance(holder, ContextVar):
            return holder.get(NONE)
        return getattr(holder, self.name, NONE)

    def same(self, was: Any) -> bool:
        """Return whether the value is unchanged."""
        now = self.copy()
        return now is was or same_value(now, was)

    def changes(self, was: Any) -> Iterator[Change]:
        """Yield the place."""
        del was
        slot = not isinstance(self.holder, CellType | dict | type | ContextVar)
        yield Change(self.path, self.holder if slot else None, self.name)

    def restore(self, was: Any) -> None:
        """Give the name the value that it had."""
        holder = self.holder
        if isinstance(holder, CellType):
            if was is NONE:
                del holder.cell_contents
            else:
                holder.cell_contents = was
        elif type(holder) is dict:
            if was is NONE:
                holder.pop(self.name, None)
            else:
                holder[self.name] = was
        elif isinstance(holder, ContextVar):
            if was is not NONE:  # no context can be made to forget a variable
                holder.set(was)
        elif was is NONE:
            delattr(holder, self.name)
        else:
            setattr(holder, self.name, was)


class TensorWas(NamedTuple):
    """A tensor at one moment.

    Attributes:
        version: torch's count of writes.
        place: its address; 0 where it has none.
        data: a second tensor on the same memory, which stays there when ``.data = ...`` moves the
            first one; None if it was not made.
        values: a copy; None where none was made.
    """

    version: int
    place: int
    data: Tensor | None
    values: Tensor | None


class TensorPlace(StatePlace):
    """Place of a tensor that is written to in place, or gets another ``.data``.

    Attributes:
        written: a dry run has shown that calls write to it, so its values are copied at any size.
    """

    def __init__(self, tensor: Tensor, path: str, via: tuple[Any, str] | None) -> None:
        self.tensor, self.path, self.via = tensor, path, via
        self.written = False
        self._fixed = isinstance(tensor, torch.nn.Parameter)

    def copy(self, depth: Depth) -> TensorWas:
        """Return the version, address and values of the tensor, as far as `depth` requests."""
        tensor = self.tensor
        dense = tensor.layout == torch.strided and not tensor.is_nested
        if depth is Depth.QUICK or not dense or _comes_and_goes(tensor) or is_spread(tensor):
            return TensorWas(tensor._version, _address(tensor), None, None)
        data, values = tensor.detach(), None
        thorough = depth is Depth.THOROUGH
        small = tensor.nbytes <= SMALL and (thorough or not self._fixed)
        if small or (thorough and self.written):
            large = tensor.nbytes > SMALL  # its copy must not take what a step has room for
            values = data.to("cpu", copy=True) if large else data.clone()
        return TensorWas(tensor._version, _address(tensor), data, values)

    def same(self, was: TensorWas) -> bool:
        """Return whether the tensor is unchanged, as far as it was recorded."""
        tensor, values = self.tensor, was.values
        if values is None or is_fake(values) or tensor.device != self._device(was):
            return tensor._version == was.version and _address(tensor) == was.place
        return same_values(tensor.detach().to(values.device), values)

    def restore(self, was: TensorWas) -> None:
        """Give it the memory and the values that it had, as far as they were noted."""
        tensor, data, values = self.tensor, was.data, was.values
        if data is None:
            return
        if tensor.device != data.device or _address(tensor) != was.place:
            tensor.data = data
        if values is None or is_fake(values):
            return
        if not same_values(data.to(values.device), values):
            with torch.no_grad():
                tensor.copy_(values)

    def _device(self, was: TensorWas) -> torch.device:
        return self.tensor.device if was.data is None else was.data.device


def _address(tensor: Tensor) -> int:
    """Return where a tensor lies; 0 where it lies nowhere, or in more than one place."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return 0
    return 0 if _comes_and_goes(tensor) else tensor.data_ptr()


def _comes_and_goes(tensor: Tensor) -> bool:
    held = paged()
    return bool(held.every) and held.holds(tensor)


class ArrayPlace(StatePlace):
    """The values of an array: of numpy, of the standard library, or of C."""

    def __init__(self, array: Any, path: str, via: tuple[Any, str] | None) -> None:
        self.array, self.path, self.via = array, path, via

    def copy(self, depth: Depth) -> Any:
        """Return the values; None of one that is too large to be copied."""
        if memory_of(self.array) > (LARGE if depth is Depth.THOROUGH else SMALL):
            return None
        return self.array.copy() if isinstance(self.array, np.ndarray) else bytes(self.array)

    def same(self, was: Any) -> bool:
        """Return whether the values are unchanged."""
        now = self.array
        if was is None:
            return True
        if not isinstance(now, np.ndarray):
            return bool(bytes(now) == was)
        if now.shape != was.shape:
            return False
        if now.dtype.kind == "O":
            return all(starmap(same_value, zip(now.flat, was.flat, strict=True)))
        return np.array_equal(now, was, equal_nan=now.dtype.kind in "fc")

    def restore(self, was: Any) -> None:
        """Write the values that it had."""
        if was is not None:
            write(self.array, was)


class Random(StatePlace):
    """The state of a generator of random numbers, or of Python's and numpy's global ones."""

    def __init__(self, generator: Any, path: str) -> None:
        self.generator, self.path = generator, path

    def copy(self, depth: Depth = Depth.QUICK) -> Any:
        """Return the state."""
        del depth
        generator = self.generator
        if generator is None:
            return RNGState.now()
        if isinstance(generator, random.Random):
            return generator.getstate()
        if isinstance(generator, np.random.Generator):
            return generator.bit_generator.state
        return generator.get_state()

    def same(self, was: Any) -> bool:
        """Say whether nothing was drawn."""
        now = self.copy()
        if isinstance(was, RNGState):
            return bool(now.others_as(was))
        if isinstance(was, Tensor):
            return torch.equal(now, was)
        return repr(now) == repr(was) if isinstance(was, dict) else bool(_tuple(now) == _tuple(was))

    def restore(self, was: Any) -> None:
        """Restore the RNG state."""
        generator = self.generator
        if isinstance(was, RNGState):
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


def same_value(a: Any, b: Any) -> bool:
    """Say whether two values are one object, or equal numbers or texts."""
    if a is b:
        return True
    type_ = type(a)
    return type_ is type(b) and type_ in ATOMS and bool(a == b or (a != a and b != b))


# Detection of writes to tensors by memory: ``.data`` has another count of writes.


class Writes(TorchDispatchMode):
    """Dispatch mode that records which of some tensors kernels write to.

    Args:
        tensors: those that matter.
        keep: copy the values of one before it is written to. Default False.
    """

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dense = (tensor for tensor in tensors if tensor.layout == torch.strided)
        self._watched = {storage_of(tensor): tensor for tensor in dense}
        self._written: set[int] = set()
        self._keep = keep
        self._saved: list[tuple[Tensor, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._written)

    def wrote(self, tensor: Tensor) -> bool:
        """Say whether a kernel wrote to the memory of a tensor."""
        return tensor.layout == torch.strided and storage_of(tensor) in self._written

    def put_back(self) -> None:
        """Restore the copied values of the tensors."""
        with torch.no_grad():
            for data, values in self._saved:
                data.copy_(values)

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, and record the tensors that it writes to."""
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            if tensor.layout == torch.strided and storage_of(tensor) in self._watched:
                self._note(storage_of(tensor))
        run: Callable[..., Any] = func
        return run(*args, **kwargs)

    def _note(self, memory: int) -> None:
        if self._keep and memory not in self._written:
            data = self._watched[memory].detach()
            self._saved.append((data, data.to("cpu", copy=True)))  # no room of the step's is taken
        self._written.add(memory)
