"""Cases of a product of parameters that hold each value of each of them, or each pair of values.

A test of 11 models, 3 sizes and 2 losses has 66 cases, in which each model occurs six times. Most
faults show for one value of one parameter, or for two of two: fewer cases hold all of these.

    models x sizes x losses     66 cases: all
    each pair of values         33 cases: each model with each size, each size with each loss
    each value                  11 cases

Source: Kuhn, Wallace and Gallo, Software fault interactions and implications for software testing.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any


def covering(
    cases: Sequence[Mapping[str, Any]], rng: random.Random, *, pairs: bool = False
) -> list[int]:
    """Return the places of few cases that hold each value of the cases.

    The cases come in random order, and each time that one is taken which holds the most that none
    has held so far.

    Args:
        cases: name -> value of the parameters of each.
        rng: puts them in order.
        pairs: hold each pair of values of two parameters, too. Default False.
    """
    held = [_held(case, pairs=pairs) for case in cases]
    order = rng.sample(range(len(cases)), len(cases))
    left = set().union(*held)
    taken = list[int]()
    while left:
        best = max(order, key=lambda place: len(held[place] & left))
        taken.append(best)
        left -= held[best]
    return sorted(taken)


def _held(case: Mapping[str, Any], *, pairs: bool) -> set[Hashable]:
    """Return the values of a case, each with its name, and pairs of them."""
    values = [(name, _key(value)) for name, value in sorted(case.items())]
    return {*values, *(combinations(values, 2) if pairs else ())}


def _key(value: Any) -> Hashable:
    """Return what tells a value from others: itself where it can be told by that."""
    plain = isinstance(value, str | int | float | bytes | type(None))
    return (type(value), value) if plain else id(value)
