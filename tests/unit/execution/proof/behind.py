"""Operations along one dimension with a backward of their own: a function's, or a hook's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.unit.execution.proof.along import FIRST, Along
from torch import Tensor


class _Turned(torch.autograd.Function):
    """The identity, whose backward is given."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.transform = transform
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.transform(grads[0]), None


class _Scan(torch.autograd.Function):
    """A cumulative sum with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, d: int) -> Tensor:
        ctx.d = d
        return z.cumsum(d) / 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].flip(ctx.d).cumsum(ctx.d).flip(ctx.d) / 4, None


def function(transform: Callable[[Tensor, int], Tensor]) -> Along:
    def run(z: Tensor, d: int, _: Tensor) -> Tensor:
        found: Tensor = _Turned.apply(z, lambda grad: transform(grad, d))  # type: ignore[no-untyped-call]
        return found

    return run


def hook(transform: Callable[[Tensor, int], Tensor]) -> Along:
    def run(z: Tensor, d: int, _: Tensor) -> Tensor:
        out = z * 1
        if out.requires_grad:
            out.register_hook(lambda grad: transform(grad, d))  # type: ignore[no-untyped-call]
        return out

    return run


def hook_of_values(z: Tensor, d: int, _: Tensor) -> Tensor:
    out = z * 1
    if out.requires_grad:
        mean = z.detach().mean(d, keepdim=True)
        out.register_hook(lambda grad: grad * mean)  # type: ignore[no-untyped-call]
    return out


class _Saving(torch.autograd.Function):
    """The identity, whose backward weighs a gradient by what forward has saved."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, d: int) -> Tensor:
        ctx.d = d
        ctx.save_for_backward(z)
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0].softmax(ctx.d), None


def saving(z: Tensor, d: int, _: Tensor) -> Tensor:
    found: Tensor = _Saving.apply(z, d)  # type: ignore[no-untyped-call]
    return found


def scan(z: Tensor, d: int, _: Tensor) -> Tensor:
    found: Tensor = _Scan.apply(z, d)  # type: ignore[no-untyped-call]
    return found


def unit(grad: Tensor, d: int) -> Tensor:
    size: Tensor = grad.norm(dim=d, keepdim=True)
    return grad / (size + 0.01)


def centre(grad: Tensor, d: int) -> Tensor:
    return grad - grad.mean(d, keepdim=True)


IDENTITIES: dict[str, Along] = {
    "a function whose backward centres": function(centre),
    "a function whose backward normalises": function(unit),
    "a function whose backward adds up": function(lambda grad, d: grad.cumsum(d)),
    "a hook that centres": hook(centre),
    "a hook that normalises": hook(unit),
    "a hook that weighs by the largest": hook(lambda grad, d: grad * grad.softmax(d)),
    "a hook that turns": hook(lambda grad, d: grad.flip(d)),
    "a function whose backward rolls": function(lambda grad, d: grad.roll(1, d)),
    "a hook that mutes the first": hook(lambda grad, d: grad.index_fill(d, FIRST, 0.0)),
    "a hook that divides by the length": hook(lambda grad, d: grad / grad.shape[d]),
    "a hook with a mean of values": hook_of_values,
    "a function that saves": saving,
}
"""Operations that are the identity forward."""
BACKWARD: dict[str, Along] = {"a function that scans": scan, **IDENTITIES}
"""All of them."""
