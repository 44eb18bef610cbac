"""Call of a kernel, the masks of its views, and the table of rules for those of its results."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.execution.proof import masks as sets
from anybatch.execution.proof.masks import ALL, CUT, INTEGERS, PLACE, SAMPLES, fold, union
from anybatch.memory.meter import tensors_in

NORMS = dict.fromkeys(
    "native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm".split(), 5
)
"""Kernels of batch normalisation, and where they take their training flag."""

TABLES = frozenset(("embedding", "_embedding_bag", "_embedding_bag_forward_only"))
"""Kernels that read rows of a table."""

REGROUPS = frozenset(("view", "_unsafe_view", "reshape", "_reshape_copy", "unflatten"))
"""Kernels that give a tensor other dimensions."""

SPREADS = REGROUPS | {"cat", "stack", "repeat"}
"""Kernels whose masks have entries for each row of a dimension along which no samples lie."""

READS = frozenset(
    "_local_scalar_dense equal allclose bincount _unique _unique2 unique_dim unique_consecutive "
    "unique_dim_consecutive".split()
)
"""Kernels that return a value to Python, or a tensor as long as there are values: classes, say
(test_a_number_of_classes_is_a_doubt)."""

LOSSES = frozenset(
    "nll_loss_forward nll_loss2d_forward _log_softmax mse_loss smooth_l1_loss huber_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits _ctc_loss".split()
)
"""Kernels that a loss inside a model ends in: their inputs must be rows."""

CUTS = frozenset(
    "slice select narrow split split_with_sizes chunk tensor_split unbind unfold as_strided".split()
)
"""Views of a part, or of parts, of a dimension."""

VIEWS_IN_PLACE = frozenset(
    "set_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ detach_".split()
)
"""Kernels that write to no element: they replace the tensor by a view of all of a storage."""


class Kernel(NamedTuple):
    """Facts of a kernel, which torch derives anew each time.

    Attributes:
        name: without its namespace and overload.
        aliases: it returns a view, or what it has written to.
        views: it returns a view.
        draws: from a generator.
        pointwise: it computes element by element.
    """

    name: str
    aliases: bool
    views: bool
    draws: bool
    pointwise: bool


@cache
def kernel(func: Any) -> Kernel:
    """Return the facts of a kernel that has a schema."""
    schema, tags = func._schema, func.tags
    aliases = [alias for one in schema.returns if (alias := one.alias_info) is not None]
    return Kernel(
        name=schema.name.split("::")[1],
        aliases=bool(aliases),
        views=any(not alias.is_write for alias in aliases),
        draws=torch.Tag.nondeterministic_seeded in tags,
        pointwise=torch.Tag.pointwise in tags,
    )


Found = Sequence[Tensor | None]
"""A mask for each tensor that a kernel returns, and then for each that it only writes to."""


@dataclass
class Call:
    """One call of a kernel, and the masks of its operands.

    Attributes:
        name: of the kernel, without its namespace and overload.
        operands: the tensors among its arguments.
        masks: id of an operand -> its mask.
        backward: the call belongs to a backward pass.
        writes: the operands that it writes to.
        results: the tensors that it has returned.
        written: the tensors that it has written to and does not return.
        filled: ids of operands that forward has made of one number, without later writes.
        alike: ids of operands that were made without samples, and are equal for all rows.
        mixes_orders: the kernel computes with rows in an order and with rows in none.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Tensor]
    masks: dict[int, Tensor]
    backward: bool = False
    writes: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    filled: Container[int] = ()
    alike: Container[int] = ()
    mixes_orders: bool = False

    def mask(self, value: Any) -> Tensor | None:
        """Return the mask of an operand; None where it has none."""
        return self.masks.get(id(value)) if isinstance(value, Tensor) else None

    def full(self, tensor: Tensor) -> Tensor:
        """Return the mask of an operand in its shape."""
        mask = self.mask(tensor)
        if mask is None:
            mask = torch.zeros([1] * tensor.dim(), dtype=torch.uint8, device=tensor.device)
        return mask.expand(tensor.shape)

    def argument(self, *names: str, default: Any = None) -> Any:
        """Return the argument of one of these names."""
        for at, one in enumerate(self.func._schema.arguments):
            if one.name in names:
                if one.name in self.kwargs:
                    return self.kwargs[one.name]
                if at < len(self.args):
                    return self.args[at]
                return one.default_value if one.has_default_value() else default
        return default

    def all(self) -> Tensor:
        """Return the union of all operands, 0-dim."""
        flat = [fold(m, range(m.dim())).reshape(()) for m in self.masks.values()]
        found = union(flat)
        assert found is not None
        return found


