"""Rules: the masks of a kernel's results, from those of its operands.

A rule follows from the definition of a kernel, not from its values: a factor of 0 hides nothing.
Kernels fall into a few families; a kernel of none of them is tested
(`anybatch.execution.proof.kernel_probe`).

    pointwise    the union of the operands                     add, relu, where, dropout
    moves        the same kernel, on the mask                  cat, flip, pad, index, gather
    reductions   the union along the dimensions                sum, amax, softmax, cumsum
    products     the union along what is summed over           mm, bmm, attention
    by rows      the union of all but the first dimension      convolution, pooling, group_norm
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from anybatch.execution.proof.masks import (
    ALL,
    CUT,
    INTEGERS,
    LOOSE,
    PLACE,
    SAMPLES,
    fold,
    several,
    total,
    union,
)

Found = Sequence[Tensor | None]
"""A mask for each tensor that a kernel returns, and then for each that it only writes to."""


@dataclass
class Call:
    """One call of a kernel, and the masks of its operands.

    Attributes:
        name: of the kernel, without its namespace and overload.
        func: the kernel.
        args: its positional arguments.
        kwargs: the others.
        results: the tensors that it has returned.
        masks: id of an operand -> its mask.
        backward: the call belongs to a backward pass.
        written: the tensors that it has written to and does not return.
        filled: ids of operands that forward has made of one number, without later writes.
        alike: ids of operands that were made without samples, and are equal for all rows.
        mixes_orders: the kernel computes with rows in an order and with rows in none.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    masks: dict[int, Tensor]
    backward: bool = False
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


def _rule(names: str) -> Callable[[Rule], Rule]:
    def note(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), fn))
        return fn

    return note


def masks_after(call: Call) -> Found | None:
    """Return the masks of the results; None where no rule covers the kernel."""
    rule = RULES.get(call.name)
    if rule is None and _is_pointwise(call.func):
        rule = _pointwise
    found = None if rule is None else rule(call)
    if found is None or call.backward or call.name not in AT_PLACES:
        return found
    bits = _together(call)
    return [mask if mask is None or not bits else mask | bits for mask in found]


def _together(call: Call) -> int:
    """Return the samples that choose a place jointly: omitted places depend on them, too.

    A place of one sample is its row's own.
    """
    bits = 0
    for one in call.args[1:3]:
        mask = call.mask(one)
        if mask is not None and one.dtype in INTEGERS:
            own = mask & SAMPLES
            bits |= total(torch.where((own & (own - 1)) != 0, own, 0))
    return bits


def has_rule(name: str, func: Any) -> bool:
    """Say whether a rule may cover the kernel."""
    return name in RULES or _is_pointwise(func)


@cache
def _is_pointwise(func: Any) -> bool:
    """Return whether a kernel is pointwise; an in-place kernel is where its other form is."""
    if torch.Tag.pointwise in func.tags:
        return True
    space, name = func._schema.name.split("::")
    other = getattr(getattr(torch.ops, space), name[:-1], None) if name.endswith("_") else None
    if other is None or name.endswith("__"):
        return False
    return any(torch.Tag.pointwise in getattr(other, one).tags for one in other.overloads())


def _dims(dims: Any, rank: int) -> list[int]:
    """Return dimensions as numbers that are not negative; None or nothing is all of them."""
    if dims is None or dims == []:
        return list(range(rank))
    every = [dims] if isinstance(dims, int) else list(dims)
    return [d % rank for d in every] if rank else []


