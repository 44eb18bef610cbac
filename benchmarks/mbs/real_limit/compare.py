"""Whether two trainings are the same (design, 7.10): never "the curves look alike".

In float64 all losses and weights agree to 1e-9. In float32 they may be as far apart as two
undivided trainings that differ only in the order of rows within a mini-batch, which is how far
rounding alone carries them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from benchmarks.mbs.real_limit.training import Trained

DOUBLE = 1e-9


@dataclass(frozen=True)
class Comparison:
    """How far two trainings are apart, and how far they may be."""

    distance: float
    allowed: float

    @property
    def same(self) -> bool:
        """Whether they are one training but for rounding; NaN is not."""
        return self.distance <= self.allowed


def _relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def distance(a: Trained, b: Trained) -> float:
    """The larger of two relative distances: of all losses, and of all weights together.

    Raises:
        ValueError: the two have not the same steps or not the same weights.
    """
    if len(a.losses) != len(b.losses) or a.weights.keys() != b.weights.keys():
        raise ValueError(
            "two trainings must have the same steps and weights to be compared; got "
            f"{len(a.losses)} and {len(b.losses)} steps, {len(a.weights)} and {len(b.weights)} "
            "weights: train both to their end"
        )
    vectors = [torch.cat([t.weights[name].flatten() for name in b.weights]) for t in (a, b)]
    losses = [torch.tensor(t.losses, dtype=torch.float64) for t in (a, b)]
    found = [_relative_error(*vectors), _relative_error(*losses)]
    return float(torch.tensor(found).max())  # a NaN stays one


def compare(a: Trained, b: Trained, orders: Sequence[Trained] = ()) -> Comparison:
    """Compare `a` with `b`, the undivided training.

    Args:
        a: the training in question.
        b: the undivided one.
        orders: other undivided trainings in float32, their rows in another order.

    Raises:
        ValueError: float32 without `orders`, or steps and weights that do not match.
    """
    gap = distance(a, b)
    if all(weight.dtype == torch.float64 for weight in b.weights.values()):
        return Comparison(gap, DOUBLE)
    if not orders:
        raise ValueError(
            "trainings in float32 are compared with undivided ones whose rows have another "
            "order; got none: pass `orders`, or train in float64"
        )
    return Comparison(gap, max(distance(*pair) for pair in combinations([b, *orders], 2)))
