"""Table of torch's losses: numerator over samples and denominator.

``reduction="mean"`` hides the denominator, and that is where accumulation goes wrong: a mean over
the targets that are not ignored, or weighted by their classes, is not the mean of the
micro-batches' means. For each functional of ``torch.nn.functional`` this table says how to get the
numerator (it adds up over micro-batches) and the denominator (it can be counted without the model).

    CrossEntropy mean = sum_i w[y_i] nll_i / sum_i w[y_i],     i over targets != ignore_index

Only losses in which a row meets no other row are here. A form that is not listed, such as
``reduction="none"``, is not recognised, and never guessed. A loss that torch adds is one entry of
`TABLE`. Behind it are functions through which samples stay separate. Source: the formulas in the
documentation of torch's loss modules.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Arguments = dict[str, Any]
Count = int | Tensor


@dataclass(frozen=True)
class Functional:
    """Rows, denominator and constants of one functional of torch.

    Attributes:
        rows: arguments that hold samples, and the dimension in which they lie; None where any
            dimension will do as long as it is the same for all (element by element).
        count: arguments -> the denominator of ``reduction="mean"``.
        fits: arguments -> whether their shapes make every row one sample's.
        constants: arguments that must not vary with the sample (class weights).
        parameters: arguments that belong to no sample and may be trained: a layer in the loss.
        reads: arguments whose values decide the denominator. Default: the shapes do.
    """

    rows: dict[str, int | None]
    count: Callable[[Arguments], Count]
    fits: Callable[[Arguments], bool]
    constants: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def has_other_tensors(self, arguments: Arguments) -> bool:
        """Say whether an option is a tensor: a margin may be computed from samples."""
        named = {*self.rows, *self.constants, *self.parameters}
        return any(isinstance(one, Tensor) for n, one in arguments.items() if n not in named)


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Return the arguments of a call by name, defaults filled in."""
    names, defaults = _signature(function)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def divides(function: Callable[..., Any], arguments: Arguments) -> bool | None:
    """Return whether the call divides its sum; None where its reduction is not listed."""
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        return None
    if arguments.get("reduction") == "batchmean":
        return True if function is F.kl_div else None
    return {"mean": True, "sum": False}.get(arguments.get("reduction", ""))


def numerator(function: Callable[..., Any], arguments: Arguments) -> Tensor:
    """Return the sum over the rows, the numerator of the requested mean.

    Half-precision arguments are summed in float32: a sum in float16 ends at 65504.
    """
    for value in arguments.values():
        if isinstance(value, Tensor) and value.dtype is torch.float16:
            arguments = {name: _wide(one) for name, one in arguments.items()}
            break
    if function is F.ctc_loss:
        return aligned(arguments).sum()
    return torch.as_tensor(function(**{**arguments, "reduction": "sum"}))


def aligned(arguments: Arguments) -> Tensor:
    """Return the summands of ``F.ctc_loss``, one a sample; a mean is also by the lengths."""
    each: Tensor = F.ctc_loss(**{**arguments, "reduction": "none"})
    if arguments["reduction"] == "sum":
        return each
    return each / torch.as_tensor(arguments["target_lengths"]).clamp(min=1).to(each)


