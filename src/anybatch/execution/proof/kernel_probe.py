"""Probe of a kernel without a rule: NaN in one sample's numbers, and where it comes out.

0 x NaN is NaN, so a finite result does not depend on the entries that were NaN, for any values. A
kernel may swallow NaN (a maximum, `nan_to_num`) or refuse it (LAPACK), and integers hold none. So
it is run with other values too, and its results are compared bit for bit. Integers, of which few
values can be tried, are assumed to affect their own row if the result has that row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from anybatch.core.rng import RNGState
from anybatch.execution.proof.kernel_call import Call, varies_somewhere
from anybatch.execution.proof.masks import CUT, LOOSE, PLACE, ROWS, SAMPLES, fold, several, total
from anybatch.execution.proof.rules import REDUCTIONS, reduced
from anybatch.execution.proof.rules_places import PUTS
from anybatch.execution.proof.rules_products import SLICES, takes_all

IN_ORDER = frozenset(("_grouped_mm", "_pad_packed_sequence", "mkldnn_rnn_layer"))
"""Kernels that bring rows which are in an order of their own back to their samples."""

Values = tuple[tuple[Any, ...], dict[str, Any]]


def ask(call: Call, before: Values, unfollowed: Callable[[str], None]) -> list[Tensor]:
    """Return the masks of tensors that a kernel returns or writes to, by a rerun for each sample.

    `before` are its arguments before the call, copies of those it has written to. `unfollowed` gets
    the error of a kernel that takes neither NaN nor other values.
    """
    made = (*call.results, *call.written)
    marks = [torch.zeros(r.shape, dtype=torch.uint8, device=r.device) for r in made]
    bits = int(call.all())
    for bit in range(8):
        ordered = call.name in IN_ORDER and bool(1 << bit & (LOOSE | CUT))
        if not bits >> bit & 1 or ordered:
            continue
        probe = _Probe(call, before, marks, bit)
        if probe.floats:
            probe.ask_floats(unfollowed)
        if call.name not in IN_ORDER and 1 << bit != PLACE:  # a place among whole numbers leads
            probe.mark_rows(probe.integers, marks)
            if bit < ROWS and probe.moves_others():
                unfollowed("whole numbers of a sample change the rows of others")
    return marks


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


ERRORS = (RuntimeError, ValueError, NotImplementedError)

FLOATS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x + torch.linspace(0.25, 1, x.numel(), dtype=x.dtype, device=x.device).view(x.shape),
    lambda x: x.abs() + 8 * _largest(x),
    lambda x: -x.abs() - 8 * _largest(x),
)
"""Other values: near ones, and such as are the largest and the smallest of all."""


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax() + 1 if x.numel() else x.new_ones(())


def _isnan(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).isnan().any(-1) if tensor.is_complex() else tensor.isnan()


class _Probe:
    """Reruns of a kernel with other values of one sample, from the RNG state of its first run.

    It adds to the masks of the results, and of the tensors that the kernel writes to.
    """

    def __init__(self, call: Call, before: Values, marks: list[Tensor], bit: int) -> None:
        self._call, self._marks, self._bit = call, marks, bit
        self._leaves, self._spec = tree_flatten(before)
        self._named = tree_leaves((call.args, call.kwargs))
        masks = map(call.mask, self._named)
        flags = [None if mask is None else (mask >> bit & 1).bool() for mask in masks]
        self._chosen = [one if one is not None and bool(one.any()) else None for one in flags]
        pairs = zip(self._leaves, self._chosen, strict=True)
        chosen = [(leaf, one) for leaf, one in pairs if one is not None]
        self.floats = [pair for pair in chosen if _real(pair[0])]
        self.integers = [pair for pair in chosen if not _real(pair[0])]
        ids = [id(one) for one in self._named]
        self._written = [ids.index(id(one)) for one in call.written]
        own = call.func._schema.name.split("::")[0] != "aten"
        draws = own or torch.Tag.nondeterministic_seeded in call.func.tags
        self._before = RNGState.now() if draws else None
        self._plain: list[Tensor] = []

    def ask_floats(self, unfollowed: Callable[[str], None]) -> None:
        """Mark the elements that NaN and other values reach."""
        try:
            found = self._rerun(lambda leaf, one: leaf.masked_fill(one, math.nan))
        except ERRORS as error:
            if not (self._steady() and self._other_values()):
                unfollowed(str(error).split("\n")[0][:80])
                for mark in self._marks:
                    mark.bitwise_or_(1 << self._bit)
            return
        while found:  # what one result takes is free for the next ones: a budget counts them
            mark, result = self._marks[len(found) - 1], found.pop()
            if result.shape != mark.shape:
                mark.bitwise_or_(1 << self._bit)
            elif _real(result):
                mark.bitwise_or_(_isnan(result).to(torch.uint8) << self._bit)
            else:
                self.mark_rows(self.floats, [mark])
            del result
        if self._steady() and not self._other_values():
            unfollowed("it takes no other values")

    def mark_rows(self, pairs: list[tuple[Tensor, Tensor]], marks: list[Tensor]) -> None:
        """Mark the sample's rows where results have those of an operand, or all of them."""
        for leaf, one in pairs:
            for mark in marks:
                if leaf.dim() and mark.dim() and leaf.shape[0] == mark.shape[0]:
                    rows = fold(one.to(torch.uint8), range(1, leaf.dim()), keep=False)
                    mark.bitwise_or_((rows << self._bit).reshape([-1] + [1] * (mark.dim() - 1)))
                else:
                    mark.bitwise_or_(1 << self._bit)

    def _rerun(self, other: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        changed: list[Any] = []
        for leaf, one in zip(self._leaves, self._chosen, strict=True):
            if not (_real(leaf) and leaf.layout == torch.strided):
                changed.append(_own(self._call, leaf))
            elif one is None:
                changed.append(_own(self._call, _finite(leaf)))
            else:
                changed.append(other(_finite(leaf), one))
        return self._run(changed)

    def _run(self, changed: list[Any]) -> list[Tensor]:
        args, kwargs = tree_unflatten(changed, self._spec)
        try:
            results = tree_leaves(self._call.func(*args, **kwargs))
        finally:
            if self._before is not None:
                self._before.put_back()
        return [r for r in results if isinstance(r, Tensor)] + [changed[at] for at in self._written]

    def _steady(self) -> bool:
        """Say whether it makes the same of the same: sums of atomic additions vary."""
        with suppress(*ERRORS):
            plain = self._rerun(self._same)
            if not any(map(_any_differ, plain, self._rerun(self._same))):
                self._plain = plain
                return True
        return False

    def _same(self, leaf: Tensor, _: Tensor) -> Tensor:
        found: Tensor = _own(self._call, leaf)
        return found

    def _other_values(self) -> bool:
        """Mark elements that other values change; return whether the kernel accepts any of them."""
        accepted = False
        for change in FLOATS:
            with suppress(*ERRORS):
                self._mark_changed(change)
                accepted = True
        self._plain = []  # a budget counts them
        return accepted

    def _mark_changed(self, change: Callable[[Tensor], Tensor]) -> None:
        # The results go with this call: a budget counts them.
        found = self._rerun(lambda leaf, one: torch.where(one, change(leaf), leaf))
        for mark, one, other in zip(self._marks, self._plain, found, strict=True):
            mark.bitwise_or_(_differ(one, other).to(torch.uint8) << self._bit)

    def moves_others(self) -> bool:
        """Return whether a sample's integers change elements that are not marked as its own.

        It is given those of other samples, in its place: of these the kernel takes them.
        """
        pairs = zip(self._named, self._leaves, self._chosen, strict=True)
        own = [at for at, pair in enumerate(pairs) if self._has_single_samples(*pair)]
        if not own:
            return False
        with suppress(*ERRORS):
            plain = self._rolled(own, 0)
            if any(map(_any_differ, plain, self._rolled(own, 0))):
                return False
            for by in range(1, ROWS):
                with suppress(*ERRORS):
                    trios = zip(self._marks, plain, self._rolled(own, by), strict=True)
                    for mark, one, other in trios:
                        if bool((_differ(one, other) & (mark >> self._bit & 1 == 0)).any()):
                            return True
        return False

    def _has_single_samples(self, named: Any, leaf: Any, one: Tensor | None) -> bool:
        """Return whether each integer of a tensor is of one sample; ends of parts have several."""
        if one is None or _real(leaf) or not leaf.dim() or len(leaf) < 2:
            return False
        return not several(self._call.mask(named))

    def _rolled(self, own: list[int], by: int) -> list[Tensor]:
        """Return the results with the sample's integers replaced by those of `by` rows before."""
        changed = [_own(self._call, leaf) for leaf in self._leaves]
        for at in own:
            leaf, one = self._leaves[at], self._chosen[at]
            assert one is not None
            changed[at] = torch.where(one, leaf.roll(by, 0), leaf)
        return self._run(changed)


def _any_differ(one: Tensor, other: Tensor) -> bool:
    return bool(_differ(one, other).any())


def _finite(leaf: Tensor) -> Tensor:
    return leaf if bool(leaf.sum().isfinite()) else torch.where(leaf.isfinite(), leaf, 0)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Say where two results differ, bit for bit: everywhere where they have other shapes."""
    if one.shape != other.shape:
        return torch.ones((), dtype=torch.bool, device=one.device)
    if one.is_quantized:
        return one.int_repr() != other.int_repr()
    same = one == other
    return ~(same | (_isnan(one) & _isnan(other))) if _real(one) else ~same


def _own(call: Call, leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and call.func._schema.is_mutable else leaf


# Check of rows chosen by their values, where a few rows do not show the result of more.
#
# The number of rows of ``h[m]``, ``nonzero`` or ``masked_select`` depends on values. Of the
# inspected rows it may be none, or those of one sample: then no samples meet in their mean, as they
# would in a batch.
#
#     h[m]        h[m].mean(0)        h - h[m].mean(0)
#     [1, C]      brought together    and given to others: a doubt

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
        if (held & SAMPLES).bit_count() < 2:
            self.sizes.add(call.results[0].shape[_axis(call)])

    def ran(self, call: Call, path: str) -> None:
        """Record a kernel that has run on chosen rows, or on tensors computed from them."""
        if self._counts(call):
            self.places.append(f"{path}, in {call.name}")
        sources = [place for one in call.operands if (place := self._place(one))]
        place = sources[0] if sources else ""
        brings = (self._of_choice(call, x) and self._along(call, x) for x in call.operands)
        if not place and any(brings):
            place = f"{path}, in {call.name}"
        if not place:
            return
        for one in (*call.results, *call.written):
            weak = StorageWeakRef(one.untyped_storage())  # type: ignore[no-untyped-call]
            self._together[one.untyped_storage()._cdata] = weak, place
            outside = (two for two in call.operands if two is one or not self._place(two))
            other = any(call.mask(two) is not None for two in outside)
            many = one.dim() > 0 and one.numel() != 1
            if sources and many and (other or call.name in PUTS):
                self.places.append(place)

    def _place(self, tensor: Tensor) -> str:
        """Return where rows were brought together that a tensor was made of; "" for none."""
        weak, place = self._together.get(tensor.untyped_storage()._cdata, (None, ""))
        return "" if weak is None or weak.expired() else place  # type: ignore[no-untyped-call]

    def _counts(self, call: Call) -> bool:
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
            rows = [one for one in call.operands if one.dim() and one.shape[dim] in self.sizes]
            others = [one for one in call.operands if one.numel() and call.mask(one) is None]
            return bool(others) and any(self._of_choice(call, one) for one in rows)
        return False

    def _of_choice(self, call: Call, tensor: Tensor) -> bool:
        """Say whether a tensor may be rows of such a choice."""
        if not tensor.numel():
            return True
        mask = call.mask(tensor)
        held = 0 if mask is None else total(mask)
        return bool(held & LOOSE) and (held & SAMPLES).bit_count() < 2

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
        elif call.name in SLICES and call.name != "unbind" and not takes_all(call, ENDLESS):
            dims = [0] if call.argument("dim", default=0) % rank == 0 else []
        return any(x.shape[d] in self.sizes for d in dims) or len(dims) == rank


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
        return varies_somewhere(call.mask(call.args[0]))
    if call.name == "masked_select":
        return any(varies_somewhere(call.mask(one)) for one in call.args[:2])
    bools = [one for one in call.args[1] if one is not None and not one.dtype.is_floating_point]
    chosen = [one for one in bools if one.element_size() == 1 and call.mask(one) is not None]
    return bool(chosen) and any(varies_somewhere(call.mask(one)) for one in (call.args[0], *chosen))


def _axis(call: Call) -> int:
    """Return the dimension of the result along which the chosen rows lie."""
    if call.name in ("nonzero", "masked_select"):
        return 0
    indexed = [one is not None for one in call.args[1]]
    first = indexed.index(True)
    split = False in indexed[first : len(indexed) - indexed[::-1].index(True)]
    return 0 if split else first
