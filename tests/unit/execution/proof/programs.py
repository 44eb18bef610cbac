"""Programs that are drawn from a seed, and of which it is known whether samples meet in them.

A program is a list of stages between two linear layers. Each stage treats `[n, t, d]` along one
dimension in a layout of its own, and joins the result with what it had. Samples meet where the
dimension is theirs: in one stage of a coupled program, and in no other.

    tokens, samples, features     [t, n, d]    softmax(0): apart    softmax(1): samples meet
    one line a sample             [n, t * d]   softmax(1): apart    softmax(0): samples meet
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from tests.unit.execution.proof.along import ALONG
from tests.unit.execution.proof.behind import BACKWARD, IDENTITIES
from tests.unit.execution.proof.together import TWINS, Tools
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CLASSES = 3
EVERY = {**ALONG, **BACKWARD}
"""Operations along a dimension."""


class Layout(NamedTuple):
    """Another order of the numbers of `[n, t, d]`.

    Attributes:
        enter: `[n, t, d]` -> this order.
        restore: this order, and `[n, t, d]` as it was -> that.
        samples: dimensions along which samples lie.
        without_samples: dimensions along which none lie.
    """

    enter: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor, Tensor], Tensor]
    samples: tuple[int, ...]
    without_samples: tuple[int, ...]


def ordered(*order: int) -> Layout:
    """Return the layout of a permutation; of four dimensions, the last is that of heads."""
    back = [order.index(at) for at in range(len(order))]
    heads = len(order) == 4

    def enter(h: Tensor) -> Tensor:
        return (h.unflatten(2, (-1, 2)) if heads else h).permute(order)  # type: ignore[no-untyped-call]

    def restore(z: Tensor, h: Tensor) -> Tensor:
        return z.permute(back).reshape(h.shape)

    at = order.index(0)
    return Layout(enter, restore, (at,), tuple(k for k in range(len(order)) if k != at))


def regrouped(h: Tensor) -> Tensor:
    return h.reshape(h.shape[1], h.shape[0], h.shape[2])


def strided(h: Tensor) -> Tensor:
    n, t, d = h.shape
    return h.contiguous().as_strided((d, n, t), (1, t * d, d))


def same(z: Tensor, h: Tensor) -> Tensor:
    return z.reshape(h.shape)


LAYOUTS: dict[str, Layout] = {
    "samples, tokens, features": ordered(0, 1, 2),
    "tokens, samples, features": ordered(1, 0, 2),
    "features, samples, tokens": ordered(2, 0, 1),
    "tokens, features, samples": ordered(1, 2, 0),
    "samples, features, tokens": ordered(0, 2, 1),
    "heads": ordered(0, 3, 1, 2),
    "heads first": ordered(3, 1, 0, 2),
    "tokens as rows": Layout(lambda h: h.flatten(0, 1), same, (0,), (1,)),
    "one line a sample": Layout(lambda h: h.flatten(1), same, (0,), (1,)),
    "one column a sample": Layout(
        lambda h: h.flatten(1).T, lambda z, h: z.T.reshape(h.shape), (1,), (0,)
    ),
    "strides": Layout(strided, lambda z, h: z.permute(1, 2, 0).reshape(h.shape), (1,), (0, 2)),
    "regrouped": Layout(regrouped, same, (0, 1), (2,)),
}


WAYS = ("replaced", "gated", "gated", "added", "a factor", "detached", "compared", "joined")
HARD = frozenset(
    (
        "a hook that turns",
        "a function whose backward rolls",
        "a hook that mutes the first",
        "a hook that divides by the length",
        "a constant for the first",
        "a constant for the last, in place",
        "a triangle of rows",
    )
)
"""Couplings that no mask shows.