def _wide(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype == torch.float16
    return value.float() if half else value


@cache
def _signature(function: Callable[..., Any]) -> tuple[tuple[str, ...], Arguments]:
    parameters = inspect.signature(function).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    return tuple(parameters), defaults


def _dims(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _samples(name: str) -> Callable[[Arguments], Count]:
    return lambda a: int(a[name].shape[0])


def _class_targets(a: Arguments) -> Count:
    """Targets that are not ignored, each counted with the weight of its class."""
    scores, target, weight = a["input"], a["target"], a.get("weight")
    if target.is_floating_point():  # probabilities: every position counts, whatever the weight
        of_classes = scores if "linear_weight" not in a else target
        return int(of_classes.numel() // of_classes.shape[1])
    counted = target != (-100 if a["ignore_index"] is None else a["ignore_index"])
    if weight is None:
        return torch.as_tensor(counted.sum())
    weight = weight.detach().to(target.device)
    return torch.where(counted, weight[target.clamp(min=0, max=len(weight) - 1)], 0).sum()


def _broadcast(*names: str) -> Callable[[Arguments], Count]:
    def count(a: Arguments) -> Count:
        shapes = [a[name].shape for name in names if isinstance(a[name], Tensor)]
        return math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]

    return count


def _elementwise(*names: str, constants: tuple[str, ...] = ()) -> Functional:
    def fits(a: Arguments) -> bool:
        dims = {_dims(a[name]) for name in names} - {0}
        unweighted = "weight" in constants or a.get("weight") is None
        return len(dims) <= 1 and unweighted

    return Functional(dict.fromkeys(names), _broadcast(*names), fits, constants)


def _kl() -> Functional:
    def count(a: Arguments) -> Count:
        elements = _broadcast("input", "target")(a)
        return int(a["input"].shape[0]) if a["reduction"] == "batchmean" else elements

    return Functional(
        {"input": 0, "target": 0}, count, lambda a: _dims(a["input"]) == _dims(a["target"]) > 0
    )


OF_CLASSES = ("target", "weight")


def _classes() -> Functional:
    def fits(a: Arguments) -> bool:
        dims = a["input"].dim() - a["target"].dim()
        return a["input"].dim() >= 2 and dims in (0, 1)

    return Functional(
        {"input": 0, "target": 0}, _class_targets, fits, ("weight",), reads=OF_CLASSES
    )


def _classes_of_a_layer() -> Functional:
    """``cross_entropy(linear(input, linear_weight), target)``, with the layer as an argument."""

    def fits(a: Arguments) -> bool:
        dims = _dims(a["linear_weight"]) - (not a["target"].is_floating_point())
        return a["input"].dim() == 2 and _dims(a["target"]) == dims

    layer = ("linear_weight", "linear_bias")
    rows: dict[str, int | None] = {"input": 0, "target": 0}
    return Functional(rows, _class_targets, fits, ("weight",), layer, OF_CLASSES)


def _matrices(*constants: str) -> Functional:
    return Functional(
        {"input": 0, "target": 0}, _samples("input"), lambda a: a["input"].dim() == 2, constants
    )


TABLE: dict[Callable[..., Any], Functional] = {
    F.cross_entropy: _classes(),
    F.nll_loss: _classes(),
    F.binary_cross_entropy: _elementwise("input", "target", constants=("weight",)),
    F.binary_cross_entropy_with_logits: _elementwise(
        "input", "target", constants=("weight", "pos_weight")
    ),
    F.mse_loss: _elementwise("input", "target"),
    F.l1_loss: _elementwise("input", "target"),
    F.smooth_l1_loss: _elementwise("input", "target"),
    F.huber_loss: _elementwise("input", "target"),
    F.kl_div: _kl(),
    F.poisson_nll_loss: _elementwise("input", "target"),
    F.gaussian_nll_loss: _elementwise("input", "target", "var"),
    F.hinge_embedding_loss: _elementwise("input", "target"),
    F.soft_margin_loss: _elementwise("input", "target"),
    F.margin_ranking_loss: _elementwise("input1", "input2", "target"),
    F.cosine_embedding_loss: Functional(
        {"input1": 0, "input2": 0, "target": 0},
        _samples("target"),
        lambda a: (
            (a["input1"].dim(), a["input2"].dim(), a["target"].dim()) == (2, 2, 1)
            and a["input1"].shape[0] == a["target"].shape[0]
        ),
    ),
    F.triplet_margin_loss: Functional(
        {"anchor": 0, "positive": 0, "negative": 0},
        lambda a: int(a["anchor"].numel() // a["anchor"].shape[-1]),
        lambda a: (
            a["anchor"].shape == a["positive"].shape == a["negative"].shape
            and a["anchor"].dim() >= 2
        ),
    ),
    F.multi_margin_loss: _matrices("weight"),
    F.multilabel_margin_loss: _matrices(),
    F.multilabel_soft_margin_loss: _matrices("weight"),
    F.ctc_loss: Functional(
        {"log_probs": 1, "targets": 0, "input_lengths": 0, "target_lengths": 0},
        lambda a: int(a["log_probs"].shape[1]),
        lambda a: a["log_probs"].dim() == 3 and a["targets"].dim() == 2,
    ),
}
"""Every recognised loss, by its functional; torch's loss modules call these."""

if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    TABLE[F.linear_cross_entropy] = _classes_of_a_layer()


def own_values(input: Tensor, reduction: str = "mean") -> Tensor:  # noqa: A002
    """Reduce losses that a model has computed itself, any number a sample, to one number."""
    return input.mean() if reduction == "mean" else input.sum()


def own_weighted_values(input: Tensor, weight: Tensor, reduction: str = "mean") -> Tensor:  # noqa: A002
    """Reduce ``sum(input) / sum(weight)``, where the weights are part of the input already."""
    return input.sum() / weight.sum() if reduction == "mean" else input.sum()


LISTED = frozenset(TABLE)
"""The functionals of torch's own: an entry below this line is none of them."""

TABLE[own_values] = Functional(
    {"input": None}, _broadcast("input"), lambda a: _dims(a["input"]) > 0
)
TABLE[own_weighted_values] = Functional(
    {"input": 0, "weight": 0}, lambda a: torch.as_tensor(a["weight"].sum()), lambda _: True
)


# Where the samples lie in a tensor, after the reshaping that stands between model and loss.
#
# ``F.cross_entropy(logits.view(-1, V), tokens.view(-1))`` is a sum over samples;
# ``F.cross_entropy(z @ z.T, labels)`` is not, though it calls the same functional. The difference
# is whether one dimension still holds the samples separately. Code from here on follows that
# dimension (the *axis*) through the functions that only move or map single samples. For any other
# function it returns None, and the loss that uses the result is treated as coupled.
#
# An axis of 0 may have several rows a sample, in the samples' order: ``[n * T, V]``.

ELEMENTWISE = frozenset(
    "float double half bfloat16 long int bool to type type_as contiguous clone detach sigmoid "
    "logsigmoid log_sigmoid tanh exp log log1p relu softplus abs neg square sqrt clamp clamp_min "
    "clamp_max gelu leaky_relu add sub mul div true_divide pow __radd__ __rsub__ __rmul__ "
    "__rtruediv__ eq ne gt lt ge le __eq__ __ne__ logical_not expm1 exp2 log2 log10 rsqrt "
    "reciprocal sign sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc lgamma "
    "digamma logit silu mish elu selu celu softsign hardtanh hardsigmoid hardswish relu6 floor "
    "ceil round trunc nan_to_num isnan isinf isfinite __invert__ bitwise_not __pow__".split()
)
"""Functions of one tensor and numbers that keep every element in its place."""

JOINS = frozenset(
    "add sub mul div true_divide floor_divide remainder fmod pow __radd__ __rsub__ __rmul__ "
    "__rtruediv__ __pow__ __rpow__ eq ne gt lt ge le __eq__ __ne__ maximum minimum fmax fmin atan2 "
    "hypot logaddexp logaddexp2 where lerp addcmul addcdiv masked_fill xlogy clamp clamp_min "
    "clamp_max logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ "
    "__or__ __xor__ __rand__ __ror__ __rxor__".split()
)
"""Functions of several tensors, each element of the result of one element of each."""

ALONG = frozenset(["softmax", "log_softmax", "normalize"])
"""Functions that mix the elements along one dimension."""

REDUCTIONS = frozenset("mean sum prod amax amin logsumexp argmax argmin all any max min".split())
"""Functions that reduce some dimensions: each sample by itself, where its own is not among them."""

NORMS = frozenset(["norm", "linalg_norm", "linalg_vector_norm"])
"""The same, with the dimension as the third argument."""

SPLITS = {"chunk": 0, "split": 0, "tensor_split": 0, "unbind": 0, "sort": -1, "topk": -1}
"""Functions that return several tensors, and the dimension that they divide or order by default."""

RESHAPES = frozenset(["view", "reshape", "flatten", "unflatten"])
JOINED = frozenset(
    "gather take_along_dim cat concat concatenate stack cosine_similarity pairwise_distance "
    "bmm".split()
)
"""Functions of several tensors of one axis; see `axis_after_join`."""
PRODUCTS = frozenset("matmul __matmul__ mm linear".split())
"""Functions of samples and of a matrix; see `axis_after_matrix`."""
EXPANDS = frozenset(["expand", "expand_as", "broadcast_to"])
LIKE = frozenset(["zeros_like", "ones_like", "full_like"])
FILLED = frozenset(["zeros", "ones", "full"])
"""Constants of any shape, the same everywhere."""
CONSTANTS = FILLED | {"tensor", "scalar_tensor"}
QUERIES = frozenset(
    "size dim ndimension numel nelement __len__ is_floating_point is_complex get_device".split()
)
"""Queries of the shape and type of a tensor: their results hold for every sample."""
PROPERTIES = frozenset("shape ndim dtype requires_grad layout".split())


READS = frozenset("__int__ __index__ __invert__".split())
"""Names that begin like those of writes, and write nothing."""
STATEFUL = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal "
    "poisson batch_norm instance_norm".split()
)
"""Functions that draw at random, or may move statistics."""


def axis_after(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, axis: int, size: int
) -> int | None:
    """Return the axis of `result`, or None where samples may be coupled."""
    tensor = args[0]
    if name in ELEMENTWISE:
        return axis if _only_numbers(name, args[1:], kwargs) else None
    if name in ALONG:
        return axis if _dim(name, args, kwargs) not in (None, axis, axis - tensor.dim()) else None
    if name in REDUCTIONS:
        return _after_reduction(args, kwargs, tensor.dim(), axis)
    if name in RESHAPES:
        divisible = axis == 0 and result.dim() > 0 and result.shape[0] % size == 0
        return 0 if divisible else None
    if name == "__getitem__":
        return _after_index(args[1], tensor.dim(), axis)
    if name in ("transpose", "swapaxes", "swapdims", "t", "T", "mT", "permute", "movedim"):
        return _after_permutation(name, args, kwargs, axis)
    if name == "unsqueeze":
        dim = _normal(_argument(args, kwargs, 1, "dim"), result.dim())
        return axis + 1 if dim <= axis else axis
    if name == "squeeze":
        dim = _argument(args, kwargs, 1, "dim")
        return _after_squeeze(tensor, dim, axis)
    return _after_norm_or_split(name, args, kwargs, axis)


def _after_norm_or_split(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int
) -> int | None:
    dims = args[0].dim()
    if name in NORMS:
        order = _argument(args, kwargs, 1, "p" if name == "norm" else "ord")
        numbers = order is None or isinstance(order, Real | str)
        return _after_reduction((args[0], *args[2:]), kwargs, dims, axis) if numbers else None
    if name in SPLITS:
        return _after_split(name, args, kwargs, dims, axis)
    if name == "one_hot":  # without the number of classes it is the largest of the batch
        classes = _argument(args, kwargs, 1, "num_classes")
        return axis if type(classes) is int and classes > 0 else None
    return None


def _only_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in ("to", "type", "type_as"):
        return True
    values = (*args, *kwargs.values())
    return all(value is None or isinstance(value, Real | str) for value in values)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    if name == "normalize":
        found = _argument(args, kwargs, 2, "dim")
        return 1 if found is None else int(found)
    found = _argument(args, kwargs, 1, "dim")
    return None if found is None else int(found)


def _after_reduction(
    args: tuple[Any, ...], kwargs: dict[str, Any], dims: int, axis: int
) -> int | None:
    dim = _argument(args, kwargs, 1, "dim")
    keeps = _argument(args, kwargs, 2, "keepdim") or False
    every = dim if isinstance(dim, list | tuple) else [dim]
    if not every or not all(type(one) is int for one in every) or type(keeps) is not bool:
        return None
    gone = {_normal(one, dims) for one in every}
    if axis in gone:
        return None
    return axis if keeps else axis - sum(1 for one in gone if one < axis)


def _after_split(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dims: int, axis: int
) -> int | None:
    dim = _argument(args, kwargs, 1 if name in ("unbind", "sort") else 2, "dim")
    dim = SPLITS[name] if dim is None else dim
    if type(dim) is not int or _normal(dim, dims) == axis:
        return None
    return axis - (name == "unbind" and _normal(dim, dims) < axis)


def axis_after_join(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[tuple[Tensor, int]]
) -> int | None:
    """Return the axis of a result of several tensors with samples, or None where these may meet."""
    (first, axis), dims = operands[0], operands[0][0].dim()
    alike = all(at == axis and one.dim() == dims for one, at in operands)
    if not alike or any(one.shape[axis] != first.shape[axis] for one, _ in operands):
        return None
    if name in ("bmm", "matmul", "__matmul__"):
        return axis if axis < dims - 2 else None
    if name in ("gather", "take_along_dim"):
        dim = _argument(args, kwargs, 1 if name == "gather" else 2, "dim")
        return axis if type(dim) is int and _normal(dim, dims) != axis else None
    if name in ("cat", "concat", "concatenate", "stack"):
        dim = _argument(args, kwargs, 1, "dim") or 0
        after = dims + (name == "stack")
        if type(dim) is not int or (name != "stack" and _normal(dim, dims) == axis):
            return None
        return axis + (name == "stack" and _normal(dim, after) <= axis)
    if name == "cosine_similarity" and len(args) <= 3:
        dim = _argument(args, kwargs, 2, "dim")
        return _after_reduction((first, 1 if dim is None else dim), {}, dims, axis)
    if name == "pairwise_distance":
        keeps = _argument(args, kwargs, 4, "keepdim") or False
        return _after_reduction((first, -1, keeps), {}, dims, axis)
    return None


def axis_after_matrix(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int
) -> int | None:
    """Return the axis of samples after a product with a matrix that belongs to none of them."""
    tensor, matrix = args[0], _argument(args, kwargs, 1, "weight" if name == "linear" else "other")
    if name not in PRODUCTS or not isinstance(matrix, Tensor):
        return None
    return axis if matrix.dim() <= 2 and axis != tensor.dim() - 1 else None


def full_reduction(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return "mean" or "sum" where a call reduces all values of a tensor to one; else None."""
    if name not in ("mean", "sum") or not args or not isinstance(args[0], Tensor):
        return None
    dims, dim = args[0].dim(), args[1] if len(args) == 2 else kwargs.get("dim")
    if len(args) > 2 or not dims or not kwargs.keys() <= {"dim"}:
        return None
    every = [dim] if type(dim) is int else dim
    if not isinstance(every, list | tuple | None):
        return None
    over = {_normal(one, dims) for one in every or () if type(one) is int}
    return name if not every or over == set(range(dims)) else None


def _normal(dim: int, dims: int) -> int:
    return dim + dims if dim < 0 else dim


def _after_index(index: Any, dims: int, axis: int) -> int | None:
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts):
        return None
    spent = sum(1 for part in parts if part is not None and part is not Ellipsis)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    parts[at : at + 1] = [slice(None)] * (dims - spent)
    source = target = 0
    for part in parts:
        if part is None:
            target += 1
            continue
        if source == axis:
            return target if part == slice(None) else None
        source += 1
        target += type(part) is slice
    return None


def _after_permutation(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int
) -> int | None:
    dims = args[0].dim()
    order = list(range(dims))
    if name in ("t", "T"):
        order.reverse()
    elif name == "permute":
        permutation = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
        order = [_normal(int(dim), dims) for dim in (permutation or kwargs["dims"])]
    elif name == "movedim":
        if not all(isinstance(arg, int) for arg in args[1:]) or len(args) != 3:
            return None
        moved = order.pop(_normal(args[1], dims))
        order.insert(_normal(args[2], dims), moved)
    else:
        pair = (-2, -1) if name == "mT" else (args[1:] or tuple(kwargs.values()))
        if len(pair) != 2:
            return None
        a, b = (_normal(int(dim), dims) for dim in pair)
        order[a], order[b] = order[b], order[a]
    return order.index(axis)


def _after_squeeze(tensor: Tensor, dim: Any, axis: int) -> int | None:
    if dim is None:
        gone = [i for i in range(tensor.dim()) if tensor.shape[i] == 1]
    elif isinstance(dim, int):
        gone = [i for i in [_normal(dim, tensor.dim())] if tensor.shape[i] == 1]
    else:
        return None
    return None if axis in gone else axis - sum(1 for i in gone if i < axis)
