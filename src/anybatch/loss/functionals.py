"""Table of torch's losses: numerator as a sum over samples, and its denominator.

``reduction="mean"`` hides the denominator, and that is where accumulation goes wrong: a mean over
the targets that are not ignored, or weighted by their classes, is not the mean of the
micro-batches' means. For each functional of ``torch.nn.functional`` this table says how to get the
numerator (it adds up over micro-batches) and the denominator (it can be counted without the model).

    CrossEntropy mean = sum_i w[y_i] nll_i / sum_i w[y_i],     i over targets != ignore_index

Only losses in which a row meets no other row are here. A form that is not listed, such as
``reduction="none"``, is not recognised, and never guessed. Source: the formulas in the
documentation of torch's loss modules.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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
    """

    rows: dict[str, int | None]
    count: Callable[[Arguments], Count]
    fits: Callable[[Arguments], bool]
    constants: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


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
    if any(isinstance(a, Tensor) and a.dtype is torch.float16 for a in arguments.values()):
        arguments = {name: _wide(value) for name, value in arguments.items()}
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
    """Return the names of the parameters, in order, and the defaults."""
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


def _classes() -> Functional:
    def fits(a: Arguments) -> bool:
        dims = a["input"].dim() - a["target"].dim()
        return a["input"].dim() >= 2 and dims in (0, 1)

    return Functional({"input": 0, "target": 0}, _class_targets, fits, ("weight",))


def _classes_of_a_layer() -> Functional:
    """``cross_entropy(linear(input, linear_weight), target)``, with the layer as an argument."""

    def fits(a: Arguments) -> bool:
        dims = _dims(a["linear_weight"]) - (not a["target"].is_floating_point())
        return a["input"].dim() == 2 and _dims(a["target"]) == dims

    layer = ("linear_weight", "linear_bias")
    return Functional({"input": 0, "target": 0}, _class_targets, fits, ("weight",), layer)


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
        lambda a: (a["input1"].dim(), a["input2"].dim(), a["target"].dim()) == (2, 2, 1),
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


TABLE[own_values] = Functional({"input": 0}, _broadcast("input"), lambda a: _dims(a["input"]) > 0)
TABLE[own_weighted_values] = Functional(
    {"input": 0, "weight": 0}, lambda a: torch.as_tensor(a["weight"].sum()), lambda _: True
)
