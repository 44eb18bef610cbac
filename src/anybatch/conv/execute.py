"""A configuration is run: micro-batch after micro-batch into one result.

    forward, data   every part computes its own samples of the result
    filter          every part is added to the sum: the gradients of all samples

Half-precision sums are kept in float32 until all parts are in.

Source: u-cuDNN, section II: BackwardFilter is divided by accumulating.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anybatch.conv.algorithms import ALGORITHMS
from anybatch.conv.divide import Configuration
from anybatch.conv.problem import Problem


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
    size, parts = len(one), configuration.parts
    result = torch.empty_strided(
        problem.result(size), tuple(strides), dtype=one.dtype, device=one.device
    )
    if problem.kernel == "filter":
        return result.copy_(_sum(problem, configuration, one, other))
    begin = 0
    for part in parts:
        end = begin + part.size
        found = ALGORITHMS[part.algorithm](problem, one[begin:end], other)
        if bias is not None:
            found += bias.view(-1, *(1 for _ in problem.image))
        result[begin:end].copy_(found)
        del found  # before the next part has its own
        begin = end
    return result


def _sum(problem: Problem, configuration: Configuration, one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of the gradients of all parts."""
    total, begin = None, 0
    for part in configuration.parts:
        end = begin + part.size
        found = ALGORITHMS[part.algorithm](problem, one[begin:end], other[begin:end])
        if total is None:
            half = len(configuration.parts) > 1 and found.dtype in (torch.float16, torch.bfloat16)
            total = found.float() if half else found
        else:
            total.add_(found)
        del found
        begin = end
    assert total is not None
    return total