def _valued(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask of a place among samples that has become a value: it has all samples."""
    if dtype in INTEGERS:
        return mask
    return mask | (((mask & PLACE) != 0).to(torch.uint8) * ALL)


# ---------------------------------------------------------------- made without samples


@_rule(
    "empty_like zeros_like ones_like full_like new_empty "
    "new_zeros new_ones new_full new_empty_strided new_zeros_strided zero_ sym_size sym_stride "
    "sym_numel eye_ scalar_tensor is_same_size"
)
def _fresh(call: Call) -> Found:
    return [None] * len(call.results)


@_rule(
    "rand_like randn_like randint_like normal_ uniform_ random_ exponential_ bernoulli_ geometric_ "
    "log_normal_ cauchy_"
)
def _drawn(call: Call) -> Found:
    """Noise of the shape of samples: a row of it belongs to its sample."""
    mask = union(call.masks.values())
    assert mask is not None
    samples = mask & SAMPLES
    single = (samples & (samples - 1)) == 0
    return [torch.where(single, samples, 0).to(torch.uint8)] * max(len(call.results), 1)


@_rule("fill_ fill")
def _filled(call: Call) -> Found:
    mask = call.mask(call.argument("value"))
    return [None if mask is None else mask.reshape([1] * call.results[0].dim())]


@_rule("copy_ copy")
def _copied(call: Call) -> Found:
    return [call.mask(call.argument("src"))]


# ---------------------------------------------------------------- pointwise


@_rule("_to_copy clone lift_fresh lift")
def _converted(call: Call) -> Found:
    mask = call.mask(call.args[0])
    if mask is None or call.results[0].dtype != torch.bool:
        return [mask]
    return [_valued(mask, torch.bool)]  # whether it is the first one


@_rule(
    "floor_divide floor_divide_ __irshift__ masked_fill masked_fill_ native_dropout complex "
    "bernoulli _fused_dropout poisson binomial normal _standard_gamma "
    "log_sigmoid_forward log_sigmoid_backward _prelu_kernel _prelu_kernel_backward "
    "rrelu_with_noise rrelu_with_noise_backward native_dropout_backward threshold_backward "
    "polar gelu_backward mse_loss_backward _local_scalar_dense"
)
def _pointwise(call: Call) -> Found:
    mask = union(call.masks.values())
    assert mask is not None
    if not call.backward:
        mask = mask if len(call.masks) == 1 else _in_one_order(call, mask)
        mask = _valued(mask, call.results[0].dtype) if call.results else mask
    return [mask if r.numel() and r.dim() >= mask.dim() else None for r in call.results]


def _in_one_order(call: Call, every: Tensor) -> Tensor:
    """Return a union of masks, with all samples where rows in an order meet those that are in none.

    That the order is the samples' own is chance: where it is another, a sample meets another one.
    """
    if not bool((every & LOOSE).any()):
        return every
    loose, own = (
        union(((m & SAMPLES) != 0) & (((m & LOOSE) != 0) == put) for m in call.masks.values())
        for put in (True, False)
    )
    assert loose is not None
    assert own is not None
    both = loose & own
    call.mixes_orders = bool(both.any())
    return every | both.to(torch.uint8) * ALL


@_rule("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss")
def _loss_by_elements(call: Call) -> Found:
    mask = union(call.masks.values())
    assert mask is not None
    if call.results[0].dim() == mask.dim() and call.argument("reduction", default=1) == 0:
        return [mask]
    return [call.all().reshape([1] * call.results[0].dim())]


LISTED = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf "
    "erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
)
"""Kernels over lists of tensors, which compute with the first ones, with the second ones, ..."""


@_rule(" ".join(f"_foreach_{name} _foreach_{name}_" for name in LISTED.split()))
def _listed(call: Call) -> Found:
    found = []
    for at, one in enumerate(call.results or call.written):
        masks: list[Tensor | None] = []
        for argument in (*call.args, *call.kwargs.values()):
            if isinstance(argument, list | tuple):
                masks.append(call.mask(argument[at]))
            elif (mask := call.mask(argument)) is not None:  # one number for all, or one for each
                masks.append(fold(mask, range(mask.dim()), keep=False))
        if "_copy" in call.name:
            masks = masks[1:2]
        mask = None if "_zero" in call.name else union(masks)
        found.append(mask if mask is None or call.backward else _valued(mask, one.dtype))
    return found


@_rule("_foreach_norm _foreach_max _foreach_powsum")
def _listed_totals(call: Call) -> Found:
    masks = [call.mask(one) for one in call.args[0]]
    return [None if mask is None else fold(mask, range(mask.dim()), keep=False) for mask in masks]


@_rule(
    "fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask "
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams "
    "_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine"
)
def _quantised(call: Call) -> Found:
    """Numbers are clamped to a range, NaN too."""
    x, axis = call.args[0], call.argument("axis")
    found = [call.mask(x)]
    for mask in map(call.mask, call.args[1:]):
        if mask is not None and axis is None:
            found.append(fold(mask, range(mask.dim())).reshape([1] * x.dim()))
        elif mask is not None:
            found.append(mask.reshape([-1 if d == axis % x.dim() else 1 for d in range(x.dim())]))
    return [union(found)] * len(call.results)


@_rule("_fused_moving_avg_obs_fq_helper")
def _observed(call: Call) -> Found:
    """An observer takes its range from all numbers, where it is on."""
    if bool(call.args[1].any()):
        every = (*call.results, *call.written)
        return [call.all().reshape([1] * one.dim()) for one in every]
    mask = call.mask(call.args[0])
    return [mask] * len(call.results) + [call.mask(one) for one in call.written]


@_rule("multi_margin_loss multilabel_margin_loss_forward")
def _margins(call: Call) -> Found:
    """Return the masks of margin losses by row: a satisfied margin costs nothing and hides NaN."""
    x, target = call.args[:2]
    if x.dim() < 2:
        return [call.all().reshape([1] * r.dim()) for r in call.results]
    masks = [call.mask(one) for one in (x, target)]
    rows = union(fold(m, range(1, m.dim()), keep=False) for m in masks if m is not None)
    assert rows is not None
    first = rows if call.results[0].dim() else fold(rows, [0], keep=False)
    return [first, *(rows[:, None] for _ in call.results[1:])]


# ---------------------------------------------------------------- moves


@_rule(
    "cat stack flip roll repeat tril triu im2col col2im pixel_shuffle pixel_unshuffle "
    "channel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d slice_scatter select_scatter slice_backward "
    "select_backward diag_embed rot90 diagonal_scatter as_strided_scatter unfold_copy "
    "_unsafe_view contiguous permute_copy view_copy expand_copy diagonal_backward "
    "split_with_sizes_copy split_copy take_along_dim concat tril_ triu_ unfold_backward "
    "unsafe_split unsafe_split_with_sizes unsafe_chunk constant_pad_nd "
    "_chunk_cat _reshape_copy block_diag"
)
def _moved(call: Call) -> Found | None:
    def masked(value: Any) -> Any:
        return call.full(value).contiguous() if isinstance(value, Tensor) else value

    if call.name in ADDS:
        return [_by_bits(call)]
    args = tree_map(masked, call.args)
    kwargs = {k: masked(v) for k, v in call.kwargs.items() if k not in PLACING}
    if call.name == "constant_pad_nd":
        args, kwargs = (*args[:2], 0), {}
    if call.name == "repeat_interleave" and isinstance(call.argument("repeats"), Tensor):
        return None
    try:
        found = call.func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return [one for one in tree_leaves(found) if isinstance(one, Tensor)]


def _by_bits(call: Call) -> Tensor:
    """Return the union of elements that a kernel adds up (overlapping windows), by sample."""
    mask = call.full(call.args[0])
    bits = [
        (call.func((mask >> bit & 1).float(), *call.args[1:], **call.kwargs) != 0).to(torch.uint8)
        for bit in range(8)
    ]
    return sum((one << bit for bit, one in enumerate(bits)), torch.zeros_like(bits[0]))


ADDS = frozenset(("unfold_backward", "col2im"))
"""Kernels that add up entries moved to the same place."""

PLACING = frozenset(("dtype", "layout", "device", "pin_memory"))
"""Arguments that say where a result is made."""


# ---------------------------------------------------------------- reductions


REDUCED = (
    "sum mean amax amin var std prod any all argmax argmin norm linalg_vector_norm logsumexp max "
    "min median nanmedian mode kthvalue var_mean std_mean count_nonzero aminmax nansum nanmean"
)
REDUCTIONS = frozenset((*REDUCED.split(), "_softmax", "_log_softmax"))
"""Kernels that bring numbers together along dimensions."""


def reduced(call: Call) -> list[int]:
    """Return the dimensions along which a reduction brings numbers together."""
    return _dims(call.argument("dim", "dims", "axis"), call.args[0].dim())


@_rule(REDUCED)
def _reduced(call: Call) -> Found:
    x = call.args[0]
    mask = call.mask(x)
    if mask is None or any(isinstance(a, Tensor) for a in call.args[1:]):
        return [call.all().reshape([1] * r.dim()) for r in call.results]
    dims = reduced(call)
    folded = fold(mask, dims)
    dropped = fold(folded, dims, keep=False)
    return [folded if r.dim() == x.dim() else dropped for r in call.results]


@_rule(
    "_softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin _cummax_helper "
    "_cummin_helper _softmax_backward_data _log_softmax_backward_data cumsum_ cumprod_ "
    "_safe_softmax"
)
def _along(call: Call) -> Found:
    mask = union(call.masks.values())
    assert mask is not None
    dim = call.argument("dim") % max(mask.dim(), 1)
    return [fold(mask, [dim] if mask.dim() else [])] * len(call.results)


@_rule("_fft_r2c _fft_c2r _fft_c2c")
def _transformed(call: Call) -> Found:
    x = call.args[0]
    mask = call.mask(x)
    return [None if mask is None else fold(mask, _dims(call.argument("dim"), x.dim()))]


@_rule("renorm renorm_")
def _renormed(call: Call) -> Found:
    """Return the masks of rescaled slices: a NaN norm is not too large, so NaN would not spread."""
    x = call.args[0]
    mask, dim = call.mask(x), call.argument("dim") % x.dim()
    return [None if mask is None else fold(mask, [d for d in range(x.dim()) if d != dim])]


@_rule("multinomial _sample_dirichlet")
def _drawn_of_rows(call: Call) -> Found:
    mask = call.mask(call.args[0])
    return [None if mask is None else fold(mask, [mask.dim() - 1])] * len(call.results)


# ---------------------------------------------------------------- order and choice


@_rule("sort argsort msort topk")
def _sorted(call: Call) -> Found:
    x = call.args[0]
    mask = call.mask(x)
    assert mask is not None
    default = 0 if call.name == "msort" else -1
    dim = call.argument("dim", default=default) % max(x.dim(), 1)
    if not x.dim() or mask.shape[dim] == 1:
        return [mask] * len(call.results)
    if call.name in ("topk", "msort") or x.numel() > x.shape[dim]:  # rows that fall apart
        return [fold(mask, [dim])] * len(call.results)
    order = call.results[-1]
    moved = call.full(x).gather(dim, order) | LOOSE
    back = x.dtype in INTEGERS and _leads_back(mask)
    places = moved & ~LOOSE & 0xFF if back else moved  # an order of an order is its inverse
    return [moved] * (len(call.results) - 1) + [places | PLACE]


@_rule("_pack_padded_sequence")
def _packed(call: Call) -> Found:
    x, lengths = call.args[:2]
    first = call.argument("batch_first")
    data, _ = torch._pack_padded_sequence(call.full(x).contiguous(), lengths, first)
    counts = call.mask(lengths)
    return [data, None if counts is None else fold(counts, range(counts.dim())).reshape(1)]


@_rule("nonzero")
def _nonzero(call: Call) -> Found:
    x = call.args[0]
    mask = call.mask(x)
    assert mask is not None
    across = mask.numel() > 1
    found = call.full(x)[x != 0]
    marks = LOOSE | PLACE if across and found.numel() else 0
    return [(found | marks)[:, None].expand(call.results[0].shape)]


@_rule("masked_select")
def _selected(call: Call) -> Found | None:
    x, chosen = call.args[:2]
    if x.shape != chosen.shape:
        return None
    return [(call.full(x) | call.full(chosen))[chosen] | LOOSE]


@_rule(
    "bincount histc _unique2 unique_dim unique_consecutive histogram _histogramdd_bin_edges "
    "_histogramdd_from_bin_cts _histogramdd_from_bin_tensors"
)
def _counted(call: Call) -> Found:
    return [call.all().reshape([1] * r.dim()) | LOOSE for r in call.results]


@_rule("isin")
def _among(call: Call) -> Found:
    values, others = (call.mask(one) for one in call.args[:2])
    folded = None if others is None else fold(others, range(others.dim())).reshape(())
    found = union([values, folded])
    return [found if found is None or found.dim() else found.reshape([1] * call.results[0].dim())]


@_rule("repeat_interleave")
def _repeated(call: Call) -> Found | None:
    if call.func._schema.overload_name != "Tensor":
        return _moved(call)
    counts = call.args[0]
    return [call.full(counts).repeat_interleave(counts) | PLACE]


@_rule("bucketize searchsorted")
def _bucketed(call: Call) -> Found:
    values, bounds = call.args[:2] if call.name == "bucketize" else call.args[1::-1]
    found = [call.mask(values)]
    for borders in (call.mask(bounds), call.mask(call.argument("sorter"))):
        if borders is not None:
            found.append(fold(borders, [borders.dim() - 1]))
    return [union(found)]


# ---------------------------------------------------------------- tables and places


def _placed(call: Call, places: Tensor, table: Tensor, dim: int | None = None) -> Tensor:
    """Return the marks that indices add to the mask of the elements that they read.

    A place among samples that leads to a sample's own number adds nothing to it, nor does one in a
    tensor of one number, or one whose entries along `dim` are one and the same. Read out of a table
    of no sample's, the place is itself a value.
    """
    mask = call.full(places)
    alike = _of_one_number(call, table) or (dim is not None and _is_alike(call, table, dim))
    if call.mask(table) is not None or alike:
        return mask & ~PLACE & 0xFF
    if table.dtype in INTEGERS or call.backward:
        return mask
    return mask | (((mask & PLACE) != 0).to(torch.uint8) * ALL)


def _is_alike(call: Call, tensor: Tensor, dim: int) -> bool:
    """Say whether entries along a dimension are one, expanded, or were made alike of no sample."""
    if not tensor.dim() or tensor.shape[dim] < 2 or tensor.stride(dim) == 0:
        return True
    return id(tensor) in call.alike and bool((tensor == tensor.narrow(dim, 0, 1)).all())


def _of_one_number(call: Call, tensor: Tensor) -> bool:
    """Say whether forward has made a tensor of one number, and it still is."""
    return id(tensor) in call.filled and bool((tensor == tensor.flatten()[:1]).all())


def _read(got: Tensor, index: Tensor | None) -> Tensor:
    """Return the mask of elements read at places; an inverse order restores that of the rows."""
    return got & ~LOOSE & 0xFF if index is not None and _leads_back(index) else got


def _leads_back(index: Tensor) -> bool:
    """Say whether places are each of a sample, in the order of the samples."""
    return bool(((index & PLACE) != 0).all()) and bool(((index & SAMPLES) != 0).all())


def _written_at(call: Call, places: Tensor, *, leads: bool) -> Tensor:
    """Return the marks that indices add to the mask of the elements that are written there.

    Args:
        call: of a kernel that writes.
        places: the indices.
        leads: the source, or the target, is the samples' own. Else a place that no sample has
            chosen is itself a value, unless each row is written to equally.
    """
    mask = call.full(places)
    plain = mask & ~PLACE & 0xFF
    chosen = bool((mask & SAMPLES).any())
    if leads or chosen or call.backward or places.dtype not in INTEGERS:
        return plain
    return mask | (((mask & PLACE) != 0).to(torch.uint8) * ALL)


def _takes_turns(places: Tensor, size: int) -> bool:
    """Say whether indices name each row of a dimension, or the same entry of each row."""
    every = torch.unique(places)
    if not len(every) or size % len(every):
        return False
    each = size // len(every)
    rows = torch.arange(len(every), device=every.device)
    return bool((every // each == rows).all() and (every % each == every[0] % each).all())


def _moves_rows(call: Call, dim: int, *others: Any) -> bool:
    """Say whether samples lie along a dimension of one of these operands."""
    for one in others:
        mask = call.mask(one)
        if mask is not None and mask.dim() and varies(mask, dim % mask.dim()):
            return True
    return False


def _piled(base: Tensor, add: Callable[[Tensor, Tensor], Tensor], source: Tensor) -> Tensor:
    """Return the mask of a sum of `source` into `base`, a bit at a time."""
    out = base.clone()
    for bit in range(8):
        one = (source >> bit) & 1
        if bool(one.any()):
            zeros = torch.zeros(base.shape, dtype=torch.int32, device=base.device)
            out |= (add(zeros, one.to(torch.int32)) > 0).to(torch.uint8) << bit
    return out


@_rule("embedding")
def _embedded(call: Call) -> Found:
    table, places = call.args[:2]
    found = _placed(call, places, table).unsqueeze(-1)
    entries = _entries(call, table, places)
    return [found if entries is None else found | entries]


def _entries(call: Call, table: Tensor, places: Tensor) -> Tensor | None:
    """Return the mask of the entries of a table that are read; None where it has none."""
    mask = call.mask(table)
    if mask is None:
        return None
    if mask.shape[0] > 1:
        mask = mask.index_select(0, places.reshape(-1))
        return mask.reshape(*places.shape, mask.shape[-1])
    return mask.reshape([1] * places.dim() + [mask.shape[-1]])


@_rule("embedding_renorm_")
def _entries_renormed(call: Call) -> Found:
    table, places = (call.mask(one) for one in call.args[:2])
    chosen = None if places is None else fold(places, range(places.dim())).reshape(1, 1)
    found = union([None if table is None else fold(table, [1]), chosen])
    return [None if found is None else found & ~PLACE & 0xFF]


@_rule("_embedding_bag _embedding_bag_forward_only")
def _bagged(call: Call) -> Found:
    places, offsets = call.args[1], call.args[2]
    mask, ends = _placed(call, places, call.args[0]), offsets
    borders = call.full(offsets) & ~PLACE & 0xFF
    weights = call.mask(call.argument("per_sample_weights"))
    mask = (mask if weights is None else mask | weights)[:, None]
    entries = _entries(call, call.args[0], places)
    mask = mask if entries is None else mask | entries
    if not call.argument("include_last_offset", default=False):
        ends = torch.cat([offsets, offsets.new_tensor([len(places)])])
        borders = torch.cat([borders, borders.new_zeros(1)])
    bags = []
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        bags.append(fold(mask[begin:end], [0]))  # of none it is 0
    found = torch.cat(bags) | borders[:-1, None] | borders[1:, None]
    return [found] + [None] * (len(call.results) - 1)


@_rule("gather")
def _gathered(call: Call) -> Found:
    x, dim, places = call.args[:3]
    got = call.full(x).gather(dim % max(x.dim(), 1), places)
    return [_read(got, call.mask(places)) | _placed(call, places, x)]


@_rule("index_select")
def _chosen(call: Call) -> Found:
    x, dim, places = call.args[:3]
    dim %= max(x.dim(), 1)
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    found = _read(call.full(x).index_select(dim, places.reshape(-1)), call.mask(places))
    return [found | _placed(call, places, x, dim).reshape(shape)]


@_rule("index_add index_add_ index_copy index_copy_ _index_copy_")
def _added(call: Call) -> Found:
    x, dim, places, source = call.args[:4]
    dim %= max(x.dim(), 1)
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    leads = _takes_turns(places, x.shape[dim]) if x.dim() else True
    leads |= _moves_rows(call, dim, x, source)
    found = call.full(source) | _written_at(call, places, leads=leads).reshape(shape)
    found = _unordered(found)
    return [_piled(call.full(x), lambda base, one: base.index_add_(dim, places, one), found)]


@_rule("index_fill index_fill_")
def _filled_at(call: Call) -> Found:
    x, dim, places, value = call.args[:4]
    dim %= max(x.dim(), 1)
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    leads = _takes_turns(places, x.shape[dim]) if x.dim() else True
    leads |= _moves_rows(call, dim, x)
    found = _written_at(call, places, leads=leads).reshape(shape)
    if (mask := call.mask(value)) is not None:
        found = found | mask.reshape([1] * x.dim())
    size = [places.numel() if d == dim else n for d, n in enumerate(x.shape)]
    found = _unordered(found).expand(size).contiguous()
    return [call.full(x).index_copy(dim, places.reshape(-1), found)]


@_rule("take")
def _picked(call: Call) -> Found:
    x, places = call.args[:2]
    return [call.full(x).reshape(-1)[places] | _placed(call, places, x)]


@_rule("put put_")
def _put(call: Call) -> Found:
    x, places, source = call.args[:3]
    leads = _takes_turns(places, x.numel())
    leads |= any(
        mask is not None and _varies_somewhere(mask) for mask in map(call.mask, (x, source))
    )
    found = _written_at(call, places, leads=leads) | call.full(source).reshape(places.shape)
    flat, found = call.full(x).reshape(-1), _unordered(found).reshape(-1)
    put = torch.ops.aten.index_put.default
    add = bool(call.argument("accumulate", default=False))
    if add:
        got = _piled(flat, lambda base, one: put(base, [places.reshape(-1)], one, True), found)
    else:
        got = put(flat.contiguous(), [places.reshape(-1)], found)
    return [got.reshape(x.shape)]


def _varies_somewhere(mask: Tensor) -> bool:
    return any(varies(mask, d) for d in range(mask.dim()))


@_rule("scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ _scatter_reduce")
def _scattered(call: Call) -> Found:
    x, dim, places = call.args[:3]
    dim %= max(x.dim(), 1)
    source = call.argument("src", "value")
    lines = places.movedim(dim, -1).flatten(0, -2) if places.dim() > 1 else places.reshape(1, -1)
    leads = bool(x.dim()) and bool((lines == lines[:1]).all())
    leads = leads and _takes_turns(lines[:1], x.shape[dim])
    leads |= _moves_rows(call, dim, x, source)
    found = _written_at(call, places, leads=leads)
    if isinstance(source, Tensor) and source.dim():
        found = found | call.full(source)[tuple(slice(0, n) for n in places.shape)]
    found = _unordered(found)
    piled = _piled(call.full(x), lambda base, one: base.scatter_add_(dim, places, one), found)
    return [_lines(piled, dim, call.mask(places))]


def _lines(found: Tensor, dim: int, index: Tensor | None) -> Tensor:
    """Return the mask of lines of which one sample has chosen a place: it has left out the others.

    If several choose in one line, or places carry samples, the source decides.
    """
    if index is None or bool((index & PLACE).any()) or not found.dim():
        return found
    line = fold(found & SAMPLES, [dim % found.dim()])
    return found | torch.where((line & (line - 1)) == 0, line, 0)


@_rule("masked_scatter masked_scatter_")
def _poured(call: Call) -> Found:
    x, chosen, source = call.args[:3]
    shape = call.results[0].shape
    chosen = chosen.expand(shape)
    flat = call.full(source).reshape(-1)
    found = (call.full(x).expand(shape) | call.full(call.args[1]).expand(shape)).clone()
    found[chosen] |= flat[: int(chosen.sum())]
    by = call.mask(call.args[1])
    if call.mask(source) is None and by is not None and several(fold(by, range(by.dim()))):
        found[chosen] |= ALL  # of a table that belongs to none, each takes what others leave
    return [found & ~(LOOSE | PLACE) & 0xFF]


@_rule("masked_scatter_backward")
def _poured_back(call: Call) -> Found:
    x, chosen, sizes = call.args[:3]
    chosen = chosen.expand(x.shape)
    count = call.results[0].numel()
    found = torch.zeros(count, dtype=torch.uint8, device=x.device)
    found[: int(chosen.sum())] = (call.full(x) | call.full(call.args[1]).expand(x.shape))[chosen]
    return [found.reshape(list(sizes))]


def collides(call: Call) -> bool:
    """Say whether samples write to places that they choose themselves, among those of others.

    A few rows may happen to choose different ones. Places that distinguish samples (an arange, an
    order, a mask of the rows) lead nowhere else.
    """
    if call.name in WRITES:
        dim, places = call.args[1:3]
        mask = call.mask(places)
        chosen = mask is not None and not bool((mask & PLACE).any()) and total(mask) & SAMPLES
        return bool(chosen) and mask is not None and mask.shape[dim % max(mask.dim(), 1)] > 1
    if call.name not in PUTS:
        return False
    found = [one for one in call.args[1] if one is not None and call.mask(one) is not None]
    free = [one for one in found if one.dtype not in (torch.bool, torch.uint8)]
    if len(free) < len(found):
        return False
    marks = [call.full(one) for one in free]
    varies = any(several(fold(mask, range(mask.dim()))) for mask in marks)
    return varies and not any(bool((mask & PLACE).any()) for mask in marks)


def by_position(call: Call, rows: int) -> bool:
    """Say whether rows are read or written at some places only, which no sample has chosen.

    Args:
        call: of a kernel.
        rows: of the forward; so many places, or so many times as many, are those of all rows.
    """
    if call.name not in (WRITES | PUTS | CHOICES):
        return False
    integers = [t for t in tree_leaves(call.args[1:]) if isinstance(t, Tensor)]
    masks = [(t.numel(), call.mask(t)) for t in integers if t.dtype in INTEGERS]
    places = [n for n, mask in masks if mask is not None and total(mask) == PLACE]
    return any(n % rows for n in places)


def at_fixed_places(call: Call, *, square: bool = False) -> bool:
    """Say whether rows are read or written at places that no sample has chosen.

    So are all rows by an `arange` of them, until its length has shown that it is one.

    Args:
        call: of a kernel.
        square: a diagonal of rows against rows counts, too. Default False: samples lie along both.
    """
    x = call.args[0] if call.args else None
    mask = call.mask(x)
    if not isinstance(x, Tensor) or mask is None or not x.dim():
        return False
    if call.name in DIAGONALS:
        dims = (0, 1) if call.name == "diagonal_scatter" else (-2, -1)
        lies = [mask.shape[d] > 1 and varies(mask, d % x.dim()) for d in dims if x.dim() > 1]
        return any(lies) and (square or not all(lies))
    if call.name in PUTS or call.name in ("index", "_unsafe_index"):
        return _indexes_rows(call, mask)
    if call.name not in WRITES | CHOICES | PLACES or call.name in ("take", "put"):
        return False
    dim = call.argument("dim", default=0) % x.dim()
    index = call.argument("index")
    free = not isinstance(index, Tensor) or call.mask(index) is None
    return free and mask.shape[dim] > 1 and varies(mask, dim)


def _indexes_rows(call: Call, mask: Tensor) -> bool:
    dim = 0
    for one in call.args[1]:
        spanned = one.dim() if one is not None and one.dtype in (torch.bool, torch.uint8) else 1
        free = one is not None and call.mask(one) is None
        if free and any(mask.shape[d] > 1 and varies(mask, d) for d in range(dim, dim + spanned)):
            return True
        dim += spanned
    return False


DIAGONALS = frozenset("tril triu tril_ triu_ diagonal_scatter".split())
PLACES = frozenset(("select_scatter", "slice_scatter"))
"""Kernels that write at a place which a number says."""

CHOICES = frozenset(
    "index _unsafe_index index_select gather index_fill index_fill_ take put".split()
)
WRITES = frozenset(
    "index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_ "
    "scatter_reduce scatter_reduce_".split()
)
PUTS = frozenset("index_put index_put_ _index_put_impl_ _unsafe_index_put".split())
AT_PLACES = WRITES | frozenset("index_fill index_fill_ put put_".split())
"""Kernels that write at places, one index for each."""


def _unordered(found: Tensor) -> Tensor:
    """Return the mask of elements written to chosen places: these are in no order any more.

    A place that is written as a number is still one, and its index shows the sample.
    """
    return found & ~LOOSE & 0xFF


@_rule("index _unsafe_index index_put index_put_ _unsafe_index_put _index_put_impl_")
def _indexed(call: Call) -> Found:
    x, places = call.args[0], call.args[1]
    writes = "put" in call.name
    indices: list[Tensor | None] = []
    marks: list[Tensor] = []
    dims: list[int] = []
    chosen = False
    for one in places:
        if one is None:
            indices.append(None)
        elif one.dtype in (torch.bool, torch.uint8):
            for part in one.nonzero(as_tuple=True):
                dims.append(len(indices))
                indices.append(part)
            if call.mask(one) is not None:
                marks.append(call.full(one)[one.bool()] & ~PLACE & 0xFF)
            chosen = True
        else:
            dims.append(len(indices))
            indices.append(one)
            if call.mask(one) is not None:
                own = not writes or _puts_rows(call, one, len(indices) - 1)
                at = len(indices) - 1
                marks.append(
                    _written_at(call, one, leads=own) if writes else _placed(call, one, x, at)
                )
    got = torch.ops.aten.index.Tensor(call.full(x), indices)
    found = _of_places(got, indices, marks, dims)
    if not writes:
        for one in places:
            got = _read(got, call.mask(one))
        got = got | found
        return [got | (LOOSE if chosen and _among_samples(call) else 0)]
    source = _unordered(call.full(call.args[2]).expand(got.shape) | found)
    if call.argument("accumulate", default=False):
        put = torch.ops.aten.index_put_.default
        got = _piled(call.full(x), lambda base, one: put(base, indices, one, True), source)
    else:
        got = torch.ops.aten.index_put.default(call.full(x).contiguous(), indices, source)
    return [_left_out(call, got)]


def _puts_rows(call: Call, places: Tensor, dim: int) -> bool:
    """Say whether indices of a dimension lead to the rows of samples, or name each row alike."""
    x, every, source = call.args[:3]
    mask, value = call.mask(x), call.mask(source)
    if (value is not None and _varies_somewhere(value)) or (mask is not None and varies(mask, dim)):
        return True
    pure = [
        one
        for one in every
        if (m := call.mask(one)) is not None and bool((m & PLACE).any()) and not total(m) & SAMPLES
    ]
    return len(pure) < 2 and _takes_turns(places, x.shape[dim])


def _among_samples(call: Call) -> bool:
    """Say whether rows are chosen among those of several samples, however many are."""
    bools = [one for one in call.args[1] if one is not None and one.dtype in CHOOSERS]
    dim = next(at for at, one in enumerate(call.args[1]) if one is bools[0])
    mask = call.mask(call.args[0])
    dims = range(dim, dim + bools[0].dim())
    own = mask is not None and any(mask.shape[d] > 1 and varies(mask, d) for d in dims)
    marks = [mask for one in bools if (mask := call.mask(one)) is not None]
    return own or any(varies(mask, d) for mask in marks for d in range(mask.dim()))


CHOOSERS = (torch.bool, torch.uint8)
"""Types of masks that choose."""


def _left_out(call: Call, got: Tensor) -> Tensor:
    """Return the mask after a write to chosen places: the omitted places depend on them, too."""
    dim = 0
    for one in call.args[1]:
        bools = one is not None and one.dtype in (torch.bool, torch.uint8)
        mask = call.mask(one)
        if bools and mask is not None:
            left = call.full(one) & SAMPLES
            after = [1] * (got.dim() - dim - one.dim())
            got = got | left.reshape([1] * dim + list(one.shape) + after)
        elif mask is not None:
            got = _lines(got, dim, mask)
        dim += one.dim() if bools else 1
    return got


def _of_places(
    got: Tensor, indices: list[Tensor | None], marks: list[Tensor], dims: list[int]
) -> Tensor:
    """Return the marks of indices, laid out as the elements that they read."""
    together = dims and dims == list(range(dims[0], dims[0] + len(dims)))
    at = dims[0] if together else 0
    every = [i.shape for i in indices if i is not None]
    shape = torch.broadcast_shapes(*every)  # type: ignore[no-untyped-call]
    if not marks:
        return torch.zeros((), dtype=torch.uint8, device=got.device)
    found = union(torch.broadcast_to(mark, shape) for mark in marks)
    assert found is not None
    return found.reshape(list(shape) + [1] * (got.dim() - at - len(shape)))


# ---------------------------------------------------------------- products


@_rule(
    "mm bmm addmm baddbmm addbmm mv addmv dot vdot linear _linear addmm_ baddbmm_ _addmm_activation"
)
def _multiplied(call: Call) -> Found | None:
    if call.name == "addbmm":
        return None
    adds = call.name.startswith(("add", "badd", "_add"))
    a, b = call.args[1:3] if adds else call.args[:2]
    of_a, of_b, found = call.mask(a), call.mask(b), list[Tensor | None]()
    if call.name in ("linear", "_linear"):
        if of_b is not None or (len(call.args) > 2 and call.mask(call.args[2]) is not None):
            return None
        assert of_a is not None
        return [fold(of_a, [a.dim() - 1])]
    if of_a is not None:
        one = fold(of_a, [a.dim() - 1])
        found.append(one if b.dim() > 1 else one.squeeze(-1))
    if of_b is not None:
        one = fold(of_b, [b.dim() - (2 if b.dim() > 1 else 1)])
        if a.dim() == 1 and b.dim() == 1:
            one = one.reshape(())
        found.append(one)
    if adds and call.mask(call.args[0]) is not None:
        found.append(call.mask(call.args[0]))
    return [union(found)]


@_rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "cudnn_batch_norm"
)
def _normed_by_constants(call: Call) -> Found | None:
    x = call.args[0]
    if len(call.masks) > 1 or call.mask(x) is None:
        return None
    return [call.mask(x)] + [None] * (len(call.results) - 1)


@_rule("native_layer_norm")
def _layer_normed(call: Call) -> Found | None:
    x = call.args[0]
    if call.mask(x) is None:
        return None
    dims = range(x.dim() - len(call.args[1]), x.dim())
    found = fold(union([call.mask(x)]), dims)  # type: ignore[arg-type]
    more = [call.mask(a) for a in call.args[2:4]]
    return [union([found, *more]), found, found]


@_rule(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable"
)
def _attended(call: Call) -> Found | None:
    query = call.args[0]
    found: list[Tensor | None] = []
    for at, one in enumerate(call.args[:3]):
        mask = call.mask(one)
        if mask is None:
            continue
        if one.shape[:1] != query.shape[:1] and mask.shape[0] != 1:
            return None
        if one.shape[1] != query.shape[1]:  # heads that are shared
            mask = fold(mask, [1])
        dims = [one.dim() - 1] if at == 0 else [one.dim() - 2, one.dim() - 1]
        found.append(fold(mask, dims))
    for one in (*call.args[3:], *call.kwargs.values()):
        mask = call.mask(one)
        if mask is not None:
            mask = fold(mask, [mask.dim() - 1])
            found.append(mask.reshape([1] * (4 - mask.dim()) + list(mask.shape)))
    joined = union(found)
    assert joined is not None
    rows = [
        fold(joined, range(1, joined.dim())).reshape([-1] + [1] * (r.dim() - 1))
        if r.dim() and r.shape[0] == query.shape[0]
        else None
        for r in call.results[1:]
    ]
    return [joined, *rows]


# ---------------------------------------------------------------- by rows


@_rule("_ctc_loss _ctc_loss_backward")
def _aligned(call: Call) -> Found | None:
    """Each sample's steps [T, n, C] are aligned with its own labels."""
    steps, labels, _, lengths = call.args[1:5] if "backward" in call.name else call.args[:4]
    if steps.dim() != 3:
        return None
    found = []
    for one in tree_leaves((call.args, call.kwargs)):
        mask = call.mask(one)
        if mask is None:
            continue
        if one is steps:
            found.append(fold(mask, [0, 2], keep=False))
        elif one is labels and one.dim() == 1:  # those of all samples, one after the other
            found.append(_by_lengths(call.full(one), [int(length) for length in lengths]))
        else:
            found.append(fold(mask, range(1, mask.dim()), keep=False))
    rows = union(found)
    assert rows is not None
    return [
        rows.reshape([1, -1, 1] if r.shape == steps.shape else [-1] + [1] * (r.dim() - 1))
        for r in call.results
    ]


def _by_lengths(mask: Tensor, lengths: list[int]) -> Tensor:
    """Return the union of each of some lines that lie one after the other, which is their order."""
    if sum(lengths) != len(mask):
        return fold(mask, [0]) | ALL
    lines = [fold(one, [0]) for one in mask.split(lengths)]  # type: ignore[no-untyped-call]
    return torch.cat(lines) & ~LOOSE & 0xFF


@_rule(
    "convolution mkldnn_convolution _convolution cudnn_convolution max_pool2d_with_indices "
    "max_pool3d_with_indices max_pool1d_with_indices avg_pool1d avg_pool2d avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d "
    "upsample_bicubic2d upsample_linear1d upsample_trilinear3d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa _upsample_nearest_exact2d grid_sampler_2d grid_sampler_3d "
    "native_group_norm thnn_conv2d _slow_conv2d_forward slow_conv3d_forward "
    "convolution_backward max_pool2d_with_indices_backward avg_pool2d_backward "
    "_adaptive_avg_pool2d_backward upsample_bilinear2d_backward upsample_nearest2d_backward "
    "native_group_norm_backward"
)
def _by_rows(call: Call) -> Found | None:
    x = call.args[0]
    operands = [t for t in tree_leaves((call.args, call.kwargs)) if call.mask(t) is not None]
    if any(t.dim() != x.dim() or t.shape[0] != x.shape[0] for t in operands):
        return None
    groups = call.argument("groups", "group", default=1)
    if len(operands) == 1 and operands[0] is x and groups > 1 and "backward" not in call.name:
        return _by_groups(call, x, groups)
    if "conv" in call.name:  # filters that samples have made are no rows
        filters = call.args[2 if "backward" in call.name else 1]
        if call.mask(filters) is not None:
            return None
    rows = union(_row_of(call, t) for t in operands)
    assert rows is not None
    if "backward" not in call.name:
        return [_like(rows, r) for r in call.results]
    parameters = fold(rows, [0])
    wanted = call.args[-1] if isinstance(call.args[-1], list | tuple) else [True]
    gave = bool(wanted[0]) if call.name == "convolution_backward" else True
    return [_like(rows if at == 0 and gave else parameters, r) for at, r in enumerate(call.results)]


def _by_groups(call: Call, x: Tensor, groups: int) -> Found:
    """Return the masks of results by group of channels: each depends on the same group of `x`."""
    mask = call.mask(x)
    assert mask is not None
    mask = fold(mask, range(2, mask.dim()), keep=False)
    if mask.shape[1] > 1:
        mask = fold(mask.unflatten(1, (groups, -1)), [2], keep=False)  # type: ignore[no-untyped-call]
    found: list[Tensor | None] = []
    for one in call.results:
        each = mask
        if mask.shape[1] > 1:
            each = mask.repeat_interleave(one.shape[1] // groups, 1)
        found.append(each.reshape([*each.shape, *[1] * (one.dim() - 2)]))
    return found


def _row_of(call: Call, tensor: Tensor) -> Tensor:
    mask = call.mask(tensor)
    assert mask is not None
    return fold(mask, range(1, mask.dim()), keep=False)


@_rule("fractional_max_pool2d fractional_max_pool3d")
def _pooled_at_random(call: Call) -> Found:
    masks = [call.mask(one) for one in tree_leaves(call.args) if call.mask(one) is not None]
    rows = union(fold(m, range(1, m.dim()), keep=False) for m in masks if m is not None)
    assert rows is not None
    return [_like(rows, r) for r in call.results]


def _like(rows: Tensor, result: Tensor) -> Tensor | None:
    if not result.dim():
        return None
    if rows.shape[0] not in (1, result.shape[0]):
        rows = fold(rows, [0])
    return rows.reshape([-1] + [1] * (result.dim() - 1))


@_rule(
    "linalg_lstsq _linalg_solve_ex linalg_inv_ex linalg_cholesky_ex _linalg_svd _linalg_eigh "
    "linalg_eig _linalg_eigvals linalg_qr linalg_lu_factor_ex linalg_lu linalg_lu_solve "
    "_linalg_det _linalg_slogdet linalg_solve_triangular triangular_solve cholesky cholesky_solve "
    "cholesky_inverse linalg_matrix_exp linalg_householder_product linalg_ldl_factor_ex "
    "linalg_ldl_solve geqrf ormqr lu_unpack"
)
def _by_systems(call: Call) -> Found:
    """Return the masks of kernels on matrices: the last two dimensions mix, the others do not.

    LAPACK is not tested: it refuses NaN, or prints errors.
    """
    columns = _by_columns(call) if call.name in SOLVES else None
    if columns is not None:
        return [columns, *[None] * (len(call.results) - 1)]
    operands = [one for one in tree_leaves((call.args, call.kwargs)) if isinstance(one, Tensor)]
    rank = max(one.dim() for one in operands)
    matrix = call.args[0].shape
    found: list[Tensor | None] = []
    for one in operands:
        mask = call.mask(one)
        if mask is None:
            continue
        vectors = one.dim() < len(matrix) and one.shape == matrix[:-1]  # right sides, pivots, tau
        vectors |= one.dtype == torch.int32 or (call.name in TAUS and one is call.args[1])
        last = 1 if vectors else 2
        mask = fold(mask, range(mask.dim() - last, mask.dim()), keep=False)
        found.append(mask.reshape([1] * (rank - 2 - mask.dim()) + list(mask.shape)))
    systems = union(found)
    assert systems is not None
    marks = [systems.reshape([*systems.shape, *[1] * (r.dim() - rank + 2)]) for r in call.results]
    return [mark if r.numel() else None for mark, r in zip(marks, call.results, strict=True)]


SOLVES = {
    "_linalg_solve_ex": 1,
    "linalg_solve_triangular": 1,
    "cholesky_solve": 0,
    "linalg_lu_solve": 2,
}
"""Kernels of systems of equations: where their right sides are among the operands."""


def _by_columns(call: Call) -> Tensor | None:
    """Return the mask of the solutions, each of its own right side; None where that is not all."""
    at, x = SOLVES[call.name], call.results[0]
    right, mask = call.args[at], call.mask(call.args[at])
    systems = [one for k, one in enumerate(call.args[:3]) if k != at]
    if mask is None or any(call.mask(one) is not None for one in systems):
        return None
    if right.dim() < max(x.dim(), 2):
        return None
    if call.name == "_linalg_solve_ex" and right.shape == call.args[0].shape[:-1]:
        return None  # vectors, a system each
    return fold(mask, [right.dim() - (2 if call.argument("left", default=True) else 1)])


TAUS = frozenset(("linalg_householder_product", "ormqr"))
"""Kernels whose second operand has a vector for each matrix."""


@_rule("mkldnn_rnn_layer")
def _recurrent(call: Call) -> Found:
    x = call.args[0]  # [T, n, C], and states [n, H]
    found: list[Tensor | None] = []
    for one in tree_leaves(call.args):
        mask = call.mask(one)
        if mask is not None and one.is_floating_point():
            if one.dim() == 3:
                found.append(fold(mask, [0, 2]))
            elif one.dim() == 2 and one.shape[0] == x.shape[1]:
                found.append(fold(mask, [1]).unsqueeze(0))
    rows = union(found)
    if rows is None:
        return [None] * len(call.results)
    return [
        rows if r.dim() == 3 else rows[0] if r.dim() == 2 and r.shape[0] == x.shape[1] else None
        for r in call.results
    ]


def sliced(call: Call, found: Iterable[Tensor]) -> tuple[list[Tensor], str]:
    """Return the masks of views cut along the samples, and the call if the cut is a choice.

    A cut by position leaves CUT. One of rows that samples have sorted is a choice among them: then
    all contribute to it.
    """
    views, x = list(found), call.args[0]
    mask = call.mask(x)
    if mask is None or call.name not in SLICES or not x.dim():
        return views, ""
    dim = call.argument("dim", default=0) % x.dim()
    if mask.shape[dim] == 1 or not varies(mask, dim) or _takes_all(call, dim):
        return views, ""
    if bool((mask & LOOSE).any()) and call.name != "unbind" and not call.backward:
        said = f"{call.name} of samples that nonzero, sort or topk has put in an order"
        return [view | ALL for view in views], said
    return [view | (CUT * (view != 0)).to(torch.uint8) for view in views], ""


SLICES = frozenset(("slice", "select", "split", "split_with_sizes", "unbind", "narrow", "chunk"))


def varies(mask: Tensor, dim: int) -> bool:
    """Say whether other samples have had a part in it from place to place along a dimension."""
    own, every = mask & SAMPLES, fold(mask, [dim]) & SAMPLES
    return bool(((own != every) & (own != 0)).any())  # what belongs to none is beside, not apart


def _takes_all(call: Call, dim: int) -> bool:
    if call.name == "split":
        return bool(call.argument("split_size") >= call.args[0].shape[dim])
    begin, end = call.argument("start"), call.argument("end")
    every = begin in (None, 0) and (end is None or end >= call.args[0].shape[dim])
    return call.name == "slice" and every and call.argument("step", default=1) == 1
