"""Masks are computed outside of all modes, and only those that are large count as memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.peaks import metered
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from anybatch import Engine
from anybatch.execution.proof.follow import Follow, Masks

PAGE = 4096


class Kernels(TorchDispatchMode):
    """Notes the kernels that it intercepts."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def test_modes_around_a_followed_forward_intercept_only_its_kernels() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x, follow = torch.randn(4, 3), Follow(model, Masks())
    with torch.no_grad(), Kernels() as wanted:
        model(x)
    follow.seed(x, [0, 1, 2, 3])
    with torch.no_grad(), Kernels() as found, follow:
        outputs = model(x)
    assert found.names == wanted.names
    mask = follow.masks.of(outputs)
    assert mask is not None
    assert mask.flatten().tolist() == [1, 2, 4, 8]


@pytest.mark.parametrize("large", [False, True])
def test_a_mask_counts_from_a_page_on(large: bool) -> None:
    width = PAGE if large else PAGE // 8

    def mixed(x: Tensor) -> Tensor:
        return torch.cat([x[0], x[1]])

    x, follow = torch.randn(2, width), Follow(nn.Identity(), Masks())
    follow.seed(x, [0, 1])
    with metered() as plain:
        mixed(x)
    with metered() as meter, follow:
        found = mixed(x)
    assert (meter.peak > plain.peak) == large
    mask = follow.masks.of(found)
    assert mask is not None
    assert mask.numel() == 2 * width


class Wrapped(Tensor):
    """A tensor of a person's own type, whose numbers are in another one."""

    inner: Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        return func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))


def wrapped(inner: Tensor) -> Wrapped:
    """Return a tensor that wraps another one."""
    make = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    outer: Wrapped = make(Wrapped, inner.shape, dtype=inner.dtype)
    outer.inner = inner
    return outer


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.order = nn.Linear(4, 8), wrapped(torch.arange(7, -1, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)[:, self.order]


def test_indices_of_a_persons_own_type_are_computed_with() -> None:
    model, x, y = Ordered().double(), torch.randn(12, 4).double(), torch.randn(12, 8).double()
    (wanted,) = torch.autograd.grad(nn.functional.mse_loss(model(x), y), [model.line.weight])
    Engine(model, nn.functional.mse_loss, micro_batch=3).backward(x, y)
    assert model.line.weight.grad is not None
    assert torch.allclose(model.line.weight.grad, wanted, rtol=0, atol=1e-14)
