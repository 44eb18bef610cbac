"""Couplings that only a backward pass makes: forward is the identity."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mbs.adversary.forms import Place, form, weights

SMALL = 1e-3


def _normalised(grad: Tensor, *, honest: bool) -> Any:
    size = grad.norm(dim=1, keepdim=True) if honest else grad.norm()
    return grad / (size + SMALL)


class _Function(torch.autograd.Function):
    """The identity; it changes a gradient as it is told."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, what: str, honest: bool) -> Tensor:  # noqa: FBT001
        ctx.what, ctx.honest = what, honest
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        dim = 1 if ctx.honest else 0
        if ctx.what == "normalised":
            grad = _normalised(grad, honest=ctx.honest)
        elif ctx.what == "clipped":
            size = grad.norm(dim=1, keepdim=True) if ctx.honest else grad.norm()
            grad = grad * (0.05 / (size + SMALL)).clamp(max=1)
        elif ctx.what == "centred":
            grad = grad - grad.mean(dim, keepdim=True)
        elif ctx.what == "sorted":
            grad = grad.sort(dim).values
        elif ctx.what == "in place":
            grad = grad.clone()
            grad -= grad.mean(dim, keepdim=True)
        return grad, None, None


APPLY: Any = _Function.apply


@form("backward only")
def function_normalises(p: Place, z: Tensor) -> Any:
    return APPLY(z, "normalised", p.honest)


@form("backward only")
def function_clips(p: Place, z: Tensor) -> Any:
    return APPLY(z, "clipped", p.honest)


@form("backward only")
def function_centres(p: Place, z: Tensor) -> Any:
    return APPLY(z, "centred", p.honest)


class _Named(torch.autograd.Function):
    """A function that hides the name of its node, as people write it."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, name: str) -> Tensor:
        ctx.name, ctx.width = name, z.shape[1]
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.name == "samples":
            return grads[0] - grads[0].mean(0), None
        return grads[0] / ctx.width, None


APPLY_NAMED: Any = _Named.apply


@form("backward only")
def function_with_a_name(p: Place, z: Tensor) -> Any:
    return APPLY_NAMED(z, "features" if p.honest else "samples")


@form("backward only", rough=True)
def function_sorts(p: Place, z: Tensor) -> Any:
    return APPLY(z, "sorted", p.honest)


@form("backward only")
def function_centres_in_place(p: Place, z: Tensor) -> Any:
    return APPLY(z, "in place", p.honest)


@form("backward only")
def tensor_hook(p: Place, z: Tensor) -> Any:
    rows: Any = z * 1
    if rows.requires_grad:
        rows.register_hook(lambda grad: grad - grad.mean(p.dim, keepdim=True))
    return rows


@form("backward only")
def tensor_hook_by_norm(p: Place, z: Tensor) -> Any:
    rows: Any = z * 1
    if rows.requires_grad:
        rows.register_hook(lambda grad: _normalised(grad, honest=p.honest))
    return rows


def _hooked(p: Place, width: int) -> None:
    p.inner, honest = nn.Linear(width, width), p.honest

    def hook(_module: nn.Module, inputs: Any, _outputs: Any) -> Any:
        return (_normalised(inputs[0], honest=honest),)

    p.inner.register_full_backward_hook(hook)


@form("backward only", prepare=_hooked)
def module_hook(p: Place, z: Tensor) -> Any:
    return p.inner(z)


def _hooked_before(p: Place, width: int) -> None:
    p.inner, dim = nn.Linear(width, width), p.dim

    def hook(_module: nn.Module, outputs: Any) -> Any:
        return (outputs[0] - outputs[0].mean(dim, keepdim=True),)

    p.inner.register_full_backward_pre_hook(hook)


@form("backward only", prepare=_hooked_before)
def module_hook_before(p: Place, z: Tensor) -> Any:
    return p.inner(z)


def _table(p: Place, width: int) -> None:
    p.table = nn.Embedding(5, width, scale_grad_by_freq=not p.honest)


@form("backward only", prepare=_table, rough=True)
def scaled_by_frequency(p: Place, z: Tensor) -> Any:
    return p.table((z.detach()[:, 0] * 4).round().long() % 5)


def _clamped(p: Place, width: int) -> None:
    p.weight, scale = weights(width, width), p.honest
    p.weight.register_hook(lambda grad: grad * 0.5 if scale else grad.clamp(-0.02, 0.02))


@form("backward only", prepare=_clamped)
def parameter_hook(p: Place, z: Tensor) -> Any:
    return z @ p.weight


def _accumulated(p: Place, width: int) -> None:
    p.weight, honest = weights(width, width), p.honest

    def hook(weight: Tensor) -> None:
        if not honest and weight.grad is not None:
            weight.grad.clamp_(-0.02, 0.02)

    p.weight.register_post_accumulate_grad_hook(hook)


@form("backward only", prepare=_accumulated)
def accumulated_hook(p: Place, z: Tensor) -> Any:
    return z @ p.weight


@form("backward only")
def grad_within_forward(p: Place, z: Tensor) -> Any:
    with torch.enable_grad():
        rows = z.detach().requires_grad_()
        energy = rows.square().sum(1) if p.honest else rows.square().sum().sqrt()
        (force,) = torch.autograd.grad(energy.sum(), rows)
    return z - 0.5 * force
