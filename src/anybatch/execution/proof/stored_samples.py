"""Samples that a forward stores on a model: attributes, containers, closures, rebound tensors.

A layer may create its state anew for another number of rows, and compute with it for the same
number; a bank may be used once it is full. Calls of different sizes show neither. So state that
holds samples after a call is found here, and if there is any, the call is made again.

    forward(3 rows)  ->  model.state = [3, C], of samples
    forward(3 rows)  ->  outputs with a part of the earlier call: refused;  without: it only keeps
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core import pytree
from anybatch.core.modules import HOOKS, walk
from anybatch.core.python_state import Attributes, PythonState
from anybatch.core.reached import MANY
from anybatch.execution.proof.masks import Masks
from anybatch.execution.proof.places import in_rows

DEEP = 6
"""Depth of nested objects of the search."""

MOST = 20_000
"""Objects after which the search ends: a model may hold its data."""

Left = dict[int, tuple[str, int]]
"""Id of a container -> its name, and the number of tensors of samples in it."""


def left_behind(model: nn.Module, masks: Masks) -> Left:
    """Return where a model holds tensors in which samples have had a part; not its parameters."""
    found: Left = {}
    for at, name, tensor in held(model):
        if masks.of(tensor) is not None:
            found[at] = name, found.get(at, ("", 0))[1] + 1
    return found


def grown(calls: Iterable[Left]) -> str:
    """Return the name of a container that holds more samples after each call; "" for none."""
    first, *others = calls
    for at, (name, count) in first.items():
        if increases([count, *(each.get(at, ("", 0))[1] for each in others)]):
            return name
    return ""


def increases(counts: Sequence[int]) -> bool:
    """Say whether each of several counts is larger than the one before."""
    return len(counts) > 1 and all(a < b for a, b in pairwise(counts))


def held(model: Any) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the id of a container, a name and a tensor, for every tensor that is found."""
    visited: set[int] = set()
    ahead: deque[tuple[str, Any, int]] = deque([("", model, 0)])
    while ahead and len(visited) < MOST:
        name, held, depth = ahead.popleft()
        if id(held) in visited:
            continue
        visited.add(id(held))
        for key, inside in _inside(held):
            path = f"{name}.{key}" if name and key else name or key
            if isinstance(inside, Tensor):
                yield id(held), path, inside
            elif isinstance(inside, nn.Module):
                ahead.append((path, inside, 0))
            elif depth < DEEP and not isinstance(inside, type | str | int | float | bool):
                ahead.append((path, inside, depth + 1))


def within(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors that outputs hold, those in objects such as a cache of keys, too."""
    for _, _, tensor in held((outputs,)):
        yield tensor


def _inside(held: Any) -> Iterator[tuple[str, Any]]:
    """Yield the contents of an object, with their names where they have one."""
    if isinstance(held, nn.Module):
        yield from _of_module(held)
    elif isinstance(held, dict | list | tuple | set | deque):
        if len(held) <= MANY:
            for value in dict.values(held) if isinstance(held, dict) else tuple(held):
                yield "", value
    elif isinstance(held, MethodType):
        yield from (("", held.__self__), ("", held.__func__))
    elif isinstance(held, FunctionType):
        if not (held.__module__ or "").startswith(("torch.", "anybatch.")):
            for name, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=False):
                yield from ((name, v) for v in _content(cell))
            yield from vars(held).items()
    elif not (type(held).__module__ or "").startswith(("torch", "builtins", "numpy", "anybatch")):
        yield from getattr(held, "__dict__", {}).items()


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module._modules.items()
    if not type(module).__module__.startswith("torch."):
        mine = vars(module).items()
        yield from ((name, value) for name, value in mine if name not in Attributes.OWN)
        yield "forward", getattr(type(module), "forward", None)
    for hooks in HOOKS:
        yield from (("a hook", hook) for hook in getattr(module, hooks, {}).values())


def _content(cell: Any) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # nothing yet
        return


# Tensors that forward puts in the place of others: a moving average by assignment.
#
# ``k.data = m * k.data + (1 - m) * q.data`` writes to nothing that torch counts, and changes
# nothing as long as k equals q, which is how it begins. So it is found by comparing the model's
# tensors before and after a call, and NaN in them shows whether the next call computes with them.
#
#     forward  ->  model.k is another tensor;  with NaN in it:  outputs of NaN  ->  not shown


class HeldTensor(NamedTuple):
    """A tensor of the model, and its place, which a new tensor or a write would change."""

    name: str
    place: tuple[int, int]
    tensor: Tensor


def holds(model: nn.Module, masks: Masks) -> list[HeldTensor]:
    """Return parameters and buffers by their memory, other constants by their id and version.

    A write to a parameter is refused, and buffers are those of the full batch.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    address = torch._C._storage_address  # type: ignore[attr-defined]
    found = [HeldTensor(name, (address(one), 0), one) for name, one in named if in_rows(one)]
    named_ids = {id(one) for _, one in named}
    for _, name, one in held(model):
        constant = in_rows(one) and not one.requires_grad and id(one) not in named_ids
        if constant and masks.of(one) is None:
            writes = 0 if one.is_inference() else one._version
            found.append(HeldTensor(name, (id(one), writes), one))
    return found


def rebound(before: list[HeldTensor], after: list[HeldTensor]) -> Iterator[HeldTensor]:
    """Yield tensors that were replaced or written to, except new ones with the same integers."""
    places = {(one.name, one.place) for one in before}
    by_name: dict[str, list[Tensor]] = {}
    for one in before:
        by_name.setdefault(one.name, []).append(one.tensor)
    for one in after:
        if (one.name, one.place) in places or one.name not in by_name:
            continue
        others = [old for old in by_name[one.name] if old is not one.tensor]
        if one.tensor.is_floating_point() or not any(_same(one.tensor, old) for old in others):
            yield one


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or (a.dtype == b.dtype and torch.equal(a, b))


def reads(model: nn.Module, those: list[HeldTensor], call: Callable[[], Any], outputs: Any) -> str:
    """Return the name of the first of some tensors if a call computes with them, or "".

    `call` is of the model, on the rows that have given `outputs`: these have no NaN of their own,
    or those of any call. The model is as it was afterwards.
    """
    if any(not one.tensor.is_floating_point() or one.tensor.is_inference() for one in those):
        return those[0].name
    state = PythonState()
    state.modules([module for _, module in walk(model)], attributes=True)
    saved = [(one.tensor, one.tensor.data) for one in those]
    try:
        for tensor, data in saved:
            tensor.data = torch.full_like(data, math.nan)
        found = call()
    except Exception:  # whatever a model does with NaN
        return those[0].name
    finally:
        state.put_back()
        for tensor, data in saved:
            tensor.data = data
    pairs = zip(pytree.flat(found), pytree.flat(outputs), strict=True)
    spread = any(a.shape != b.shape or bool((a.isnan() & ~b.isnan()).any()) for a, b in pairs)
    return those[0].name if spread else ""