Rule = Callable[[Call], Found | None]
"""None where the rule does not cover the call."""

RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Enter a function in the table, for the kernels of these names."""

    def note(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), fn))
        return fn

    return note


def rows_of(call: Call, tensors: Iterable[Tensor]) -> Tensor:
    """Return the union of masks by row: all dimensions but the first are folded."""
    rows: Tensor | None = None
    for one in tensors:
        if (mask := call.mask(one)) is not None:
            rows = union((rows, fold(mask, range(1, mask.dim()), keep=False)))
    assert rows is not None
    return rows


def dims_of(dims: Any, rank: int) -> list[int]:
    """Return dimensions as numbers that are not negative; None or nothing is all of them."""
    if dims is None or dims == []:
        return list(range(rank))
    every = [dims] if isinstance(dims, int) else list(dims)
    return [d % rank for d in every] if rank else []


@sets.of_bits
def valued(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask of a place among samples that has become a value: it has all samples."""
    if dtype in INTEGERS:
        return mask
    return mask | (((mask & PLACE) != 0).to(torch.uint8) * ALL)


def leads_back(index: Tensor) -> bool:
    """Say whether places are each of a sample, in the order of the samples."""
    return bool(((index & PLACE) != 0).all()) and bool(((index & SAMPLES) != 0).all())


@sets.of_bits
def varies(mask: Tensor, dim: int) -> bool:
    """Say whether other samples have had a part in it from place to place along a dimension."""
    own, every = mask & SAMPLES, fold(mask, [dim]) & SAMPLES
    return bool(((own != every) & (own != 0)).any())  # what belongs to none is beside, not apart


def varies_somewhere(mask: Tensor | None) -> bool:
    """Say whether other samples have had a part in it from place to place."""
    return mask is not None and any(varies(mask, d) for d in range(mask.dim()))


def take_in(call: Call, result: Any) -> None:
    """Record the tensors that a call has returned, and those that it has only written to."""
    call.results = [*tensors_in(result)]
    returned = {id(one) for one in call.results}
    call.written = [one for one in call.writes if id(one) not in returned]


def fitting(mask: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Return the mask in a form that broadcasts to a tensor: else all of it for each number."""
    if mask is None:
        return None
    try:
        torch.broadcast_to(mask, tensor.shape)
    except RuntimeError:
        return fold(mask, range(mask.dim())).reshape([1] * tensor.dim())
    return mask


def may_cut(call: Call) -> bool:
    """Say whether a view may be another where there are more samples."""
    x = call.args[0]
    if call.name == "as_strided" or not isinstance(x, Tensor):
        return True
    mask, dim = call.mask(x), call.argument("dim") or 0
    return call.name in CUTS and mask is not None and mask.shape[dim] > 1


def views_of(call: Call, mask: Tensor, x: Tensor) -> list[Tensor] | None:
    """Return the same views of the mask of `x`; None where the storage tells."""
    if call.name == "as_strided":
        return None
    full = mask.expand(x.shape)
    if call.name == "view_as_real":
        return [full.unsqueeze(-1).expand(*full.shape, 2)]
    if call.name == "view_as_complex":
        return [fold(full, [full.dim() - 1], keep=False)]
    same = _same(call, full)
    if same is not None:
        return same
    found = [sets.elsewhere(mask, sets.geometry(x), sets.geometry(one)) for one in call.results]
    views = [one for one in found if one is not None]
    return views if len(views) == len(found) else _same(call, full.contiguous())


def _same(call: Call, full: Tensor) -> list[Tensor] | None:
    """Return the same views of a mask, where they are views of it."""
    try:
        found = call.func(full, *call.args[1:], **call.kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return [*tensors_in(found)]


def trains(schema: Any, args: tuple[Any, ...]) -> bool:
    """Say whether a kernel of batch normalisation takes the statistics of its rows."""
    at = 3 if schema.overload_name == "no_stats" else NORMS[schema.name.split("::")[1]]
    return bool(args[at])


def remains_cut(call: Call, tensor: Tensor) -> bool:
    """Say whether a tensor that is written to was cut by position, and no other sample is put."""
    old = call.mask(tensor)
    if old is None or not sets.has(old, CUT):
        return False
    others = (one for at, one in call.masks.items() if at != id(tensor))
    return not any(bool((one & SAMPLES).any()) for one in others)
