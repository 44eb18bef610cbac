"""Recomputation of saved tensors from others: recipes read from autograd's graph, and rules.

The conv after a BatchNorm and a ReLU saves the ReLU's result, which is as large as the saved tensor
of BatchNorm, and cheap to compute from it. A linear layer's result is dearer, and on many devices
cheaper than two copies over their link. ``torch.utils.checkpoint`` could drop them, if the model
were written for that. Here the graph behind a saved tensor shows its computation:

    saved tensor ── ReluBackward0 ── NativeBatchNormBackward0 ── its saved input, weight
                                                               └─ bias, a leaf

A recipe is read in the step in which it is used, so its constants and operands are those of this
step. Operands are tensors that nodes of the graph have saved through the same hooks, which notice
writes to them; leaves; and results of rules on these. With any other operand, there is no recipe.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", section 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from anybatch.core.accelerator import of
from anybatch.core.modules import name_of
from anybatch.memory.stores import new_storage
from anybatch.offloading.mover import Handle, Saved, Stays, written
from anybatch.offloading.recorder import LEAF, MOVES

DEPTH = 8
"""Operations that a recipe may have one after another, without views."""

NODES = 64
"""Nodes that are read for a recipe, views among them."""

SLACK = 4 << 10
"""Bytes that any operation may allocate in addition to its result."""

Bring = Callable[[Saved], Any]
"""Returns a storage, in memory."""


class Operand:
    """A tensor that a node has saved."""

    __slots__ = ("_handle", "held")

    def __init__(self, handle: Handle | Stays) -> None:
        self._handle = weakref.ref(handle)
        self.held: Handle | Stays | None = None

    def good(self) -> bool:
        """Say whether it is still saved, and as it was."""
        handle = self.handle()
        return handle is not None and handle.current()

    def handle(self) -> Handle | Stays | None:
        """Return the handle that replaces the tensor in the node; None when the node is gone."""
        return self._handle() if self.held is None else self.held

    def tensor(self, bring: Bring, _made: Any) -> Tensor:
        """Return it, if nothing has written to it since."""
        handle = self.handle()
        assert handle is not None
        if isinstance(handle, Stays):
            return handle.unpack()
        handle.check()
        return handle.tensor(bring(handle.saved))


class Leaf:
    """A parameter: it is there anyway."""

    __slots__ = ("_leaf", "_version")

    def __init__(self, leaf: Tensor) -> None:
        self._leaf, self._version = leaf, leaf._version

    def good(self) -> bool:
        """Say whether it is as it was."""
        return self._leaf._version == self._version

    def tensor(self, _bring: Bring, _made: Any) -> Tensor:
        """Return it, if nothing has written to it since."""
        if not self.good():
            raise written(self._leaf.dtype, self._leaf.shape, self._leaf._version, self._version)
        return self._leaf.detach()


class Number:
    """Scalar tensor by which a tensor was multiplied, saved without a hook."""

    __slots__ = ("_number",)

    def __init__(self, tensor: Tensor) -> None:
        self._number = tensor

    def good(self) -> bool:
        """Say that it is as it was."""
        return True

    def tensor(self, _bring: Bring, _made: Any) -> Any:
        """Return it."""
        return self._number


@dataclass
class Operation:
    """An operation to be done again.

    Attributes:
        rule: how.
        operands: its operands.
        constants: its constants.
        shape: of the result.
        dtype: of the result.
        users: operations that take the result. Default 0.
    """

    rule: Rule
    operands: tuple[Value, ...]
    constants: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    users: int = 0

    @property
    def size(self) -> int:
        """Return the bytes of its result, which may be a copy where it is reshaped."""
        lies = self.rule.view and self.rule is not VIEW
        return 0 if lies else prod(self.shape) * self.dtype.itemsize

    @property
    def most(self) -> int:
        """Return the most bytes that are made for it, its result among them."""
        most = held = 0
        for one in self.operands:
            if isinstance(one, Operation):
                most, held = max(most, held + one.most), held + one.size
        own = SLACK + int((self.rule.workspace + (not self.writes)) * self.size)
        return max(most, held + own)

    @property
    def writes(self) -> bool:
        """Return whether it writes over its first operand, which was made only for it."""
        first = self.operands[0]
        if self.rule.over is None or not isinstance(first, Operation) or first.rule.view:
            return False
        if first.users > 1:
            return False
        return first.shape == self.shape and first.dtype == self.dtype

    def tensor(self, bring: Bring, made: dict[int, Tensor]) -> Tensor:
        """Do it, once for all operations that take its result, which are in `made`."""
        if id(self) in made:
            return made[id(self)]
        values = [None if one is None else one.tensor(bring, made) for one in self.operands]
        run = self.rule.over if self.writes else self.rule.run
        assert run is not None
        arguments = [values] if self.rule.operands is None else values
        found = run(*arguments, *self.constants)
        if found.dtype != self.dtype or found.shape != self.shape:  # its node does not know all
            raise RuntimeError(
                f"{found.dtype} {tuple(found.shape)} is not {self.dtype} {self.shape}"
            )
        if self.users > 1:
            made[id(self)] = found
        return found


Value = Operand | Leaf | Number | Operation | None


class RecomputeRecipe:
    """How to have a storage again."""

    __slots__ = ("_operation", "_shape", "_size", "_stride")

    def __init__(self, operation: Operation, tensor: Tensor) -> None:
        self._operation = operation
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._size = tensor.untyped_storage().nbytes()

    def hold(self) -> None:
        """Have it all live as long as this does."""
        for operand in self._operands():
            operand.held = operand.handle()

    def good(self) -> bool:
        """Say whether all that it starts from is there, and as it was."""
        starts = (one for one in _all(self._operation) if isinstance(one, Operand | Leaf | Number))
        return all(one.good() for one in starts)

    def sources(self) -> list[Saved]:
        """Return the storages that it starts from, without those that are never offloaded."""
        handles = (operand.handle() for operand in self._operands())
        found = {h.saved.number: h.saved for h in handles if isinstance(h, Handle)}
        return list(found.values())

    def most(self) -> int:
        """Return an upper bound of the bytes that it needs in addition to its sources."""
        every = [one for one in _all(self._operation) if isinstance(one, Operation)]
        shared = {id(one): one.size for one in every if one.users > 1}  # they are there to the end
        copied = self._size * self._operation.rule.view
        return self._operation.most + sum(shared.values()) + copied

    def storage(self, bring: Bring) -> Any:
        """Follow it, and return a storage of its own."""
        with torch.no_grad(), torch._C._DisableAutocast():
            found = self._operation.tensor(bring, {})
            fits = found.stride() == self._stride and found.untyped_storage().nbytes() == self._size
            if fits and not self._operation.rule.view:
                return found.untyped_storage()
            storage = new_storage(self._size, found.device)
            place = torch.empty(0, dtype=found.dtype, device=found.device)
            place.set_(storage, 0, self._shape, self._stride).copy_(found)
            return storage

    def _operands(self) -> Iterator[Operand]:
        return (one for one in _all(self._operation) if isinstance(one, Operand))


def _all(value: Value) -> Iterator[Value]:
    yield value
    if isinstance(value, Operation):
        for operand in value.operands:
            yield from _all(operand)


def read(tensor: Tensor, mine: Callable[[Saved], bool]) -> RecomputeRecipe | None:
    """Return the recipe of the storage of a tensor that is being saved; None where none is found.

    That of a view is made by its base: queries, keys and values may be parts of one product.

    Args:
        tensor: as autograd saves it.
        mine: says whether a storage is one of this step.
    """
    if tensor._base is not None and tensor._base.grad_fn is not None:
        tensor = tensor._base
    dense = 1 + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    full = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
    if tensor.grad_fn is None or not full or dense != tensor.numel():
        return None
    operation = _Reader(mine).made_by(tensor.grad_fn, tensor.output_nr, DEPTH)
    return None if operation is None else RecomputeRecipe(operation, tensor)


class _Reader:
    """Reads a graph."""

    def __init__(self, mine: Callable[[Saved], bool]) -> None:
        self._mine = mine
        self._made: dict[tuple[Any, int], Operation | None] = {}
        self._nodes = 0

    def made_by(self, node: Any, nr: int, depth: int) -> Operation | None:
        """Return the operation that a node stands for; None where there is no rule for it."""
        if (node, nr) not in self._made:
            self._nodes += 1
            if self._nodes > NODES:
                return None
            self._made[node, nr] = self._read(node, nr, depth)
        found = self._made[node, nr]
        if found is not None:
            found.users += 1
        return found

    def _read(self, node: Any, nr: int, depth: int) -> Operation | None:
        name = name_of(node)
        rule = RULES.get(name)
        if rule is None or depth == 0 or (nr and name not in PARTS):
            return None
        if name in ONLY_IN_TRAINING and not node._saved_training:
            return None
        if getattr(node, "_saved_dropout_p", 0):  # its draw is not repeated
            return None
        if (
            any(getattr(node, "_saved_bias_sym_sizes_opt", None) or ())
            and not node.next_functions[2][0]
        ):
            return None  # no node knows its bias
        operands = self._operands(node, rule, depth - (not rule.view))
        if operands is None:
            return None
        made = node._input_metadata[nr]
        shape, dtype = tuple(made.shape), made.dtype
        names = [f"_saved_{one}" for one in rule.constants]
        if not all(hasattr(node, name) for name in names):  # this torch saves others
            return None
        constants = [_signed(getattr(node, name)) for name in names]
        constants += [shape, dtype] if rule.shaped else []
        constants += [nr] if name in PARTS else []
        return Operation(rule, operands, tuple(constants), shape, dtype)

    def _operands(self, node: Any, rule: Rule, depth: int) -> tuple[Value, ...] | None:
        edges = node.next_functions
        names = ("",) * len(edges) if rule.operands is None else rule.operands
        found: list[Value] = []
        for k, name in enumerate(names):
            edge, nr = edges[k] if k < len(edges) else (None, 0)
            saved = _substitute(node, name.rstrip("?")) if name else None
            value: Value
            value = self._operand(saved) if saved is not None else self._value(edge, nr, depth)
            absent = name.endswith("?") and saved is None and edge is None
            if value is None and not absent:
                return None
            found.append(value)
        return tuple(found)

    def _value(self, node: Any, nr: int, depth: int) -> Value:
        """Return the value that passes along an edge of the graph."""
        if node is None:
            return None
        if name_of(node) == LEAF:
            return Leaf(node.variable) if type(node.variable) in MOVES else None
        saved = None if nr else _substitute(node, "result")
        return self.made_by(node, nr, depth) if saved is None else self._operand(saved)

    def _operand(self, saved: Any) -> Operand | Number | None:
        """Return a tensor that a node has saved by the hooks of this step, or a number."""
        if isinstance(saved, Number):
            return saved
        if isinstance(saved, Stays):
            return Operand(saved) if saved.current() and type(saved.tensor) in MOVES else None
        if isinstance(saved, Handle) and saved.current() and self._mine(saved.saved):
            return Operand(saved)
        return None


def _substitute(node: Any, name: str) -> Any:
    """Return the hook's substitute for a tensor that a node has saved; None if it saved none."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    saved = None if raw is None else getattr(raw, "data", None)
    if isinstance(saved, Tensor) and getattr(raw, "unpack_hook", 0) is None and not saved.dim():
        return Number(saved)
    return saved


