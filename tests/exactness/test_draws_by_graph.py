"""Full-batch draws of a forward that takes another way where gradients are on.

Such a way calls the same draw from another place: a checkpoint that is left out without gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from anybatch import Engine
from anybatch.errors import NotExactError


class Net(nn.Module):
    """A network with a dropout, which a function calls."""

    def __init__(self, way: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(4, 8), nn.Linear(8, 3), way

    def block(self, x: Tensor) -> Tensor:
        return F.dropout(self.first(x), 0.3, self.training).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self, x))  # type: ignore[no-any-return]


def recomputed(net: Net, x: Tensor, *, reentrant: bool) -> Tensor:
    if not torch.is_grad_enabled():
        return net.block(x)
    x = x.requires_grad_() if reentrant else x
    return checkpoint(net.block, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "asks": lambda net, x: net.block(x) if torch.is_grad_enabled() else net.block(x + 0),
    "asks a tensor": lambda net, x: (
        net.block(x) if net.first(x).requires_grad else net.block(x + 0)
    ),
    "recomputed": lambda net, x: recomputed(net, x, reentrant=False),
    "recomputed by the old way": lambda net, x: recomputed(net, x, reentrant=True),
}


def coupled(o: Tensor, _: Tensor) -> Tensor:
    return (o @ o.T).logsumexp(1).mean()


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, coupled])
@pytest.mark.parametrize("name", WAYS)
def test_its_draws_are_those_of_the_batch(name: str, loss_fn: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(WAYS[name]).double()
    engine = Engine(model, loss_fn, micro_batch=3, rng="batch")
    for _ in range(2):
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
        model.zero_grad()
        start = torch.get_rng_state()
        want = undivided(model, loss_fn, x.clone(), y)
        torch.set_rng_state(start)
        assert_exact(state_of(model, engine.backward(x, y)), want)


def test_a_draw_whose_place_is_not_found_again_is_refused() -> None:
    """Each attempt asked for its layout anew, for good."""
    model = Net(lambda net, x: net.block(x) if x._version else net.block(x + 0))
    with pytest.raises(NotExactError, match="must be found again"):
        Engine(model, F.cross_entropy, micro_batch=3, rng="batch").backward(
            torch.randn(8, 4).add_(1), torch.randint(3, (8,))
        )
