"""Saved tensors that are never offloaded: above all weights, which are resident anyway.

``save_on_cpu`` offloads everything that autograd saves, the weights of every layer too, which frees
nothing. A weight is saved as itself, as a view (``weight.t()``), or as the copy in another dtype
that autocast makes and caches: the graph behind it shows this, because it ends at once in a leaf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from anybatch.core.graph import name_of

MOVES = (Tensor, Parameter, FakeTensor)
"""Other classes may hold their data elsewhere; fakes hold none, in a step that is rehearsed."""

ALIKE = frozenset(
    f"{name}Backward0"
    for name in "Alias Detach Expand Permute ReshapeAlias Slice Squeeze Split T Select "
    "ToCopy Transpose Unsqueeze UnsafeView View".split()
)
"""Nodes whose result is a view of their input, or a copy in another dtype."""

LEAF = "torch::autograd::AccumulateGrad"


def may_move(tensor: Tensor, device: torch.device, least: int) -> bool:
    """Return whether a saved tensor can be offloaded from `device` and return.

    Args:
        tensor: as autograd saves it.
        device: tensors elsewhere are not offloaded.
        least: bytes of a storage below which it is not offloaded.
    """
    return (
        type(tensor) in MOVES
        and tensor.layout == torch.strided
        and tensor.untyped_storage().nbytes() >= least  # most are small, and asked no more
        and tensor.device.type == device.type
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_inference()
    )


def is_weight(tensor: Tensor) -> bool:
    """Say whether it is a leaf that wants a gradient, a view of one, or one in another dtype."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, Parameter) or (base.is_leaf and base.requires_grad):
        return True
    node = tensor.grad_fn
    while node is not None and name_of(node) in ALIKE:
        node = node.next_functions[0][0]
    return node is not None and name_of(node) == LEAF
