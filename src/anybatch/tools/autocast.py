"""Autocast of a CUDA device that is not there, in effect for a dry run on the host.

A dry run uses the host's tensors, which CUDA's autocast does not cast, and the host's own has other
lists: it computes a softmax or a LayerNorm in bfloat16 that CUDA computes and saves in float32. So
while a plan is made, the host's autocast is on where CUDA's is, and casts as CUDA's does. Only
operators that both cast down are left to torch, which caches the casts of weights.

    torch.autocast("cuda", bfloat16)  ──>  both types on  ──>  linear       torch's own kernel
                                                               softmax      in float32, as on CUDA
                                                               cat          as it is, as on CUDA

Source: ATen/autocast_mode.h and autocast_mode.cpp of torch, whose names of policies these are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from anybatch.core.absent import CUDA, absent
from anybatch.core.accelerator import HOST, of
from anybatch.memory.meter import tensors_in

HERE, THERE = "AutocastCPU", "AutocastCUDA"
"""Dispatch keys of torch: of the host's autocast, and of CUDA's."""

ATEN = "aten::"
"""Prefix of the names of torch's own operators."""

LOWER = frozenset(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """.split()
)
"""Operators whose arguments are cast down."""

FP32 = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
    """.split()
)
"""Operators whose arguments are cast to float32."""

SET_DTYPE = frozenset(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    """.split()
)
"""Operators with a dtype, which defaults to float32."""

APPEND_DTYPE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "norm.Scalar": ("norm.ScalarOpt_dtype", (None, 2)),
    "norm.ScalarOpt_dim": ("norm.ScalarOpt_dim_dtype", (None, None, None, False)),
}
"""Operators, those with the same arguments and a dtype (float32), and their defaults."""

PROMOTE = frozenset(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """.split()
)
"""Operators whose arguments are cast to the widest dtype among them."""

BANNED = "binary_cross_entropy"
"""The operator that CUDA's autocast refuses."""

LIBRARIES = ("cudnn", "miopen")
"""Parts of names of operators that the host never asks for."""

NAMED = ("Dimname", ".dimname", ".names_")
"""Parts of names of operators on dimensions with names, which torch had until 2.12."""

SWITCHED_OFF = (
    "torch.autocast of CUDA around the plan: torch has no CUDA here and switches it off; "
    'torch.set_autocast_enabled("cuda", True) and torch.set_autocast_dtype switch it on'
)
"""Sentence of a plan for which the use of autocast is unknown."""

Call = Callable[..., Any]

_ONE = RLock()  # kernels and functions of the process are replaced: one plan at a time


@dataclass
class AutocastUse:
    """Use of autocast while a plan is made.

    Attributes:
        used: it was on, around the plan or in it.
        unsaid: it may have been wanted around the plan, and torch has switched it off.
    """

    used: bool
    unsaid: bool

    def not_measured(self) -> tuple[str, ...]:
        """Return the unknowns of the plan, a sentence each."""
        found = (SWITCHED_OFF,) if self.unsaid else ()
        others = unknown() if self.used else []
        return (*found, f"autocast of {', '.join(others)}") if others else found


@contextmanager
def autocast_of_absent() -> Iterator[AutocastUse]:
    """Let the host cast in the body as the device that is planned for would.

    It is the body of `anybatch.core.absent.planned_for`. Other threads cast as they did.
    """
    use = AutocastUse(torch.is_autocast_enabled(CUDA), _switched_off())
    host = torch.is_autocast_enabled(HOST.type), torch.get_autocast_dtype(HOST.type)
    setters: list[Call] = [torch.set_autocast_enabled, torch.set_autocast_dtype]
    module = of(CUDA).module
    with ExitStack() as stack:
        stack.enter_context(_ONE)
        stack.enter_context(_as_there())
        there = torch.is_autocast_enabled(CUDA), torch.get_autocast_dtype(CUDA)
        for setter, here, value in zip(setters, host, there, strict=True):
            stack.callback(setter, HOST.type, here)
            setter(HOST.type, value)
            _put(stack, torch, setter.__name__, partial(_both, setter, use))
        stack.callback(torch.clear_autocast_cache)  # it may hold casts of fakes
        _put(stack, module, "is_bf16_supported", lambda *_, **__: True)
        _put(stack, module.amp.common, "amp_definitely_not_available", lambda: False)
        yield use


def _put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Give an object an attribute until a stack is closed."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def unknown() -> list[str]:
    """Return the operators of CUDA's autocast that have no policy here."""
    return [
        name
        for name in _operators(THERE)
        if _name(name) not in POLICIES and not any(part in name for part in (*LIBRARIES, *NAMED))
    ]


