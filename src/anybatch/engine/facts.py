"""Facts behind a plan's reasons, of a step that was run or of one that is forecast."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from anybatch.core.batch import LazyBatch
from anybatch.core.plan import Facts
from anybatch.execution.gather import COUPLED
from anybatch.execution.gradients import HALF, gradient_dtype
from anybatch.execution.proof.declared import DECLARED
from anybatch.execution.signature import RunPlan
from anybatch.execution.step import Step
from anybatch.memory.segments import segments_of


def of_run(step: Step, failed: int) -> Facts:
    """Return the facts of a step that was run; `failed`: samples at which memory ran out."""
    gradients = step.gradients
    return Facts(
        micro_batch=step.limit,
        divided=step.count > 1,
        loss=step.found,
        coupled=step.found == COUPLED and not step.lanes,
        late=isinstance(step.batch, LazyBatch),
        half=gradients.half if gradients is not None else (),
        before=gradients is not None and gradients.added,
        local=step.local,
        separate_sums=step.accumulator and step.count > 1 and gradients is not None,
        failed=failed,
        lanes=step.lanes and step.count > 1,
        segments=segments_of(step.device).in_words(),
        looked=max(step.looked, step.sizes.step if step.sizes is not None else 0),
        doubts=(*step.doubts, *step.loss.doubts, *([DECLARED] if step.loss.believed else [])),
    )


def of_foreseen(step: Step, run_plan: RunPlan, leaves: Iterable[Tensor]) -> Facts:
    """Return the facts of a step to be run as planned, on these leaf tensors."""
    leaves = list(leaves)
    dtypes = {gradient_dtype(leaf) for leaf in leaves}
    return Facts(
        micro_batch=run_plan.micro_batch,
        divided=step.count > 1,
        loss=run_plan.loss,
        coupled=run_plan.coupled,
        late=isinstance(step.batch, LazyBatch),
        half=tuple(sorted(str(d).removeprefix("torch.") for d in dtypes if d in HALF)),
        before=any(leaf.grad is not None for leaf in leaves),
        local=step.local,
        separate_sums=run_plan.accumulator,
        failed=0,
        lanes=run_plan.lanes,
        segments=segments_of(step.device).in_words(),
    )
