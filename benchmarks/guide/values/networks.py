"""Networks whose memory depends on the values of a batch, and batches that hold little or much."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SIZE, TOKENS, WIDTH, INNER = 32, 64, 8, 64


class Values(nn.Module):
    """A network of tokens, of which those with a large first feature go through a wider part.

    Args:
        way: ``way(network, tokens)`` returns the tokens after that part.
    """

    def __init__(self, way: Callable[[Values, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.wide = nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, INNER), nn.Linear(INNER, WIDTH)
        )
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.first.bias)  # what is chosen is the batch's business alone
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [n, 4] of samples [n, tokens, width]."""
        out: Tensor = self.last(self.way(self, self.first(x) + x)).mean(1)
        return out


def masked(net: Values, z: Tensor) -> Tensor:
    """Write by a mask."""
    some = z[..., 0] > 1
    return z.index_put((some,), net.wide(z[some]))


def gathered(net: Values, z: Tensor) -> Tensor:
    """Add at places, as routers of experts do."""
    flat = z.flatten(0, 1)
    places = (flat[:, 0] > 1).nonzero().squeeze(1)
    return flat.index_add(0, places, net.wide(flat[places])).view_as(z)


def where_any(net: Values, z: Tensor) -> Tensor:
    """Skip the part where no token needs it."""
    some = z[..., 0] > 1
    return z.index_put((some,), net.wide(z[some])) if some.any() else z


def selected(net: Values, z: Tensor) -> Tensor:
    """Select and scatter single numbers."""
    some = (z[..., :1] > 1).expand_as(z)
    wide = net.wide(z.masked_select(some).view(-1, WIDTH))
    return z.masked_scatter(some, wide.flatten())


def halting(net: Values, z: Tensor) -> Tensor:
    """Go through the part until each token has had its own number of rounds."""
    rounds = z[..., 0].detach().clamp(0, 4).long()
    for number in range(int(rounds.max())):
        on = rounds > number
        z = z.index_put((on,), z[on] + net.wide(z[on]))
    return z


WAYS = {
    "mask": masked,
    "places": gathered,
    "branch": where_any,
    "selection": selected,
    "rounds": halting,
}


def batch(share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return samples in which a share of the tokens is to go through the part, and labels."""
    torch.manual_seed(seed)
    x = torch.randn(SIZE, TOKENS, WIDTH, dtype=torch.float64) / 8
    x[torch.rand(SIZE, TOKENS) < share] += 4
    return x, torch.randint(4, (SIZE,))
