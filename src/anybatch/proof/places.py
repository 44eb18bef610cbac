"""Tensors that are as long as there are samples, and in which no sample has a part.

An `arange(len(x))` numbers the samples, an `eye` tells them apart, and noise of `x.shape` has a row
for each: what adds such a number to a row computes other things for the same row elsewhere, and
what takes the mean of such noise brings samples together. Their sizes give them away: the same call
is so many times longer where there are so many times more rows.

    4 rows    arange [4]    randn [4, 8]    zeros [3]
    2 rows    arange [2]    randn [2, 8]    zeros [3]       the first two belong to samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.proof.masks import ALL, PLACE

CONSTANT = frozenset(
    "empty zeros ones full new_empty new_zeros new_ones new_full empty_like zeros_like ones_like "
    "full_like empty_strided new_empty_strided zero_ fill_ scalar_tensor detach copy_".split()
)
"""Kernels whose numbers are all alike, or that have none yet."""

PLACES = frozenset(
    "arange eye linspace logspace tril_indices triu_indices range cumsum cumprod hann_window "
    "hamming_window bartlett_window blackman_window kaiser_window".split()
)
"""Kernels that number what they make; the numbers of others may have come from outside of torch."""

Made = Mapping[int, tuple[str, tuple[tuple[int, ...], ...]]]
"""By the number of the call: a kernel in which no sample has a part, and the shapes it gave."""

Lengths = Mapping[int, tuple[tuple[int, ...], ...]]
"""By the number of the call: the shapes that it gives for fewer rows."""


def sized(whole: Made, part: Made) -> Lengths:
    """Return the calls whose results are longer for more rows; none where the calls differ.

    Args:
        whole: calls of a forward.
        part: those of the same forward on fewer rows.
    """
    if [(at, made[0]) for at, made in whole.items()] != [(at, m[0]) for at, m in part.items()]:
        return {}
    return {at: part[at][1] for at, (_, shapes) in whole.items() if shapes != part[at][1]}


def marks(
    func: Any, tensor: Tensor, fewer: Sequence[int], samples: Sequence[int], rows: int
) -> Tensor | None:
    """Return the mask of such a tensor: the samples that its rows stand for.

    Args:
        func: the kernel that has made it.
        tensor: of a forward of all rows.
        fewer: its shape for fewer rows.
        samples: the sample that each row of the forward stands for.
        rows: how many fewer rows were.
    """
    n, found = len(samples), None
    random = torch.Tag.nondeterministic_seeded in func.tags  # a look may have it draw all alike
    if tensor.dim() != len(fewer) or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    for d, (size, less) in enumerate(zip(tensor.shape, fewer, strict=True)):
        if size == less or not (random or _differs(tensor, d)):
            continue
        if size * rows == less * n:
            bits = [1 << samples[row * n // size] for row in range(size)]
        else:
            bits = [ALL] * size
        line = torch.tensor(bits, dtype=torch.uint8, device=tensor.device)
        line = line.reshape([-1 if d == k else 1 for k in range(tensor.dim())])
        found = line if found is None else found | line
    name = func._schema.name.split("::")[1]
    return found if found is None or name not in PLACES else found | PLACE


def _differs(tensor: Tensor, dim: int) -> bool:
    return bool((tensor != tensor.narrow(dim, 0, 1)).any())
