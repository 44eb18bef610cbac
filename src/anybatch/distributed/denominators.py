"""Facts of one rank's loss, and the denominators of the loss over all ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from anybatch.loss.declared import Total

TERMS = 8
"""Terms of a loss that are counted over ranks; one with more counts as coupled."""


def packed(totals: list[Total] | None, *, has_rows: bool, offer: int) -> Tensor:
    """Return this rank's loss as a row of numbers, [4 + 3 TERMS].

    It is: whether samples meet, whether there are rows, terms, each term, and which pieces of
    gradients it offers to send early.
    """
    coupled = has_rows and (totals is None or len(totals) > TERMS)
    numbers = [float(coupled), float(has_rows)]
    terms = [] if coupled or totals is None else totals
    numbers.append(float(len(terms)))
    for total in terms:
        denominator = math.nan if total.denominator is None else float(total.denominator)
        numbers += [total.weight, denominator, float(total.adds)]
    numbers += [0.0] * (3 + 3 * TERMS - len(numbers)) + [float(offer)]
    return torch.tensor(numbers, dtype=torch.float64)


def counted(rows: list[list[float]], mine: list[Total]) -> list[Total] | None:
    """Return the totals over all ranks; None where a rank couples samples, or has other terms."""
    there = [row for row in rows if row[1]]
    forms = {(row[2], *row[3:-1:3], *row[5:-1:3]) for row in there}
    if any(row[0] for row in there) or len(forms) > 1:
        return None
    found = []
    for k in range(int(there[0][2])):
        weight, _, adds = there[0][3 + 3 * k : 6 + 3 * k]
        each = [row[4 + 3 * k] for row in there]
        denominator = sum(each) if adds else each[0]
        total = mine[k] if mine else Total(weight, None)
        late = math.isnan(denominator)
        found.append(replace(total, denominator=None if late else denominator))
    return found
