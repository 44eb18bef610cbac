"""Samples that a call of forward stores on a model: in attributes, containers and closures.

A layer may create its state anew for another number of rows, and compute with it for the same
number; a bank may be used once it is full. Calls of different sizes show neither. So state that
holds samples after a call is found here, and if there is any, the call is made again.

    forward(3 rows)  ->  model.state = [3, C], of samples
    forward(3 rows)  ->  outputs with a part of the earlier call: refused;  without: it only keeps
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from anybatch.core.python_state import HOOKS, MANY, Attributes
from anybatch.execution.proof.masks import Masks

DEEP = 6
"""Depth of nested objects of the search."""

MOST = 20_000
"""Objects after which the search ends: a model may hold its data."""

Left = dict[int, tuple[str, int]]
"""Id of a container -> its name, and the number of tensors of samples in it."""


def left_behind(model: nn.Module, masks: Masks) -> Left:
    """Return where a model holds tensors in which samples have had a part.

    Args:
        model: whose plain attributes, forwards and hooks are walked; not its parameters.
        masks: of all tensors that samples have had a part in.
    """
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


def held(model: nn.Module) -> Iterator[tuple[int, str, Tensor]]:
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
    visited: set[int] = set()
    ahead: deque[tuple[Any, int]] = deque([(outputs, 0)])
    while ahead and len(visited) < MOST:
        held, depth = ahead.popleft()
        if isinstance(held, Tensor):
            yield held
        elif id(held) not in visited and depth < DEEP:
            visited.add(id(held))
            ahead += [(inside, depth + 1) for _, inside in _inside(held)]


def _inside(held: Any) -> Iterator[tuple[str, Any]]:
    """Yield the contents of an object, with their names where they have one."""
    if isinstance(held, nn.Module):
        yield from _of_module(held)
    elif isinstance(held, dict | list | tuple | set | deque):
        if len(held) <= MANY:
            yield from (("", v) for v in (held.values() if isinstance(held, dict) else tuple(held)))
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