def _signed(constant: Any) -> Any:
    """Return a constant with its sign: some nodes store negative dimensions as unsigned."""
    if isinstance(constant, int) and constant >= 1 << 63:
        return constant - (1 << 64)
    if isinstance(constant, tuple):
        return tuple(map(_signed, constant))
    return constant


# Rules: the operations that nodes of autograd's graph stand for. A node has its type, its constants
# and, where its backward needs them, its operands: enough to repeat forward.
#
#     NativeBatchNormBackward0   _saved_eps, the saved input, weight ──> native_batch_norm again
#
# Running statistics are left out of that call: nothing is updated twice. No rule has a draw in it.
# The recorded step tries each recipe, since a product may cost more than two copies of its result.
#
# Source: AGBN's "memory monger".

aten = torch.ops.aten

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-4)
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


def _equal(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors are equal, where both are no numbers, too."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _by_epsilon(
    of_some: Callable[[float], Any], of_all: Callable[[float], Any], some: Tensor, rstd: Tensor
) -> Tensor:
    """Return the result with the epsilon that reproduces some deviations, and then all.

    With one's own epsilon it is another result, which fingerprints show.
    """
    found: Tensor
    for eps in EPSILONS:
        if _equal(of_some(eps)[2], some):
            found, _, ours = of_all(eps)
            if _equal(ours, rstd):
                return found
            del found, ours
    found = of_all(EPSILONS[0])[0]
    return found


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, rstd: Tensor, *sizes: int) -> Tensor:
    """Normalise with an epsilon that is found: from 2.14 no node stores it."""
    norm, one = aten.native_group_norm, (1, *sizes[1:])
    return _by_epsilon(
        lambda eps: norm(x[:1], weight, bias, *one, eps),
        lambda eps: norm(x, weight, bias, *sizes, eps),
        rstd[:1],
        rstd,
    )


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rstd: Tensor, shape: Sequence[int]
) -> Tensor:
    """Normalise with an epsilon that is found."""
    row, norm = (slice(0, 1),) * (x.dim() - len(shape)), aten.native_layer_norm
    return _by_epsilon(
        lambda eps: norm(x[row], shape, weight, bias, eps),
        lambda eps: norm(x, shape, weight, bias, eps),
        rstd[row],
        rstd,
    )


