"""anybatch in the signature of the loops: one Engine per problem, built once."""

from functools import lru_cache

from torch import Tensor

from anybatch import Engine
from benchmarks.mbs.loops import LOOPS, Loop
from benchmarks.mbs.problem import Problem


@lru_cache(maxsize=4)
def _engine(problem: Problem, micro_batch: int) -> Engine:
    loss = problem.declared() if problem.declared else problem.loss_fn
    return Engine(problem.model, loss, micro_batch=micro_batch)


def anybatch(problem: Problem, micro_batch: int) -> Tensor:
    """The engine as the README shows it."""
    return _engine(problem, micro_batch).backward(problem.inputs, problem.targets)


SUBJECTS: dict[str, Loop] = {"anybatch": anybatch, **LOOPS}
