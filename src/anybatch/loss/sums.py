"""Arithmetic on the terms of a loss: the results that are weighted sums, and their weights.

0.5 * a + b / 4      ->  {a: 0.5, b: 0.25}
a * b, a ** 2, a + 1 ->  none
"""

from __future__ import annotations

from numbers import Real
from typing import Any

Sum = dict[int, float]
"""The weight of each term, by its number."""


def arithmetic(name: str, operands: list[Any]) -> Sum | None:
    """Return the weighted sum that ``name(*operands)`` is, or None.

    Args:
        name: the operation, without underscores: add, sub, mul, div, neg, ...
        operands: a `Sum` for each operand that is one, anything else as it is.
    """
    match name, operands:
        case (("add" | "radd" | "sub"), [dict() as left, dict() as right]):
            sign = -1.0 if name == "sub" else 1.0
            return {k: left.get(k, 0.0) + sign * right.get(k, 0.0) for k in {**left, **right}}
        case (("add" | "radd" | "sub"), [dict() as left, Real() as zero]) if zero == 0:
            return left
        case "rsub", [dict() as left, Real() as zero] if zero == 0:
            return {k: -weight for k, weight in left.items()}
        case (("mul" | "rmul"), [dict() as left, Real() as number]):
            return {k: weight * float(number) for k, weight in left.items()}
        case (("div" | "true_divide"), [dict() as left, Real() as number]) if number != 0:
            return {k: weight / float(number) for k, weight in left.items()}
        case "neg", [dict() as left]:
            return {k: -weight for k, weight in left.items()}
        case (("float" | "double" | "clone"), [dict() as left]):
            return left
    return None
