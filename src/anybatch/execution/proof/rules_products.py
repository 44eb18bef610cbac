"""Rules of products and of kernels by rows: sums over shared dimensions, and windows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from anybatch.core.modules import name_of
from anybatch.execution.proof.kernel_call import Call, Found, rows_of, rule, varies
from anybatch.execution.proof.masks import ALL, CUT, LOOSE, fold, several, union


@rule("mm bmm addmm baddbmm mv addmv dot vdot linear _linear addmm_ baddbmm_ _addmm_activation")
def _multiplied(call: Call) -> Found | None:
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


@rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "cudnn_batch_norm"
)
def _normed_by_constants(call: Call) -> Found | None:
    x = call.args[0]
    if len(call.masks) > 1 or call.mask(x) is None:
        return None
    return [call.mask(x)] + [None] * (len(call.results) - 1)


@rule("native_layer_norm")
def _layer_normed(call: Call) -> Found | None:
    x = call.args[0]
    if call.mask(x) is None:
        return None
    dims = range(x.dim() - len(call.args[1]), x.dim())
    found = fold(union([call.mask(x)]), dims)  # type: ignore[arg-type]
    more = [call.mask(a) for a in call.args[2:4]]
    return [union([found, *more]), found, found]


@rule(
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


@rule("_ctc_loss _ctc_loss_backward")
def _aligned(call: Call) -> Found | None:
    """Each sample's steps [T, n, C] are aligned with its own labels."""
    steps, labels, _, lengths = call.args[1:5] if "backward" in call.name else call.args[:4]
    if steps.dim() != 3:
        return None
    found = []
    for one in call.operands:
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


@rule(
    "convolution mkldnn_convolution _convolution cudnn_convolution max_pool2d_with_indices "
    "max_pool3d_with_indices max_pool1d_with_indices avg_pool1d avg_pool2d avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d "
    "upsample_bicubic2d upsample_linear1d upsample_trilinear3d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa _upsample_nearest_exact2d grid_sampler_2d grid_sampler_3d "
    "native_group_norm thnn_conv2d _slow_conv2d_forward slow_conv3d_forward "
    "convolution_backward max_pool2d_with_indices_backward avg_pool2d_backward "
    "_adaptive_avg_pool2d_backward upsample_bilinear2d_backward upsample_nearest2d_backward "
    "native_group_norm_backward fractional_max_pool2d fractional_max_pool3d"
)
def _by_rows(call: Call) -> Found | None:
    x = call.args[0]
    operands = [t for t in call.operands if call.mask(t) is not None]
    others = any(t.dim() != x.dim() or t.shape[0] != x.shape[0] for t in operands)
    if others and not call.name.startswith("fractional"):  # whose places of windows are drawn
        return None
    groups = call.argument("groups", "group", default=1)
    if len(operands) == 1 and operands[0] is x and groups > 1 and "backward" not in call.name:
        return _by_groups(call, x, groups)
    if "conv" in call.name:  # filters that samples have made are no rows
        filters = call.args[2 if "backward" in call.name else 1]
        if call.mask(filters) is not None:
            return None
    rows = rows_of(call, operands)
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


def _like(rows: Tensor, result: Tensor) -> Tensor | None:
    if not result.dim():
        return None
    if rows.shape[0] not in (1, result.shape[0]):
        rows = fold(rows, [0])
    return rows.reshape([-1] + [1] * (result.dim() - 1))


