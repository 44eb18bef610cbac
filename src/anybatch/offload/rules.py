"""Which nodes of autograd's graph stand for cheap operations, and how to do one of them again.

Autograd's graph is made for backward. But a node also has its type, its constants and, where its
backward needs them, its operands: that is enough to repeat forward, if the kernel called here is
the one that ran there.

    NativeBatchNormBackward0   _saved_eps, the saved input, weight ──> native_batch_norm again

Running statistics are left out of that call, so nothing is updated twice; and where the saved mean
and deviation can take their place, they are not reduced again. No rule has a product of
matrices, a convolution or a draw in it. A node without a rule is not cheap.

Source: AGBN's "memory monger".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.core.accelerator import of

aten = torch.ops.aten

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3)
"""Those that layers and groups are normalised with; their nodes do not know which."""


@dataclass(frozen=True)
class Rule:
    """How to do an operation again.

    Attributes:
        run: takes the operands and the constants, and returns the result.
        operands: for each, by which name its node saves it, "" where it does not; a trailing "?"
            is for one that may be None. None for as many as there are, given as one list.
        constants: by which names its node has them.
        over: the same as `run`, written over the first operand; None where that cannot be.
        view: the result may lie in the memory of the first operand.
        shaped: takes the shape and dtype of the result, too.
        workspace: bytes of what `run` makes in addition to its result, as a share of it, at most.
    """

    run: Callable[..., Tensor]
    operands: tuple[str, ...] | None = ("self",)
    constants: tuple[str, ...] = ()
    over: Callable[..., Tensor] | None = None
    view: bool = False
    shaped: bool = False
    workspace: float = 0.25


def _batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Normalise with saved statistics; the CPU kernel multiplies weight and invstd itself."""
    arguments: tuple[Any, ...] = (weight, bias, None, None, True, 0.0, eps)
    if of(x.device).host:
        arguments = (weight * invstd, bias, mean, torch.ones_like(invstd), False, 0.0, 0.0)
    found: Tensor = aten.native_batch_norm(x, *arguments)[0]
    return found


def _cudnn_batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    found: Tensor = aten.cudnn_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]
    return found


def _group_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    samples: int,
    channels: int,
    size: int,
    groups: int,
) -> Tensor:
    """Normalise with the epsilon that reproduces a sample's rstd: from 2.14 no node stores it."""
    found: Tensor
    for eps in EPSILONS:
        one = aten.native_group_norm(x[:1], weight, bias, 1, channels, size, groups, eps)
        if torch.equal(one[2], rstd[:1]):
            sizes = (samples, channels, size, groups)
            found, _, ours = aten.native_group_norm(x, weight, bias, *sizes, eps)
            if torch.equal(ours, rstd):
                return found
            del found, ours
    parts = (x.reshape(samples, groups, -1) - mean.unsqueeze(2)) * rstd.unsqueeze(2)
    shape = (1, channels, *(1,) * (x.dim() - 2))
    return (parts.view_as(x) * weight.view(shape) + bias.view(shape)).to(x.dtype)


def _layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    shape: Sequence[int],
) -> Tensor:
    """Normalise with the epsilon that reproduces a row's rstd, and check it for all rows."""
    row = (slice(0, 1),) * (x.dim() - len(shape))
    for eps in EPSILONS:
        if torch.equal(aten.native_layer_norm(x[row], shape, weight, bias, eps)[2], rstd[row]):
            found: Tensor
            found, _, ours = aten.native_layer_norm(x, shape, weight, bias, eps)
            if torch.equal(ours, rstd):
                return found
            del found, ours
    found = (x - mean) * rstd  # an epsilon of the person's own: right, if not bit for bit
    found = found if weight is None else found * weight
    return (found if bias is None else found + bias).to(x.dtype)


def _max_pool(x: Tensor, *constants: Any) -> Tensor:
    found: Tensor = aten.max_pool2d_with_indices(x, *constants)[0]
    return found


