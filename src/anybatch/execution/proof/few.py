"""Check of rows chosen by their values, where a few rows do not show the result of more.

The number of rows of ``h[m]``, ``nonzero`` or ``masked_select`` depends on values. Of the inspected
rows it may be none, or those of one sample: then no samples meet in their mean, as they would in a
batch.

    h[m]        h[m].mean(0)        h - h[m].mean(0)
    [1, C]      brought together    and given to others: a doubt
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from anybatch.execution.proof.masks import LOOSE, SAMPLES, samples_of, total
from anybatch.execution.proof.rules import PUTS, REDUCTIONS, SLICES, Call, reduced, varies

CHOOSING = frozenset(("index", "_unsafe_index", "masked_select", "nonzero"))
"""Kernels whose results have as many rows as values say."""

ALONG = frozenset(
    "cumsum cumprod logcumsumexp cummax cummin _safe_softmax sort argsort topk flip roll".split()
)
"""Kernels that bring numbers together, or put them elsewhere, along one dimension."""

SPLITS = frozenset("unbind split split_with_sizes chunk tensor_split".split())
"""Kernels that give Python as many tensors as there are rows."""

PRODUCTS = frozenset("mm bmm addmm baddbmm mv addmv dot vdot addmm_ baddbmm_".split())

ENDLESS = 1 << 62
"""An end of a slice that Python gives where there is none."""


class Few:
    """Record of choices that return fewer than two samples, and of tensors computed from them.

    Attributes:
        sizes: how many rows these choices have had.
        places: where rows of them were brought together and then given to rows.
    """

    def __init__(self) -> None:
        self.sizes: set[int] = set()
        self.places: list[str] = []
        self._together: dict[int, tuple[StorageWeakRef, str]] = {}

    def chose(self, call: Call, mask: Tensor | None) -> None:
        """Take in a kernel of `CHOOSING`, and the mask of its result."""
        if not _by_values(call):
            return
        held = 0 if mask is None else total(mask)
        if len(samples_of(held & SAMPLES)) < 2:
            self.sizes.add(call.results[0].shape[_axis(call)])

    def ran(self, call: Call, operands: Sequence[Tensor], path: str) -> None:
        """Record a kernel that has run on chosen rows, or on tensors computed from them."""
        if self._counts(call, operands):
            self.places.append(f"{path}, in {call.name}")
        sources = [place for one in operands if (place := self._place(one))]
        place = sources[0] if sources else ""
        if not place and self._brings(call, operands):
            place = f"{path}, in {call.name}"
        if not place:
            return
        for one in (*call.results, *call.written):
            weak = StorageWeakRef(one.untyped_storage())  # type: ignore[no-untyped-call]
            self._together[one.untyped_storage()._cdata] = weak, place
            other = any(call.mask(two) is not None for two in operands if not self._is(two, one))
            many = one.dim() > 0 and one.numel() != 1
            if sources and many and (other or call.name in PUTS):
                self.places.append(place)

    def _is(self, one: Tensor, made: Tensor) -> bool:
        return bool(self._place(one)) and one is not made

    def _place(self, tensor: Tensor) -> str:
        """Return where rows were brought together that a tensor was made of; "" for none."""
        weak, place = self._together.get(tensor.untyped_storage()._cdata, (None, ""))
        return "" if weak is None or weak.expired() else place  # type: ignore[no-untyped-call]

    def _brings(self, call: Call, operands: Sequence[Tensor]) -> bool:
        return any(self._of_choice(call, one) and self._along(call, one) for one in operands)

    def _counts(self, call: Call, operands: Sequence[Tensor]) -> bool:
        """Return whether chosen rows are passed to Python one by one, or lie among constants."""
        if call.name in SPLITS:
            x = call.args[0]
            rows = x.dim() and call.argument("dim", default=0) % x.dim() == 0
            return bool(rows) and x.shape[0] in self.sizes and self._of_choice(call, x)
        if call.name == "constant_pad_nd":
            x, pad = call.args[:2]
            dims = [x.dim() - 1 - at // 2 for at, count in enumerate(pad) if count]
            return self._of_choice(call, x) and any(x.shape[d] in self.sizes for d in dims)
        if call.name == "cat":
            dim = call.argument("dim", default=0)
            rows = [one for one in operands if one.dim() and one.shape[dim] in self.sizes]
            others = [one for one in operands if one.numel() and call.mask(one) is None]
            return bool(others) and any(self._of_choice(call, one) for one in rows)
        return False

    def _of_choice(self, call: Call, tensor: Tensor) -> bool:
        """Say whether a tensor may be rows of such a choice."""
        if not tensor.numel():
            return True
        mask = call.mask(tensor)
        held = 0 if mask is None else total(mask)
        return bool(held & LOOSE) and len(samples_of(held & SAMPLES)) < 2

    def _along(self, call: Call, x: Tensor) -> bool:
        """Say whether a kernel brings the rows of a choice together."""
        rank, dims = x.dim(), list[int]()
        if not rank:
            return False
        if call.name in REDUCTIONS and x is call.args[0]:
            dims = reduced(call)
        elif call.name in ALONG and x is call.args[0]:
            argument = call.argument("dim", "dims", default=-1)
            dims = [d % rank for d in ([argument] if isinstance(argument, int) else argument)]
        elif call.name.startswith("renorm"):
            dims = [d for d in range(rank) if d != call.argument("dim") % rank]
        elif call.name in PRODUCTS:
            dims = _contracted(call, x)
        elif call.name.startswith("_scaled_dot_product"):
            dims = [rank - 2]
        elif call.name in SLICES and call.name != "unbind" and not _takes_all(call):
            dims = [0] if call.argument("dim", default=0) % rank == 0 else []
        return any(x.shape[d] in self.sizes for d in dims) or len(dims) == rank


def _takes_all(call: Call) -> bool:
    begin, end = call.argument("start"), call.argument("end")
    endless = begin in (None, 0) and (end is None or end >= ENDLESS)
    return call.name == "slice" and endless and call.argument("step", default=1) == 1


def _contracted(call: Call, x: Tensor) -> list[int]:
    """Return the dimension along which a product is summed; nothing where weights are."""
    a, b = call.args[-2:] if not call.name.startswith(("add", "badd")) else call.args[1:3]
    other = b if x is a else a
    weights = other if other._base is None else other._base
    constant = weights.requires_grad and other.numel() and call.mask(other) is None
    if not (x is a or x is b) or constant:
        return []
    return [x.dim() - 1] if x is a or x.dim() == 1 else [x.dim() - 2]


def _by_values(call: Call) -> bool:
    """Say whether samples choose among rows of several."""
    if call.name == "nonzero":
        return _in_several_places(call.mask(call.args[0]))
    if call.name == "masked_select":
        return any(_in_several_places(call.mask(one)) for one in call.args[:2])
    bools = [one for one in call.args[1] if one is not None and not one.dtype.is_floating_point]
    chosen = [one for one in bools if one.element_size() == 1 and call.mask(one) is not None]
    return bool(chosen) and any(
        _in_several_places(call.mask(one)) for one in (call.args[0], *chosen)
    )


def _in_several_places(mask: Tensor | None) -> bool:
    return mask is not None and any(
        mask.shape[d] > 1 and varies(mask, d) for d in range(mask.dim())
    )


def _axis(call: Call) -> int:
    """Return the dimension of the result along which the chosen rows lie."""
    if call.name in ("nonzero", "masked_select"):
        return 0
    indexed = [one is not None for one in call.args[1]]
    first = indexed.index(True)
    split = False in indexed[first : len(indexed) - indexed[::-1].index(True)]
    return 0 if split else first