@rule(
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
    rank = max(one.dim() for one in call.operands)
    matrix = call.args[0].shape
    found: list[Tensor | None] = []
    for one in call.operands:
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


@rule("mkldnn_rnn_layer")
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
    if mask.shape[dim] == 1 or not varies(mask, dim):
        return views, ""
    size = x.shape[dim]
    if call.argument("split_size") >= size if call.name == "split" else takes_all(call, size):
        return views, ""
    if bool((mask & LOOSE).any()) and call.name != "unbind" and not call.backward:
        said = f"{call.name} of samples that nonzero, sort or topk has put in an order"
        return [view | ALL for view in views], said
    return [view | (CUT * (view != 0)).to(torch.uint8) for view in views], ""


SLICES = frozenset(("slice", "select", "split", "split_with_sizes", "unbind", "narrow", "chunk"))


def takes_all(call: Call, size: int) -> bool:
    """Say whether a slice takes all of a dimension, which is so long or longer."""
    begin, end = call.argument("start"), call.argument("end")
    every = begin in (None, 0) and (end is None or end >= size)
    return call.name == "slice" and every and call.argument("step", default=1) == 1


# ---------------------------------------------------------------- linear in a sum

TABLED = frozenset("embedding_dense_backward index_put index_put_ index_add index_add_".split())
"""Kernels that add the gradients of rows to those of the entries that they had chosen."""


def _for_places(call: Call) -> list[Tensor]:
    """Return the gradients for places of samples; none where the places belong to no sample."""
    if call.name.startswith("embedding"):
        grad, places = call.args[0], [call.args[1]]
    elif call.name.startswith("index_add"):
        grad, places = call.args[3], [call.args[2]]
    else:
        grad, places = call.args[2], [one for one in call.args[1] if one is not None]
    return [grad] if any(call.mask(one) is not None for one in places) else []


COUNTS, MEAN = frozenset(("nll_loss_backward", "nll_loss2d_backward")), 1
"""Kernels with the weight of all samples as an input, used only as the divisor of a mean."""

ADDITIVE = frozenset(
    "add add_ sub sub_ neg sum cat stack copy_ clone detach _to_copy _unsafe_view mean "
    "select_backward slice_backward expand view t transpose permute unsqueeze squeeze reshape "
    "index index_select as_strided slice select split unbind alias split_with_sizes "
    "_foreach_add_ new_zeros zeros_like empty_like ones_like new_empty_strided new_zeros_strided "
    "is_same_size accumulate_grad_ zero_ constant_pad_nd view_as_real real imag "
    "index_put_ index_put index_add index_add_ embedding_dense_backward slice_scatter narrow "
    "_reshape_alias _foreach_add fill_".split()
)
"""Kernels that only add up and move numbers."""

LINEAR = ADDITIVE | frozenset(
    "mul mul_ div div_ mm addmm bmm mv dot linear where masked_fill masked_fill_ "
    "threshold_backward fft_irfft _fft_c2r _fft_c2c _fft_r2c tril triu convolution_backward "
    "_weight_norm_interface_backward addmv addr outer ger native_dropout_backward "
    "cumsum flip".split()
)
"""Kernels that are linear in one operand when the others are constants."""


def not_linear(call: Call) -> list[str]:
    """Say where a sum over samples is used in a way that is not linear in it.

    In backward the gradients of parameters are sums over samples. A kernel that is not linear in
    such a sum, or that brings it together with one sample's numbers, gives to the full batch
    another gradient than to its parts.
    """
    mixed = [
        one
        for one in call.operands
        if (one.is_floating_point() or one.is_complex()) and several(call.mask(one))
    ]
    if not mixed:
        return []
    found = list[str]()
    if call.name in TABLED and any(several(call.mask(one)) for one in _for_places(call)):
        found.append(f"what comes back to rows, in {call.name}")
    ids = {id(one) for one in mixed}
    others = [one for one in call.operands if id(one) in call.masks and id(one) not in ids]
    others = [one for one in others if one.is_floating_point()]
    if call.name in ADDITIVE or (call.name in COUNTS and call.argument("reduction") != MEAN):
        return found
    twice = len(mixed) > 1
    divides = call.name.startswith("div") and any(call.args[1] is one for one in mixed)
    # torch's own backward kernels are linear in the gradient, their first argument
    # (test_a_function_of_a_parameter_is_shown_next_to_it).
    own = call.name.endswith(("_backward", "_backward_data")) and mixed[0] is call.args[0]
    if (call.name in LINEAR or own) and not (others or twice or divides):
        return found
    node = torch._C._current_autograd_node()
    where = "a hook of a parameter" if node is None else name_of(node)
    return [*found, f"the backward of {where}, in {call.name}"]
