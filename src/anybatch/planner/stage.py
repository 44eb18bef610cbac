"""Setup of a dry run: its case is prepared and metered, and all changes are restored.

    gradients set aside │ hooks of parameters off │ what modules keep is noted │ the step │ all back

Fakes are discarded, so only state that forward stores outside of them is restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import TensorBatch
from anybatch.core.modules import renormalised, tensors_of
from anybatch.core.norm.counters import counters
from anybatch.core.norm.non_reducing import NonReducingNorms
from anybatch.core.python_state import PythonState
from anybatch.core.undo import Before, no_optimizer_step, uninterrupted
from anybatch.errors import LossError
from anybatch.execution.buffers import ForwardBuffers
from anybatch.execution.case import Case
from anybatch.execution.device import DeviceLink
from anybatch.execution.gradients import Gradients
from anybatch.execution.inspection import quietly
from anybatch.execution.step import Step
from anybatch.lockstep.batchnorm import batch_norm
from anybatch.loss.calls import LossCalls
from anybatch.loss.holders import Depth
from anybatch.loss.watched import CallableLoss, Rehearsed
from anybatch.memory.meter import FOREIGN, Meter
from anybatch.memory.paged import uncounted
from anybatch.planner.notes import shapes_of_moments


def unharmed(case: Case, rows: int, *, writes: bool) -> Case:
    """Return the case with its own copy of rows, where forward `writes` to its inputs."""
    return case if case.fake or not writes else replace(case, rows=own_rows(case, rows))


def own_rows(case: Case, rows: int) -> TensorBatch:
    """Return the first rows as copies, except leaves that receive a gradient."""
    pair = (case.rows.inputs, case.rows.targets)
    count = min(rows, case.rows.size)
    with case.mode():
        inputs, targets = tree.map_tensors(
            lambda t: t if t.requires_grad else t.clone(), tree.rows(pair, 0, count, case.rows.size)
        )
    return TensorBatch(inputs, targets, count)


@contextmanager
def put_back(case: Case, *, undivided: bool = False) -> Iterator[Before]:
    """Run the body on a case without its gradients, and restore all that it changed.

    Args:
        case: the real one, or fakes of it.
        undivided: the batch is not divided, so BatchNorm is torch's own. Default False.

    Raises:
        LossError: the loss draws from an iterator, which cannot be restored.
    """
    if case.state is not None and case.state.iterators:
        raise LossError(
            "a loss must have state that can be restored after a dry run, and it reaches an "
            f"iterator ({', '.join(case.state.iterators)}): give micro_batch=, which needs no dry "
            "run, or count in an attribute"
        )
    before = Before([] if case.fake else case.modules, case.leaves)  # fakes are thrown away
    attributes = PythonState()
    attributes.modules((module for _, module in case.modules), attributes=not case.fake)
    state = None if case.state is None else case.state.snapshot(Depth.THOROUGH)
    _forget_casts(case)
    try:
        before.suspend_hooks()  # what a hook adds up elsewhere must not hear of a rehearsal
        Gradients(case.leaves).set_aside()
        for _, module in [] if case.fake else renormalised(case.modules):
            module.max_norm = None  # or a rehearsal would write to its weight
        with (
            no_optimizer_step(before),
            _in_one_piece(case),
            case.mode(),
            _single_lane(case, undivided),
        ):
            yield before
    finally:
        with uninterrupted():
            attributes.put_back()
            if case.state is not None and state is not None:
                case.state.restore(state)
            failures = before.put_back()
            _forget_casts(case)
        for failure in failures:
            raise failure


def _forget_casts(case: Case) -> None:
    """Drop the casts that autocast keeps: a rehearsal makes its own, and takes them along."""
    if torch.is_autocast_enabled(case.device.type):
        torch.clear_autocast_cache()


class LoneNorms(NonReducingNorms):
    """Runs BatchNorm by the kernels of a lane, forward and backward, without other lanes.

    Half precision is widened there, which torch's own backward does not do.
    """

    def normalise(
        self,
        x: Tensor,
        running: tuple[Tensor | None, Tensor | None],  # noqa: ARG002
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,  # noqa: ARG002
        eps: float,
    ) -> Tensor:
        """Return x, normalised by made-up moments."""
        return batch_norm(x, weight, bias, eps, moments=shapes_of_moments)[0]


def _single_lane(case: Case, undivided: bool) -> AbstractContextManager[Any]:  # noqa: FBT001
    """Return a context without BatchNorm's barrier: one lane runs, and no statistics move."""
    norms = NonReducingNorms if undivided else LoneNorms
    return norms(counters(case.modules), rows=case.together) if case.lanes else nullcontext()


def _in_one_piece(case: Case) -> AbstractContextManager[Any]:
    """Hold back Ctrl-C while fakes are computed: C++ code that asks one its device cannot fail."""
    return uninterrupted() if case.fake else nullcontext()


@contextmanager
def metered(case: Case, *, undivided: bool = False) -> Iterator[tuple[Meter, Before]]:
    """Run the body as `put_back` does, under a meter that knows the tensors of the model."""
    modules = [module for _, module in case.modules]
    every = [*tensors_of(modules, "_parameters"), *case.leaves]
    owned = {
        "parameters": [p for p in every if id(p) not in case.paged],
        "buffers": tensors_of(modules, "_buffers"),
        FOREIGN: [p for p in every if id(p) in case.paged],
    }
    with (
        quietly(),
        put_back(case, undivided=undivided) as before,
        _keep_large(case),
        Meter(case.device, owned, spare=case.spare) as meter,
        uncounted(meter, case.leaves, case.paged),
    ):
        yield meter, before


def make_step(
    case: Case, link: DeviceLink, n: int, gradients: Gradients | None, count: int
) -> Step:
    """Return the step of a case in micro-batches of `n`, of which `count` will be run."""
    buffers = tensors_of((module for _, module in case.modules), "_buffers")
    return Step(
        model=case.model,
        loss=Rehearsed(case.loss) if type(case.loss) is CallableLoss else case.loss,
        batch=case.batch(count),
        micro_batch=n,
        link=link,
        buffers=ForwardBuffers([], set(), None if buffers else frozenset()),
        gradients=gradients,
        batchnorm=case.batchnorm,
        calls=_calls(case),
        budgeted=True,
    )


def _keep_large(case: Case) -> AbstractContextManager[None]:
    state = case.state
    return nullcontext() if case.fake or state is None else state.large_restored()


def _calls(case: Case) -> LossCalls | None:
    state = case.state
    if state is None or not (state or state.written_by_person):
        return None
    return LossCalls(state, twice=case.fake)  # a real call would count where nothing can undo it


def claim_gradients(meter: Meter, gradients: Gradients | None) -> None:
    """Claim the existing gradients for their owner in the meter."""
    if gradients is not None:
        meter.claim("gradients", (p.grad for p in gradients.parameters if p.grad is not None))
