"""anybatch as one of the finders: what `anybatch.plan` chooses under the same budget."""

import anybatch
from benchmarks.mbs.choice.finders import Found
from benchmarks.mbs.choice.registry import FINDERS as OTHERS
from benchmarks.mbs.problem import Problem


def planned(problem: Problem, budget: int) -> Found:
    """The plan's micro-batch, all in memory as for the others; no size that it timed failed."""
    loss = problem.declared() if problem.declared else problem.loss_fn
    batch = (problem.inputs, problem.targets)
    try:
        plan = anybatch.plan(problem.model, loss, batch, memory=budget, offload="off")
    except anybatch.errors.BudgetError as error:
        return Found(None, note=str(error))
    assert plan.memory is not None
    timed = [one for one in plan.memory.candidates if one.seconds is not None]
    return Found(
        plan.micro_batch, [(one.micro_batch, one.seconds or 0.0, "timed") for one in timed]
    )


FINDERS = {"anybatch": planned, **OTHERS}
