"""Attributes and classes of tensors that their rows lack: a doubt, or an error by name.

A user may write ``outputs.aux = ...`` in forward, or ``targets.scale = 2.0``, and read it in the
loss. Rows that are cut, joined, copied to a device or faked are other tensors, and ``hasattr``
would choose another loss for them. So a step with such a tensor is not shown; if the read fails,
the error shows what to write.

    outputs.aux, outputs.__class__      doubt: outputs has aux, which is no part of its rows
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from anybatch.core import tree
from anybatch.errors import LossError

PLAIN = (Tensor, nn.Parameter)

OWN = ("torch", "anybatch")
"""Packages whose classes of tensors, and whose attributes, are no one's message to a loss."""


Hung = tuple[str, str]
"""The path of a tensor or a container, and the name of an attribute that rows lack."""


def hangs(values: Any) -> bool:
    """Return whether a tree may hold attributes that rows lack; runs for every micro-batch."""
    type_ = type(values)
    if type_ in PLAIN:
        return bool(values.__dict__)
    if type_ in tree.LEAVES:
        return False
    if type_ is tuple or type_ is list:
        return any(map(hangs, values))
    return any(map(hangs, values.values())) if type_ is dict else True


def hanging(values: Any, path: str, *, classes: bool = False) -> set[Hung]:
    """Return the attributes of the tensors and containers of a tree that rows lack.

    Args:
        values: a tree.
        path: of it.
        classes: a user's class is named, too. Default False: rows are of that class.
    """
    found: set[Hung] = set()
    for at, one in _every(values, path):
        found.update((at, name) for name in _attributes(one))
        type_ = type(one)
        if classes and isinstance(one, Tensor) and type_.__module__.split(".")[0] not in OWN:
            found.add((at, f"the class {type_.__name__}"))
    return found


def doubts_of(found: set[Hung]) -> tuple[str, ...]:
    """Return the doubts of a step with tensors that have attributes that rows lack."""
    return tuple(
        f"{at} has {name}, which hangs on the tensor or its container and is no part of its rows: "
        "pass it beside it, in a tuple or a mapping"
        for at, name in sorted(found)
    )


def refuse_missing(error: AttributeError, found: set[Hung]) -> None:
    """Refuse to read an attribute that the full-batch tensor had and its rows lack.

    Raises:
        LossError: it names the attribute.
    """
    at = next((at for at, name in sorted(found) if name == error.name), None)
    if at is not None and isinstance(error.obj, Tensor):
        raise LossError(
            f"a loss or a model must read only its tensors, and {at}.{error.name} is an attribute, "
            f"which rows of a split batch do not have: return or pass it with {at}, in a tuple or "
            "a mapping"
        ) from error


def _every(values: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, values
    for key, child in tree.children(values):
        yield from _every(child, path + key)


def _attributes(one: Any) -> list[str]:
    """Return the names of attributes that rows of a tensor or a container would not have."""
    held = getattr(one, "__dict__", {})
    if not held:
        return []
    if isinstance(one, Tensor):
        retained = set(one[:1].__dict__) if one.dim() and type(one) is not Tensor else set()
    elif dataclasses.is_dataclass(one) and not isinstance(one, Mapping):
        retained = {field.name for field in dataclasses.fields(one)} | set(dir(type(one)))
    elif isinstance(one, tree.LISTS):
        retained = set(dir(type(one)))
    else:
        return []
    return [name for name in held if name not in retained and not name.startswith("_dynamo")]
