"""The truth that tests compare with: the undivided batch in float64, run by torch alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anybatch.core.barrier import in_forward, looks_here, standalone_here
from anybatch.tools.exactness import error_of, tolerance

Model = TypeVar("Model", bound=nn.Module)


def state_after(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Return loss, gradients and buffers that `run` leaves on a copy of `model`."""
    copied = copy_of(model)
    return state_of(copied, run(copied))


def copy_of(model: Model) -> Model:
    """Return a copy of a model and of the gradients that are there, which torch leaves out."""
    copied = copy.deepcopy(model)
    for p, mine in zip(model.parameters(), copied.parameters(), strict=True):
        mine.grad = None if p.grad is None else p.grad.clone()
    return copied


def state_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return copies of a loss, and of the gradients and buffers that are there."""
    found = {"loss": loss.detach().clone()}
    found |= {
        f"{n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    found |= {f"{n} (buffer)": b.clone() for n, b in model.named_buffers()}
    return found


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def undivided(model: nn.Module, loss_fn: Any, inputs: Any, targets: Any) -> dict[str, Tensor]:
    """Return what the full batch gives at once."""

    def run(copied: nn.Module) -> Tensor:
        outputs = call(copied, inputs)
        loss: Tensor = loss_fn(outputs) if targets is None else loss_fn(outputs, targets)
        loss.backward()
        return loss

    return state_after(model, run)


def trained(step: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return what trains a copy of a model for two steps, the second of another size."""

    def run(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        def both(copied: nn.Module) -> Tensor:
            optimizer = torch.optim.SGD(copied.parameters(), lr=0.05, momentum=0.9)
            step(copied, x, y)
            optimizer.step()
            optimizer.zero_grad()
            return step(copied, x[3:], y[3:])

        return state_after(model, both)

    return run


def assert_exact(
    got: dict[str, Tensor], want: dict[str, Tensor], noise: dict[str, float] | None = None
) -> None:
    """Assert Law 1."""
    errors = error_of(got, want)
    bound = tolerance(noise)
    wrong = {name: error for name, error in errors.items() if not error <= bound}
    assert not wrong, f"over {bound:.1e}: {wrong}"


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return everything that a failed step must leave as it was (Law 5)."""
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "gradient ids": [id(p.grad) if p.grad is not None else None for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "buffer ids": [id(b) for b in model.buffers()],
        "rng": torch.get_rng_state(),
        "hooks": [
            [len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)]
            for m in model.modules()
        ],
        "training": [m.training for m in model.modules()],
        "modes": [
            torch.is_grad_enabled(),
            len(_get_current_function_mode_stack()),
            len(_get_current_dispatch_mode_stack()),
            id(torch.batch_norm),
            standalone_here(),
            in_forward(),
            looks_here(),
        ],
        "optimizer": None if optimizer is None else copy.deepcopy(optimizer.state_dict()),
    }


def same(a: Any, b: Any) -> bool:
    """Say whether two snapshots are equal bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