The first four give to a row the gradient of another one, or one that depends on its place or on how
many rows there are. The others write numbers that belong to no sample to rows of some places: their
results differ, and behind a gate of 0 nothing does.
"""
DOUBTED = frozenset(("argmax", "ids"))
"""Operations that keep samples apart, and in which Python reads a number of all of them."""


def names(*, meets: bool) -> list[str]:
    """Return the operations in which samples may meet, or that may keep them apart."""
    twins = [n for n, twin in TWINS.items() if (twin.meets if meets else twin.separate) is not None]
    return [*EVERY, *twins]


class Stage(nn.Module):
    """One operation, and how its result is joined with what was there.

    Args:
        tokens: how many there are.
        width: features.
        operation: its name.
        meets: samples meet in it.

    Attributes:
        layout: a name of `LAYOUTS`.
        dim: the dimension of that layout which the operation treats.
        way: how its result is joined with what was there.
        gate: a factor of it, for the way "gated".
        checkpoint: it is computed again in backward.
    """

    def __init__(self, tokens: int, width: int, operation: str, *, meets: bool) -> None:
        super().__init__()
        self.operation, self.meets = operation, meets
        self.layout, self.dim = "samples, tokens, features", 0 if meets else 1
        self.way, self.checkpoint = "replaced", False
        self.tools = Tools(width)
        self.shift = nn.Parameter(torch.randn(tokens, width) / 2)
        self.weights = nn.Parameter(torch.tensor([0.7, -0.4, 0.9]))
        self.gate = nn.Parameter(torch.tensor(0.0))
        self.joined = nn.Linear(2 * width, width)

    def draw(self, rng: random.Random) -> Stage:
        """Draw all but the operation."""
        self.layout = rng.choice(sorted(LAYOUTS))
        self.way = rng.choice(WAYS)
        layout = LAYOUTS[self.layout]
        self.dim = rng.choice(layout.samples if self.meets else layout.without_samples)
        if self.operation in IDENTITIES and self.way in ("detached", "compared"):
            self.way = "gated"  # it has no backward there
        free = self.operation not in ("a gradient in forward", "an energy")
        self.checkpoint = free and rng.random() < 0.3
        self.gate.data.fill_(rng.choice((0.0, 1e-9, 1.0)))
        return self

    def __repr__(self) -> str:
        words = ["MEETS"] * self.meets + [self.operation, self.layout, str(self.dim), self.way]
        words += [f"gate {self.gate.item():g}"] * (self.way == "gated")
        return "; ".join(words + ["checkpoint"] * self.checkpoint)

    def operate(self, h: Tensor, ids: Tensor) -> Tensor:
        """Return the operation's result on `[n, t, d]`."""
        h = h + self.shift
        if self.operation in TWINS:
            form = TWINS[self.operation].meets if self.meets else TWINS[self.operation].separate
            assert form is not None
            found: Tensor = form(self.tools, h, ids)
            return found
        layout = LAYOUTS[self.layout]
        z = EVERY[self.operation](layout.enter(h), self.dim, self.weights)
        return layout.restore(z, h)

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        """[n, t, d], [n] -> [n, t, d]."""
        if self.checkpoint:
            z: Tensor = checkpoint(self.operate, h, ids, use_reentrant=False)
        else:
            z = self.operate(h, ids)
        if self.way == "gated":
            return h + self.gate * z
        if self.way == "added":
            return h.tanh() + z
        if self.way == "a factor":
            return h * z.sigmoid()
        if self.way == "detached":
            return h * z.detach().sigmoid()
        if self.way == "compared":
            return h.where(z.detach() > 0.1, h.tanh())
        if self.way == "joined":
            joined: Tensor = self.joined(torch.cat([h, z], -1))
            return joined
        return z


class Program(nn.Module):
    """Stages between two linear layers.

    Args:
        stages: of them; one of its own width and tokens each.
        tokens: how many there are.
        width: features.
    """

    def __init__(self, stages: list[Stage], tokens: int, width: int) -> None:
        super().__init__()
        self.tokens, self.stages = tokens, nn.ModuleList(stages)
        self.first, self.head = nn.Linear(4, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """[n, t, 4], [n] -> [n, classes]."""
        h = self.first(x)
        for stage in self.stages:
            h = F.layer_norm(stage(h, ids), h.shape[2:])
        out: Tensor = self.head(h).mean(1)
        return out

    def rows(self, n: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return inputs and targets of `n` samples."""
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(n, self.tokens, 4, generator=rng, dtype=torch.float64)
        ids = torch.randint(9, (n,), generator=rng)
        return (x, ids), torch.randint(CLASSES, (n,), generator=rng)


def plain(*operations: str, meets: bool, tokens: int = 3) -> Program:
    """Return the program of operations as they are, in float64; samples may meet in the last."""
    torch.manual_seed(0)
    last = len(operations) - 1
    found = [Stage(tokens, 6, n, meets=meets and at == last) for at, n in enumerate(operations)]
    return Program(found, tokens, 6).double()


def drawn(seed: int, *, meets: bool) -> Program:
    """Return the program of a seed, in float64; in a coupled one samples meet in one stage."""
    rng = random.Random(f"{seed} {meets}")
    torch.manual_seed(seed)
    tokens, width, count = rng.choice((2, 3, 4, 5)), rng.choice((4, 6, 8)), rng.randint(1, 4)
    chosen = rng.randrange(count) if meets else -1
    stages = []
    for at in range(count):
        every = sorted(set(names(meets=at == chosen)))
        stage = Stage(tokens, width, rng.choice(every), meets=at == chosen)
        stages.append(stage.draw(rng))
    return Program(stages, tokens, width).double()
