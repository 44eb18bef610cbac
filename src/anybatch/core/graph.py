"""Questions about an autograd graph: which leaves it ends in, and whether it is all new.

A loss may reach more than it was given: parameters that it closes over, or a tensor that forward
left on a module. The first must be treated like the model's own; the second has a graph of one
micro-batch only, and the loss of the full batch cannot be taken from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

NONE = "does not require grad and does not have a grad_fn"
"""In torch's error for a tensor without a graph."""

UNUSED = "appears to not have been used in the graph"
"""In torch's error for an input that is not in the graph."""


def nodes(roots: list[Tensor]) -> Iterator[Any]:
    """Yield every node behind `roots`, once."""
    return _nodes([root.grad_fn for root in roots])


def behind(some: Iterable[Any]) -> Iterator[Any]:
    """Yield every node behind `some` nodes, once."""
    return _nodes([before for node in some for before, _ in node.next_functions])


def _nodes(ahead: list[Any]) -> Iterator[Any]:
    """Yield those nodes and every node behind them, once."""
    visited: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        ahead.extend(before for before, _ in node.next_functions)


def outline(roots: Iterable[Tensor]) -> int:
    """Return a hash of the names and edges of a graph's nodes."""
    ahead: list[Any] = [root.grad_fn for root in roots]
    places: dict[Any, int] = {}
    found: list[str | int | None] = []
    while ahead:
        node = ahead.pop()
        place = places.get(node)
        if place is None and node is not None:
            places[node] = len(places)
            found.append(type(node).__name__)
            ahead.extend([before for before, _ in node.next_functions])
        else:
            found.append(place)
    return hash(tuple(found))


SPARK = "_anybatch_spark"
"""The attribute of a dummy leaf, which exists only for the graph behind it."""


def spark(*, grad: bool) -> Tensor:
    """Return a leaf that gives its results a backward, if `grad`, and receives no gradient."""
    found = torch.zeros((), requires_grad=grad)
    setattr(found, SPARK, True)
    return found


def leaves(roots: list[Tensor]) -> list[Tensor]:
    """Return the leaf tensors for which `roots` have a gradient."""
    found = [node.variable for node in ends(roots)]
    found += [root for root in roots if root.is_leaf and root.requires_grad]
    return [leaf for leaf in found if not hasattr(leaf, SPARK)]


def ends(roots: list[Tensor]) -> list[Any]:
    """Return the AccumulateGrad nodes behind `roots`."""
    return [node for node in nodes(roots) if ends_in(node)]


def now() -> int:
    """Return the number of the newest node of this thread; later ones have larger numbers."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None
    return int(node._sequence_nr())


def reaches_before(root: Tensor, moment: int) -> bool:
    """Say whether a node behind `root` is older than `moment`; leaves have no age."""
    return any(node._sequence_nr() < moment for node in nodes([root]) if not ends_in(node))


def name_of(node: Any) -> str:
    """Return torch's name of a node; a custom function may have set a `name` of its own."""
    return str(type(node).name(node))


def ends_in(node: Any) -> bool:
    """Say whether a node is where the gradient of a leaf arrives."""
    return name_of(node) == "torch::autograd::AccumulateGrad"
