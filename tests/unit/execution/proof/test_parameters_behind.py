"""Functions of parameters, beside a backward that is not torch's own: their gradients are sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.execution.proof.nets import hooked, is_shown
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

OF_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "softmax": lambda p: p.softmax(0),
    "log_softmax": lambda p: p.log_softmax(0),
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "glu": lambda p: F.glu(torch.cat([p, p]), 0),
    "layer_norm": lambda p: F.layer_norm(p, (8,)),
    "norm": lambda p: p / p.norm(),
    "exp": torch.exp,
    "cumsum": lambda p: p.cumsum(0),
}


class Double(torch.autograd.Function):
    """Twice a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


EXTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd.Function": Double.apply,
    "hook": hooked(lambda grad: grad * 1),
    "reentrant checkpoint": lambda h: checkpoint(torch.sin, h, use_reentrant=True),
}


class Gated(nn.Module):
    """A gate of a parameter, behind something whose backward is a person's."""

    def __init__(self, of: Callable[[Tensor], Tensor], extra: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.gate = nn.Parameter(torch.rand(8))
        self.of, self.extra = of, extra

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] -> [n, 3]."""
        return self.last(self.extra(self.first(x) * self.of(self.gate)))


@pytest.mark.product
@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("of", OF_PARAMETERS)
def test_a_function_of_a_parameter_is_shown_next_to_it(of: str, extra: str) -> None:
    """The sum that comes back to it was said to be of several samples at once."""
    torch.manual_seed(0)
    net = Gated(OF_PARAMETERS[of], EXTRA[extra]).double()
    x, y = torch.randn(7, 6).double(), torch.randint(3, (7,))
    assert is_shown(net, F.cross_entropy, x, y, 3)


@pytest.mark.parametrize("fn", [torch.sign, torch.tanh, lambda grad: grad / grad.norm()])
def test_a_hook_that_computes_with_a_sum_over_samples_is_refused(fn: Any) -> None:
    torch.manual_seed(0)

    def of(p: Tensor) -> Tensor:
        p = p.sigmoid()
        p.register_hook(fn)
        return p

    net = Gated(of, lambda h: h).double()
    x, y = torch.randn(7, 6).double(), torch.randint(3, (7,))
    assert not is_shown(net, F.cross_entropy, x, y, 3)