def _add(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return torch.add(a, b, alpha=alpha)


def _add_over(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return a.add_(b, alpha=alpha)


def _sub(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return torch.sub(a, b, alpha=alpha)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    found: Tensor = aten.gelu(x, approximate=approximate)
    return found


def _cast(x: Tensor, _shape: Any, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


def _view(x: Tensor, shape: Sequence[int], _dtype: Any) -> Tensor:
    return x.reshape(tuple(shape))


def _expand(x: Tensor, shape: Sequence[int], _dtype: Any) -> Tensor:
    return x.expand(tuple(shape))


def _split(x: Tensor, dim: int, size: int, nr: int) -> Tensor:
    found: Tensor = aten.split(x, size, dim)[nr]
    return found


VIEW = Rule(_view, ("",), view=True, shaped=True)
POOL = ("kernel_size", "stride", "padding")

RULES = {
    "ReluBackward0": Rule(torch.relu, ("",), over=torch.relu_),
    "SigmoidBackward0": Rule(torch.sigmoid, ("",), over=torch.sigmoid_),
    "TanhBackward0": Rule(torch.tanh, ("",), over=torch.tanh_),
    "LeakyReluBackward0": Rule(aten.leaky_relu, constants=("negative_slope",)),
    "EluBackward0": Rule(aten.elu, constants=("alpha", "scale", "input_scale")),
    "HardtanhBackward0": Rule(aten.hardtanh, constants=("min_val", "max_val")),
    "LeakyReluBackward1": Rule(aten.leaky_relu, ("",), ("negative_slope",)),
    "EluBackward1": Rule(aten.elu, ("",), ("alpha", "scale", "input_scale")),
    "HardtanhBackward1": Rule(aten.hardtanh, ("",), ("min_val", "max_val")),
    "ClampBackward1": Rule(aten.clamp, constants=("min", "max")),
    "SoftplusBackward0": Rule(aten.softplus, constants=("beta", "threshold")),
    "GeluBackward0": Rule(_gelu, constants=("approximate",)),
    "SiluBackward0": Rule(aten.silu),
    "MishBackward0": Rule(aten.mish),
    "HardswishBackward0": Rule(aten.hardswish),
    "AddBackward0": Rule(_add, ("", ""), ("alpha",), _add_over),
    "SubBackward0": Rule(_sub, ("", ""), ("alpha",)),
    "MulBackward0": Rule(torch.mul, ("self", "other"), over=Tensor.mul_),
    "CatBackward0": Rule(torch.cat, None, ("dim",)),
    "NativeBatchNormBackward0": Rule(
        _batch_norm, ("input", "weight", "bias", "result1", "result2"), ("eps",)
    ),
    "CudnnBatchNormBackward0": Rule(_cudnn_batch_norm, ("input", "weight", "bias"), ("epsilon",)),
    "NativeGroupNormBackward0": Rule(
        _group_norm,
        ("input", "weight", "bias", "result1", "result2"),
        ("N", "C", "HxW", "group"),
    ),
    "NativeLayerNormBackward0": Rule(
        _layer_norm,
        ("input", "weight?", "bias?", "result1", "result2"),
        ("normalized_shape",),
    ),
    "MaxPool2DWithIndicesBackward0": Rule(
        _max_pool, constants=(*POOL, "dilation", "ceil_mode"), workspace=4.0
    ),
    "AvgPool2DBackward0": Rule(
        aten.avg_pool2d,
        constants=(*POOL, "ceil_mode", "count_include_pad", "divisor_override"),
    ),
    "UpsampleNearest2DBackward0": Rule(
        aten.upsample_nearest2d, ("",), ("output_size", "scales_h", "scales_w")
    ),
    "UpsampleBilinear2DBackward0": Rule(
        aten.upsample_bilinear2d,
        ("",),
        ("output_size", "align_corners", "scales_h", "scales_w"),
    ),
    "ToCopyBackward0": Rule(_cast, ("",), shaped=True),
    "CloneBackward0": Rule(torch.clone, ("",)),
    "ViewBackward0": VIEW,
    "UnsafeViewBackward0": VIEW,
    "ReshapeAliasBackward0": VIEW,
    "ExpandBackward0": Rule(_expand, ("",), view=True, shaped=True),
    "TransposeBackward0": Rule(torch.transpose, ("",), ("dim0", "dim1"), view=True),
    "PermuteBackward0": Rule(torch.permute, ("",), ("dims",), view=True),
    "SplitBackward0": Rule(_split, ("",), ("dim", "split_size"), view=True),
    "SliceBackward0": Rule(aten.slice, ("",), ("dim", "start", "end", "step"), view=True),
}
"""By the name of the node."""

ONLY_IN_TRAINING = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
"""Outside it they normalise with running statistics, which may have moved on."""