def _switched_off() -> bool:
    """Say whether autocast is around that is off because torch has no CUDA."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    there = not of(CUDA).module.amp.common.amp_definitely_not_available()
    return depth > 0 and not there and not torch.is_autocast_enabled(CUDA)


def _both(own: Call, use: AutocastUse, *passed: Any, **named: Any) -> None:
    """Set the autocast of both types, where one of them is set for a plan."""
    device, value = (CUDA, *passed, *named.values())[-2:]  # once there was no type to name
    planned = absent() is not None and device in (CUDA, HOST.type)
    for each in (CUDA, HOST.type) if planned else (device,):
        own(each, value)
    use.used = use.used or (planned and value is True)


@contextmanager
def _as_there() -> Iterator[None]:
    """Have CUDA's policies in the kernels of the host's autocast, for a plan."""
    own, there = _operators(HERE), _operators(THERE)
    library = torch.library.Library("aten", "IMPL", HERE)  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells that a kernel is replaced
            for name in sorted(one for one in own | there if one.startswith(ATEN)):
                policy = POLICIES.get(_name(name)) if name in there else None
                if name in there and (policy is None or (policy is _lower and name in own)):
                    continue
                kernel = _kernel(name, policy, replaces=name in own)
                library.impl(_name(name), kernel, with_keyset=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _operators(key: str) -> set[str]:
    """Return the names of the operators of torch and others with a kernel of a dispatch key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in torch._C._dispatch_get_all_op_names() if has(name, key)}


def _name(name: str) -> str:
    return name.removeprefix(ATEN)


def _of_aten(name: str) -> Call:
    """Return the operator of a name such as "softmax.int"."""
    packet, _, overload = name.partition(".")
    found: Call = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


Policy = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""Runs the operator of a name, with cast arguments."""


def _kernel(name: str, policy: Policy | None, *, replaces: bool) -> Call:
    """Return the kernel of an operator for the host's autocast; other threads have torch's.

    `policy` is CUDA's, or None if its autocast does not cast the operator; `replaces`: the host's
    autocast has a kernel, too.
    """
    key = getattr(torch._C.DispatchKey, HERE)
    only = torch._C.DispatchKeySet(key)
    own = torch.library.get_kernel(name, HERE) if replaces else None
    operator: Any = _of_aten(_name(name))

    def kernel(keys: Any, *args: Any, **named: Any) -> Any:
        planned = absent() is not None
        if own is not None and not planned:
            return own.call_boxed(keys, *args, **named)
        if policy is None or not planned:  # what it is made of is cast
            return operator.redispatch(keys.remove(key), *args, **named)
        with torch._C._ExcludeDispatchKeyGuard(only):
            return policy(_name(name), args, named)

    return kernel


def _lower(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return _in(torch.get_autocast_dtype(HOST.type), name, args, named)


def _float32(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return _in(torch.float32, name, args, named)


def _widest(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    lower = torch.get_autocast_dtype(HOST.type)
    for tensor in filter(_eligible, tensors_in((args, named))):
        if tensor.dtype == torch.float32:
            return _float32(name, args, named)
        if tensor.dtype != lower:
            raise RuntimeError(
                f"{name} must have tensors of float32 or {lower} in CUDA's autocast, which refuses "
                f"others, and one is {tensor.dtype}: cast it before"
            )
    return _lower(name, args, named)


def _with_dtype(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    operator: Any = _of_aten(name)
    place = [one.name for one in operator._schema.arguments].index("dtype")
    passed = args[place] if len(args) > place else named.get("dtype")
    if passed is not None or not _eligible(args[0]):
        return operator(*args, **named)
    return operator(*args[:place], **{**named, "dtype": torch.float32})


def _with_dtype_appended(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    operator, defaults = APPEND_DTYPE[name]
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    return _of_aten(operator)(*args, *defaults[len(args) :], **named, dtype=dtype)


def _refused(name: str, _args: tuple[Any, ...], _named: dict[str, Any]) -> Any:
    raise RuntimeError(
        f"{name} must run outside CUDA's autocast, which refuses it: take the logits, with "
        "binary_cross_entropy_with_logits, or switch autocast off around it"
    )


POLICIES: dict[str, Policy] = {
    **dict.fromkeys(LOWER, _lower),
    **dict.fromkeys(FP32, _float32),
    **dict.fromkeys(SET_DTYPE, _with_dtype),
    **dict.fromkeys(APPEND_DTYPE, _with_dtype_appended),
    **dict.fromkeys(PROMOTE, _widest),
    BANNED: _refused,
}
"""CUDA's policy for each operator that has one."""


def _in(dtype: torch.dtype, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Run an operator with its arguments in a dtype."""

    def cast(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(cast, value))
        return value.to(dtype) if _eligible(value) else value

    return _of_aten(name)(*cast(args), **{key: cast(value) for key, value in named.items()})


def _eligible(value: Any) -> bool:
    """Say whether autocast casts a value: a tensor of floats of the device, not in float64."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and of(value.device).host
    )