def _call(function: Callable[..., Any], *names: str, **fixed: Any) -> Callable[..., Tensor]:
    """Return the first result of a function, of which the last arguments have names."""

    def run(*values: Any) -> Tensor:
        count = len(values) - len(names)
        named = dict(zip(names, values[count:], strict=True))
        found = function(*values[:count], **named, **fixed)
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]

    return run


def _attention(function: Callable[..., Any], *mask: str, **fixed: Any) -> Rule:
    """Return the rule of a kernel of attention, with the name of its mask if it takes one."""
    names, causal = ("query", "key", "value"), ("is_causal", "scale")
    run = _call(function, *mask, *causal, **fixed)
    return Rule(run, (*names, *(f"{one}?" for one in mask)), causal)


VIEW = Rule(lambda x, shape, _: x.reshape(shape), ("",), view=True, shaped=True)
SCALES, KEEP = ("alpha", "beta"), ("dim", "keepdim")
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
    "GeluBackward0": Rule(_call(aten.gelu, "approximate"), constants=("approximate",)),
    "SiluBackward0": Rule(aten.silu),
    "MishBackward0": Rule(aten.mish),
    "HardswishBackward0": Rule(aten.hardswish),
    "AddBackward0": Rule(
        _call(torch.add, "alpha"), ("", ""), ("alpha",), _call(Tensor.add_, "alpha")
    ),
    "SubBackward0": Rule(_call(torch.sub, "alpha"), ("", ""), ("alpha",)),
    "MulBackward0": Rule(torch.mul, ("self", "other"), over=Tensor.mul_),
    "DivBackward0": Rule(torch.div, ("self", "other")),
    "NegBackward0": Rule(torch.neg, ("",)),
    "ExpBackward0": Rule(torch.exp, ("",)),
    "RsqrtBackward0": Rule(torch.rsqrt, ("",)),
    "PowBackward0": Rule(torch.pow, constants=("exponent",)),
    "MeanBackward1": Rule(
        lambda x, dim, keep, _, dtype: x.mean(dim, keep, dtype=dtype), ("",), KEEP, shaped=True
    ),
    "SoftmaxBackward0": Rule(
        lambda x, dim, _, dtype: x.softmax(dim, dtype), ("",), ("dim",), shaped=True
    ),
    "GluBackward0": Rule(aten.glu, constants=("dim",)),
    "NativeDropoutBackward0": Rule(
        lambda x, mask, p: x * mask * (1 / (1 - p) if p < 1 else 0),
        ("", "result1"),
        ("p",),
        workspace=1.0,
    ),
    "MmBackward0": Rule(torch.mm, ("self", "mat2")),
    "AddmmBackward0": Rule(_call(torch.addmm, *SCALES), ("", "mat1", "mat2"), SCALES),
    "BmmBackward0": Rule(torch.bmm, ("self", "mat2")),
    "BaddbmmBackward0": Rule(_call(torch.baddbmm, *SCALES), ("", "batch1", "batch2"), SCALES),
    "ConvolutionBackward0": Rule(
        aten.convolution,
        ("input", "weight", "?"),
        ("stride", "padding", "dilation", "transposed", "output_padding", "groups"),
        workspace=4.0,
    ),
    "ScaledDotProductFlashAttentionForCpuBackward0": _attention(
        aten._scaled_dot_product_flash_attention_for_cpu, "attn_mask"
    ),
    "ScaledDotProductFlashAttentionBackward0": _attention(aten._scaled_dot_product_flash_attention),
    "ScaledDotProductEfficientAttentionBackward0": _attention(
        aten._scaled_dot_product_efficient_attention, "attn_bias", compute_log_sumexp=True
    ),
    "CatBackward0": Rule(torch.cat, None, ("dim",)),
    "NativeBatchNormBackward0": Rule(
        _batch_norm, ("input", "weight", "bias", "result1", "result2"), ("eps",)
    ),
    "CudnnBatchNormBackward0": Rule(
        lambda x, w, b, eps: aten.cudnn_batch_norm(x, w, b, None, None, True, 0.0, eps)[0],
        ("input", "weight", "bias"),
        ("epsilon",),
    ),
    "NativeGroupNormBackward0": Rule(
        _group_norm,
        ("input", "weight", "bias", "result2"),
        ("N", "C", "HxW", "group"),
    ),
    "NativeLayerNormBackward0": Rule(
        _layer_norm,
        ("input", "weight?", "bias?", "result2"),
        ("normalized_shape",),
    ),
    "MaxPool2DWithIndicesBackward0": Rule(
        _call(aten.max_pool2d_with_indices),
        constants=(*POOL, "dilation", "ceil_mode"),
        workspace=4.0,
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
    "ToCopyBackward0": Rule(lambda x, _, dtype: x.to(dtype, copy=True), ("",), shaped=True),
    "CloneBackward0": Rule(torch.clone, ("",)),
    "ViewBackward0": VIEW,
    "UnsafeViewBackward0": VIEW,
    "ReshapeAliasBackward0": VIEW,
    "ExpandBackward0": Rule(lambda x, shape, _: x.expand(shape), ("",), view=True, shaped=True),
    "TransposeBackward0": Rule(torch.transpose, ("",), ("dim0", "dim1"), view=True),
    "PermuteBackward0": Rule(torch.permute, ("",), ("dims",), view=True),
    "SplitBackward0": Rule(
        lambda x, dim, size, nr: x.split(size, dim)[nr], ("",), ("dim", "split_size"), view=True
    ),
    "UnbindBackward0": Rule(torch.select, ("",), ("dim",), view=True),
    "SelectBackward0": Rule(torch.select, ("",), ("dim", "index"), view=True),
    "SqueezeBackward1": Rule(torch.squeeze, ("",), ("dim",), view=True),
    "UnsqueezeBackward0": Rule(torch.unsqueeze, ("",), ("dim",), view=True),
    "TBackward0": Rule(torch.t, ("",), view=True),
    "SliceBackward0": Rule(aten.slice, ("",), ("dim", "start", "end", "step"), view=True),
}
"""By the name of the node."""

PARTS = "SplitBackward0", "UnbindBackward0"
"""Nodes of which each result is a part of the operand, by its number."""

ONLY_IN_TRAINING = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
"""Outside it they normalise with running statistics, which may have moved on."""
