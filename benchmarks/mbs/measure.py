"""How far a loop's gradients are from the truth, by the one metric of Law 1."""

import math
from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from anybatch.tools.exactness import error_of
from benchmarks.mbs.loops import PEERS, Loop
from benchmarks.mbs.ours import SUBJECTS
from benchmarks.mbs.problem import Problem

Tensors = dict[str, Tensor]


def gradients(loop: Loop, problem: Problem, micro_batch: int) -> tuple[Tensors, Tensors]:
    """The gradients and buffers after one loop from empty gradients, and its loss."""
    problem.model.zero_grad(set_to_none=True)
    loss = loop(problem, micro_batch)
    found = {
        name: parameter.grad.clone()
        for name, parameter in problem.model.named_parameters()
        if parameter.grad is not None
    }
    return found | dict(problem.model.named_buffers()), {"loss": loss}


def worst(got: tuple[Tensors, Tensors], want: tuple[Tensors, Tensors]) -> float:
    """The largest error of any tensor; gradients and the loss are scaled apart."""
    errors = [error_of(a, b).values() for a, b in zip(got, want, strict=True)]
    return max(max(values, default=0.0) for values in errors)


def relative(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """||g - g0|| / ||g0|| over all tensors of `want` together, in float64."""
    pairs = [(got[name].double(), tensor.double()) for name, tensor in want.items()]
    difference = torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
    return float((difference / torch.stack([b.square().sum() for _, b in pairs]).sum()).sqrt())


def as_json(error: float) -> float | str:
    """A number that JSON knows: NaN and missing gradients are the words `not finite`."""
    return error if math.isfinite(error) else "not finite"


def installed() -> tuple[dict[str, Loop], list[str]]:
    """The subjects that can run here, and the names of the peers that are not installed."""
    missing = [name for name, module in PEERS.items() if find_spec(module) is None]
    return {name: loop for name, loop in SUBJECTS.items() if name not in missing}, missing
