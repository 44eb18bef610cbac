"""A configuration is run: micro-batch after micro-batch into one result.

    forward, data   every part computes its own samples of the result
    filter          every part is added to the sum: the gradients of all samples

Parts of one algorithm follow each other, and their common part is computed once for them, and not
stored: weights may change unnoticed from call to call. Half-precision sums stay in float32 until
all parts are added.

Source: u-cuDNN, section II: BackwardFilter is divided by accumulating.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from anybatch.conv.algorithms import ALGORITHMS
from anybatch.conv.fourier import HALVES
from anybatch.conv.problem import Problem
from anybatch.core.divisions import Configuration, KernelPart


def run(
    problem: Problem,
    configuration: Configuration,
    operands: tuple[Tensor, Tensor],
    strides: Sequence[int],
    bias: Tensor | None = None,
) -> Tensor:
    """Compute a kernel as it was divided.

    Args:
        problem: which.
        configuration: of as many samples as the operands have.
        operands: as `Problem.operands` has them.
        strides: of the result.
        bias: [F], added to a forward before it is rounded. Default None.
    """
    one, other = operands
    size = len(one)
    result = torch.empty_strided(
        problem.result(size), tuple(strides), dtype=one.dtype, device=one.device
    )
    if problem.kernel == "filter":
        return _summed(problem, configuration, one, other, result)
    begin = 0
    for name, parts in _runs(configuration):
        way = ALGORITHMS[name]
        shared = way.shared(problem, other)
        for part in parts:
            end = begin + part.size
            found = way.part(problem, one[begin:end], shared)
            if bias is not None:
                found += bias.view(-1, *(1 for _ in problem.image))
            result[begin:end].copy_(found)
            del found  # before the next part has its own
            begin = end
        del shared
    return result


def _summed(
    problem: Problem, configuration: Configuration, dy: Tensor, x: Tensor, result: Tensor
) -> Tensor:
    """Return the sum of the gradients of all parts, in `result`."""
    runs, begin, accumulated = _runs(configuration), 0, result
    if len(runs) > 1 and result.dtype in HALVES:
        accumulated = torch.empty_like(result, dtype=torch.float32)
    for number, (name, parts) in enumerate(runs):
        way, total = ALGORITHMS[name], None
        for part in parts:
            end = begin + part.size
            total = way.add(problem, total, dy[begin:end], x[begin:end])
            begin = end
        assert total is not None
        found = way.finish(problem, total)
        del total
        accumulated = accumulated.add_(found) if number else accumulated.copy_(found)
        del found
    return accumulated if accumulated is result else result.copy_(accumulated)


def _runs(configuration: Configuration) -> list[tuple[str, list[KernelPart]]]:
    """Return ``(algorithm, parts)`` for parts of one algorithm that follow each other."""
    groups = groupby(configuration.parts, key=lambda part: part.algorithm)
    return [(name, list(parts)) for name, parts in groups]
