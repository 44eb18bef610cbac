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

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from anybatch.execution.proof import (
    kernel_call,
    rules_products,  # noqa: F401, its rules are in the table
)
from anybatch.execution.proof import masks as sets
from anybatch.execution.proof.kernel_call import Call, Found, leads_back, rule, valued
from anybatch.execution.proof.masks import ALL, INTEGERS, LOOSE, PLACE, SAMPLES, fold, total, union
from anybatch.execution.proof.rules_places import AT_PLACES
from anybatch.memory.meter import tensors_in


def masks_after(call: Call) -> Found | None:
    """Return the masks of the results; None where no rule covers the kernel."""
    rule = kernel_call.RULES.get(call.name)
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
    return name in kernel_call.RULES or _is_pointwise(func)


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


# ---------------------------------------------------------------- made without samples


@rule(
    "empty_like zeros_like ones_like full_like new_empty "
    "new_zeros new_ones new_full new_empty_strided new_zeros_strided zero_ sym_size sym_stride "
    "sym_numel eye_ scalar_tensor is_same_size"
)
def _fresh(call: Call) -> Found:
    return [None] * len(call.results)


@rule(
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


@rule("fill_ fill")
def _filled(call: Call) -> Found:
    mask = call.mask(call.argument("value"))
    return [None if mask is None else mask.reshape([1] * call.results[0].dim())]


@rule("copy_ copy")
def _copied(call: Call) -> Found:
    return [call.mask(call.argument("src"))]


# ---------------------------------------------------------------- pointwise


@rule("_to_copy clone lift_fresh lift")
def _converted(call: Call) -> Found:
    mask = call.mask(call.args[0])
    if mask is None or call.results[0].dtype != torch.bool:
        return [mask]
    return [valued(mask, torch.bool)]  # whether it is the first one


@rule(
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
        mask = valued(mask, call.results[0].dtype) if call.results else mask
    return [mask if r.numel() and r.dim() >= mask.dim() else None for r in call.results]


def _in_one_order(call: Call, every: Tensor) -> Tensor:
    """Return a union of masks, with all samples where rows in an order meet those that are in none.

    That the order is the samples' own is chance: where it is another, a sample meets another one.
    """
    if not sets.has(every, LOOSE):
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


@rule("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss")
def _loss_by_elements(call: Call) -> Found:
    mask = union(call.masks.values())
    assert mask is not None
    if call.results[0].dim() == mask.dim() and call.argument("reduction", default=1) == 0:
        return [mask]
    return [call.all().reshape([1] * call.results[0].dim())]


@rule("nll_loss_forward nll_loss2d_forward")
def _loss_of_classes(call: Call) -> Found | None:
    """Return the masks of a loss of logarithms of probabilities, and of its sum of weights."""
    masks = [call.mask(one) for one in call.args[:3]]
    found = [mask for mask in masks if mask is not None]
    if any(bool((mask & ~SAMPLES & 0xFF).any()) for mask in found):
        return None  # places among samples, or an order of theirs
    totals = [None if m is None else fold(m, range(m.dim()), keep=False) for m in masks]
    if call.argument("reduction") != 0:
        return [union(totals)] * 2  # the weight counts the rows, whatever their classes are
    rows, target = masks[:2]
    classes = 1 if call.args[0].dim() > 1 else 0
    own = None if rows is None else fold(rows, [classes], keep=False)
    return [union((own, target, totals[2])), None]


LISTED = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf "
    "erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
)
"""Kernels over lists of tensors, which compute with the first ones, with the second ones, ..."""


@rule(" ".join(f"_foreach_{name} _foreach_{name}_" for name in LISTED.split()))
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
        found.append(mask if mask is None or call.backward else valued(mask, one.dtype))
    return found


@rule("_foreach_norm _foreach_max _foreach_powsum")
def _listed_totals(call: Call) -> Found:
    masks = [call.mask(one) for one in call.args[0]]
    return [None if mask is None else fold(mask, range(mask.dim()), keep=False) for mask in masks]


@rule(
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


@rule("_fused_moving_avg_obs_fq_helper")
def _observed(call: Call) -> Found:
    """An observer takes its range from all numbers, where it is on."""
    if bool(call.args[1].any()):
        every = (*call.results, *call.written)
        return [call.all().reshape([1] * one.dim()) for one in every]
    mask = call.mask(call.args[0])
    return [mask] * len(call.results) + [call.mask(one) for one in call.written]


@rule("multi_margin_loss multilabel_margin_loss_forward")
def _margins(call: Call) -> Found:
    """Return the masks of margin losses by row: a satisfied margin costs nothing and hides NaN."""
    x, target = call.args[:2]
    if x.dim() < 2:
        return [call.all().reshape([1] * r.dim()) for r in call.results]
    rows = kernel_call.rows_of(call, (x, target))
    first = rows if call.results[0].dim() else fold(rows, [0], keep=False)
    return [first, *(rows[:, None] for _ in call.results[1:])]


# ---------------------------------------------------------------- moves


@rule(
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
    return [*tensors_in(found)]


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
    return kernel_call.dims_of(call.argument("dim", "dims", "axis"), call.args[0].dim())


@rule(REDUCED)
def _reduced(call: Call) -> Found:
    x = call.args[0]
    mask = call.mask(x)
    if mask is None or any(isinstance(a, Tensor) for a in call.args[1:]):
        return [call.all().reshape([1] * r.dim()) for r in call.results]
    dims = reduced(call)
    folded = fold(mask, dims)
    dropped = fold(folded, dims, keep=False)
    return [folded if r.dim() == x.dim() else dropped for r in call.results]


@rule(
    "_softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin _cummax_helper "
    "_cummin_helper _softmax_backward_data _log_softmax_backward_data cumsum_ cumprod_ "
    "_safe_softmax _fft_r2c _fft_c2r _fft_c2c renorm renorm_ multinomial _sample_dirichlet"
)
def _along(call: Call) -> Found:
    """Return the union along the dimensions that are mixed: of draws from rows the last one.

    renorm rescales slices by all other dimensions: a NaN norm is not too large, so NaN would not
    spread.
    """
    mask = union(call.masks.values())
    assert mask is not None
    rank, dim = mask.dim(), call.argument("dim", default=-1)
    dims = [d % rank for d in ([dim] if isinstance(dim, int) else dim)] if rank else []
    if call.name.startswith("renorm"):
        dims = [d for d in range(rank) if d not in dims]
    return [fold(mask, dims)] * len(call.results)


# ---------------------------------------------------------------- order and choice


@rule("sort argsort msort topk")
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
    back = x.dtype in INTEGERS and leads_back(mask)
    places = moved & ~LOOSE & 0xFF if back else moved  # an order of an order is its inverse
    return [moved] * (len(call.results) - 1) + [places | PLACE]


@rule("_pack_padded_sequence")
def _packed(call: Call) -> Found:
    x, lengths = call.args[:2]
    first = call.argument("batch_first")
    data, _ = torch._pack_padded_sequence(call.full(x).contiguous(), lengths, first)
    counts = call.mask(lengths)
    return [data, None if counts is None else fold(counts, range(counts.dim())).reshape(1)]


@rule("nonzero")
def _nonzero(call: Call) -> Found:
    x = call.args[0]
    mask = call.mask(x)
    assert mask is not None
    across = mask.numel() > 1
    found = call.full(x)[x != 0]
    marks = LOOSE | PLACE if across and found.numel() else 0
    return [(found | marks)[:, None].expand(call.results[0].shape)]


@rule("masked_select")
def _selected(call: Call) -> Found | None:
    x, chosen = call.args[:2]
    if x.shape != chosen.shape:
        return None
    return [(call.full(x) | call.full(chosen))[chosen] | LOOSE]


@rule(
    "bincount histc _unique2 unique_dim unique_consecutive histogram _histogramdd_bin_edges "
    "_histogramdd_from_bin_cts _histogramdd_from_bin_tensors"
)
def _counted(call: Call) -> Found:
    return [call.all().reshape([1] * r.dim()) | LOOSE for r in call.results]


@rule("isin")
def _among(call: Call) -> Found:
    values, others = (call.mask(one) for one in call.args[:2])
    folded = None if others is None else fold(others, range(others.dim())).reshape(())
    found = union([values, folded])
    return [found if found is None or found.dim() else found.reshape([1] * call.results[0].dim())]


@rule("repeat_interleave")
def _repeated(call: Call) -> Found | None:
    if call.func._schema.overload_name != "Tensor":
        return _moved(call)
    counts = call.args[0]
    return [call.full(counts).repeat_interleave(counts) | PLACE]


@rule("bucketize searchsorted")
def _bucketed(call: Call) -> Found:
    values, bounds = call.args[:2] if call.name == "bucketize" else call.args[1::-1]
    found = [call.mask(values)]
    for borders in (call.mask(bounds), call.mask(call.argument("sorter"))):
        if borders is not None:
            found.append(fold(borders, [borders.dim() - 1]))
    return [union(found)]
