"""How large a mini-batch must be to hold at least one sample of each class.

"A mini-batch contains at least one sample from each class" is advice about a random draw, so it has
a probability. For N samples drawn alike, of classes with shares p_1 ... p_C:

    P(all) = sum over sets S of classes of (-1)^|S| (1 - sum of p in S)^N

which has 2^C terms. With many classes two bounds stand in for it, near each other where the
probability is high:

    1 - sum (1 - p_c)^N  <=  P(all)  <=  product of 1 - (1 - p_c)^N

The lower one adds up the chances to miss a class. The upper one holds because counts of classes are
negatively associated: where one class is there, there is less room for another.

Source: guide, section 3.1.1, after Hinton (2010). Joag-Dev and Proschan (1983) on the upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, isclose, log1p, prod

from anybatch.tools.gpus import positive, positive_integer

EXACT = 12
"""Classes up to which all sets of them are counted."""


@dataclass(frozen=True)
class Chance:
    """A probability, or two between which it is.

    Attributes:
        least: not more than it.
        most: not less than it; the same where it is exact.
    """

    least: float
    most: float


def every_class(shares: Sequence[float], samples: int) -> Chance:
    """Return the probability that a mini-batch holds at least one sample of each class.

    Args:
        shares: of each class among the samples, above 0; they add up to 1.
        samples: N, drawn independently.

    Raises:
        ValueError: the shares are not such, or `samples` is below 1.

    Example:
        >>> every_class([0.5, 0.5], 2)
        Chance(least=0.5, most=0.5)
    """
    positive_integer(samples=samples)
    if not shares or not isclose(fsum(shares), 1, rel_tol=1e-6):
        raise ValueError(f"shares of classes must add up to 1, and they add up to {fsum(shares)}")
    for one in shares:
        positive(share_of_a_class=one)
    if samples < len(shares):
        return Chance(0.0, 0.0)
    if len(shares) == 1:
        return Chance(1.0, 1.0)
    if len(shares) <= EXACT:
        exact = min(1.0, max(0.0, _exact(shares, samples)))
        return Chance(exact, exact)
    missing = [_missing(one, samples) for one in shares]
    return Chance(max(0.0, 1 - fsum(missing)), prod(1 - one for one in missing))


def _missing(share: float, samples: int) -> float:
    """Return (1 - p)^N, with all its digits where p is small."""
    return exp(samples * log1p(-share))


def _exact(shares: Sequence[float], samples: int) -> float:
    """Return the sum over all sets of classes."""
    sets = [(0.0, 1.0)]
    for one in shares:
        sets += [(gone + one, -sign) for gone, sign in sets]
    return fsum(sign * max(0.0, 1 - gone) ** samples for gone, sign in sets)


def samples_for(shares: Sequence[float], probability: float) -> int:
    """Return the smallest mini-batch that surely reaches a probability to hold every class.

    Exact for up to 12 classes; with more it is the smallest of which the lower bound says so.

    Args:
        shares: see `every_class`.
        probability: to reach, from 0 to below 1.

    Raises:
        ValueError: it is out of range, or the shares are.
    """
    if not 0 <= probability < 1:
        raise ValueError(f"probability must be from 0 to below 1, not {probability!r}")
    most = max(1, len(shares))
    while every_class(shares, most).least < probability:
        most *= 2
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        if every_class(shares, middle).least < probability:
            least = middle
        else:
            most = middle
    return most
