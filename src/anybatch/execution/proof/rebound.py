"""Tensors that forward puts in the place of others: a moving average by assignment.

``k.data = m * k.data + (1 - m) * q.data`` writes to nothing that torch counts, and changes nothing
as long as k equals q, which is how it begins. So it is found by comparing the model's tensors
before and after a call, and NaN in them shows whether the next call computes with them.

    forward  ->  model.k is another tensor;  with NaN in it:  outputs of NaN  ->  not shown
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core import tree
from anybatch.core.modules import walk
from anybatch.core.python_state import PythonState
from anybatch.execution.proof.left import held
from anybatch.execution.proof.masks import Masks
from anybatch.execution.proof.places import in_rows


class HeldTensor(NamedTuple):
    """A tensor of the model.

    Attributes:
        name: such as "k.0.weight".
        place: address, or id and count of writes, which a new tensor or a write would change.
        tensor: it.
    """

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

    Args:
        model: it is as it was afterwards.
        those: tensors that it holds.
        call: of the model, on the rows that have given `outputs`.
        outputs: without NaN of its own, or with those of any call.
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
    pairs = zip(tree.flat(found), tree.flat(outputs), strict=True)
    spread = any(a.shape != b.shape or bool((a.isnan() & ~b.isnan()).any()) for a, b in pairs)
    return those[0].name if spread else ""
