"""Dry run of a step under the meter, on fake tensors or a few rows: its bytes at every event.

A formula for activations omits a loss's intermediates, the gradient that waits to be added, and the
outputs of a first pass. So nothing is modelled: the mechanism itself is run, on fakes of the model,
the loss and the rows, for two micro-batches: the first finds no gradients, the second finds them,
and later ones are like it. Where rows are fetched there is a third, on its way behind the second.

    inspection: forward, forward of fewer │ mu_0 │ mu_1 │ update  bytes live at every kernel

Real tensors go the same way where fakes cannot (a value is read, a kernel hides its workspace).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from math import factorial, prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from anybatch.conv.dispatch import KernelRecorder
from anybatch.core import pytree
from anybatch.core.accelerator import home
from anybatch.core.barrier import Unseen
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.core.modules import Modules, renormalised, tensors_of
from anybatch.core.moments import Moments
from anybatch.core.norm import NonReducingNorms, RefusedNorms, counters
from anybatch.core.python_state import PythonState, rehearse_difference
from anybatch.core.retry import Retry
from anybatch.core.status import STATUS
from anybatch.core.transaction import Before, NoOptimizerStep, uninterrupted
from anybatch.core.units import show_samples
from anybatch.distributed.local_batch import AbsentRanks, Layout, Rows
from anybatch.errors import LossError
from anybatch.execution.buffers import ForwardBuffers
from anybatch.execution.few_rows import (
    comparable,
    layout_of,
    quietly,
    rough_layout,
    two_sizes,
    written,
)
from anybatch.execution.full_batch_rng.kernels import Weighing
from anybatch.execution.gradients import Gradients
from anybatch.execution.prefetch import DeviceLink
from anybatch.execution.proof.rows import saving_nothing
from anybatch.execution.signature import MICRO_BATCHES, Case, Claiming, bytes_of, first_rows
from anybatch.execution.step import MicroBatchOffloader, Step
from anybatch.execution.streaming import Lap, Parts, discoverer, feed, laps, stream, undivided
from anybatch.execution.two_pass import COUPLED, loss_of_all, pull, shares, value_of_all
from anybatch.lockstep.batchnorm import batch_norm
from anybatch.loss.callable_loss import CallableLoss, Rehearsed
from anybatch.loss.calls import LossCalls
from anybatch.loss.chunked_rows import chunks_of
from anybatch.loss.holders import Depth, Writes
from anybatch.memory.fakes import uncounted
from anybatch.memory.ledger import NotAffineError, Timeline
from anybatch.memory.meter import FOREIGN, STEP, Meter

WATCHED = 2
"""Samples of the micro-batch at which a loss is watched, of a mini-batch of twice as many."""


class Rehearsals:
    """Findings of one decision's rehearsals that hold for the next ones.

    Attributes:
        states: the Python state before all of them, by the modules that reach it. To follow it
            takes as long as a rehearsal of a transformer.
        remain: bytes of a micro-batch remain while the next ones run.
    """

    def __init__(self) -> None:
        self.states: dict[tuple[int, ...], tuple[Modules, PythonState]] = {}
        self.remain = False

    def state(self, case: Case) -> PythonState:
        """Return the state that the modules of a case reach."""
        key = (case.fake, *(id(module) for _, module in case.modules))
        if key not in self.states:
            found = PythonState()
            found.modules((module for _, module in case.modules), attributes=not case.fake)
            self.states[key] = case.modules, found  # which stay, and so do their ids
        return self.states[key][1]


_EARLIER = ContextVar[Rehearsals | None]("_EARLIER", default=None)


@contextmanager
def of_one_decision() -> Iterator[None]:
    """Have all rehearsals of the body end in the Python state of its beginning."""
    token = _EARLIER.set(Rehearsals())
    try:
        yield
    finally:
        _EARLIER.reset(token)


def _earlier() -> Rehearsals:
    return _EARLIER.get() or Rehearsals()


@dataclass(frozen=True)
class Inspection:
    """Findings of the first inspection of a model.

    Attributes:
        layout: where the outputs hold the samples.
        copies: forward writes to its inputs, or the loss to its targets, so it gets copies.
        coupled: the loss needs all outputs at once.
        loss: the loss in words.
        shows: bytes of the outputs of a sample.
        gathers: bytes that forward gathers of all samples, for each of them.
        wide: in chunks, a linear map or its loss is computed so.
    """

    layout: Layout
    copies: bool
    coupled: bool = False
    loss: str = ""
    shows: int = 0
    gathers: int = 0
    wide: bool = False


def inspect_model(case: Case, n: int, *, limit: int | None = None) -> tuple[Timeline, Inspection]:
    """Run the first inspection of a model as a step would; return its bytes and its findings."""
    STATUS.at(f"first inspection of {show_samples(n)}")
    exact_norms = case.batchnorm == "exact" and not case.lanes
    with (
        metered(case, limit=limit) as (meter, _),
        torch.no_grad(),
        RefusedNorms([]) if exact_norms else nullcontext(),
    ):
        step = make_step(case, Claiming(case.device, meter), n, None, MICRO_BATCHES)
        full, part = two_sizes(step)
        outputs = _inspected(case, step, full)
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        gathering = [mode.gathered for mode in modes if isinstance(mode, NonReducingNorms)]
        gathered = max(gathering, default=0)
        fewer = _inspected(case, step, part)
        find = layout_of if step.loss.takes_outputs else rough_layout
        held = find(outputs, fewer, full.size, part.size)
        layout = held if step.loss.takes_outputs else ()
        for _, _, one, _ in comparable(outputs, fewer, held, part.size):
            rehearse_difference(one)
        if case.draws:  # what learning them compares is there while forward runs again
            compared = pytree.map_tensors(torch.empty_like, fewer)
            step.inspected(full)
            del compared
    copies = written(full) or written(part)
    shows = -(-sum(bytes_of(t) for _, t in pytree.tensors(outputs)) // full.size)
    gathers = -(-gathered // case.together)
    found = Inspection(layout, copies, shows=shows, gathers=gathers)
    return meter.timeline(), found


def _inspected(case: Case, step: Step, micro: MicroBatch) -> Any:
    """Return the outputs of a forward with a graph that saves nothing."""
    # A recurrent kernel allocates more (test_the_first_inspection_of_a_sequence_is_foreseen).
    with torch.set_grad_enabled(case.trains):
        outputs = saving_nothing(partial(step.inspected, micro))
    return pytree.map_tensors(Tensor.detach, outputs)


DRY, REAL = "dry run", "step on few rows"

Around = Callable[[], AbstractContextManager[Any]]


class MeteredOffloader(MicroBatchOffloader, Protocol):
    """Offloader of saved tensors in a rehearsal, which sets its meter."""

    meter: Meter


def divided(
    case: Case,
    n: int,
    inspection: Inspection,
    *,
    accumulator: bool,
    sends: MeteredOffloader | None = None,
    around: Around = nullcontext,
    limit: int | None = None,
    most: int | None = None,
) -> Timeline:
    """Rehearse the first micro-batches of a divided step.

    `sends` offloads saved tensors, `around` returns the context of a loss of all outputs.
    There are `most` micro-batches; None: those of the case, or three where something of them
    remains.
    """
    STATUS.at(f"{DRY if case.fake else REAL} in micro-batches of {show_samples(n)}")
    with metered(case, limit=limit) as (meter, before):
        gradients = Gradients(case.leaves, accumulator=accumulator) if case.trains else None
        remain = sends is not None or _earlier().remain
        count = most or (MICRO_BATCHES if remain else case.micro_batches)
        step = make_step(case, Claiming(case.device, meter), n, gradients, count)
        step.traits.layout, step.traits.copies = inspection.layout, inspection.copies
        step.discover = discoverer(step, before)
        step.offloader = with_meter(sends, meter)
        with torch.set_grad_enabled(case.trains):
            if inspection.coupled or not streams(step):  # as these rows tell, and fewer did not
                _gathered(step, case, around)
        claim_gradients(meter, gradients)
        remains = meter.held_by(STEP) > 0
    # The last three values, perhaps (test_values_of_the_last_three_calls_are_foreseen).
    if remains and count < MICRO_BATCHES:
        _earlier().remain = True
        again = partial(divided, case, n, inspection, accumulator=accumulator, around=around)
        return again(limit=limit, most=MICRO_BATCHES)
    return meter.timeline()


def with_meter(sends: MeteredOffloader | None, meter: Meter) -> MeteredOffloader | None:
    """Return the offloader of a rehearsal, if any, with its meter."""
    if sends is not None:
        sends.meter = meter
    return sends


def streams(step: Step) -> bool:
    """Stream a step; return False, with nothing done, where its loss couples the samples."""
    try:
        stream(step)
    except Retry as retry:
        if retry.reason != "coupled":
            raise
        step.restart()
        return False
    return True


def kernels(case: Case, n: int, inspection: Inspection) -> KernelRecorder:
    """Return the convolutions recorded in a micro-batch of a case that is made of fakes."""
    recorder = KernelRecorder(case.model)

    @contextmanager
    def mode() -> Iterator[None]:
        with case.mode(), recorder:
            yield

    full_batch(replace(first_rows(case, n), mode=mode), n, inspection)
    return recorder


def watch_loss(case: Case, inspection: Inspection) -> Inspection:
    """Return the findings plus the name, coupling and writes of the loss, traced on few rows."""
    rows = own_rows(case, 2 * WATCHED)
    tried = replace(case, rows=rows, size=rows.size)
    with metered(case) as (meter, _), torch.no_grad():
        step = make_step(tried, Claiming(case.device, meter), min(WATCHED, rows.size), None, 1)
        step.traits.layout, step.traits.copies = inspection.layout, inspection.copies
        coupled = not streams(step)
        (micro,) = step.feed()
        targets = [t for _, t in pytree.tensors(rows.targets)]
        with Writes(targets) as observed, step.in_chunks():
            step.loss.full_batch(step.forward(micro), micro)
    copies = inspection.copies or bool(observed) or any(t._version > 0 for t in targets)
    loss, chunks = COUPLED if coupled else step.found, step.chunked
    wide = chunks is not None and bool(chunks.chunked or chunks.materialised)
    return replace(inspection, coupled=coupled, loss=loss, copies=copies, wide=wide)


def draws(case: Case, n: int) -> list[int]:
    """Return the bytes of each draw of a forward of `n` samples; none where they are not shared."""
    if not case.draws:
        return []
    with metered(case) as (meter, _), torch.no_grad():
        step = make_step(case, Claiming(case.device, meter), n, None, 1)
        (micro,) = step.feed()
        with Weighing() as weighing:
            step.forward(micro)
    return list[int](weighing.bytes)


def full_batch(
    case: Case,
    size: int,
    inspection: Inspection | None = None,
    *,
    sends: MeteredOffloader | None = None,
    limit: int | None = None,
) -> tuple[Timeline, int]:
    """Run an undivided step under the meter; return its bytes, and those of sparse gradients.

    Of these the bytes that a sample adds; 0 where all are dense.

    Raises:
        NotImplementedError: a gradient of fakes is sparse.
    """
    STATUS.at(f"{DRY if case.fake else REAL} of {show_samples(size)} undivided")
    case = case if inspection is None else unharmed(case, size, writes=inspection.copies)
    ungathered = replace(case, size=0, meets=0)  # nothing but these samples is gathered
    with metered(ungathered, undivided=True, limit=limit) as (meter, before):
        gradients = Gradients(case.leaves, wide=False) if case.trains else None
        step = make_step(replace(case, size=size), Claiming(case.device, meter), size, gradients, 1)
        step.discover = discoverer(step, before)
        step.offloader = with_meter(sends, meter)
        with torch.set_grad_enabled(case.trains):
            undivided(step)
        claim_gradients(meter, gradients)
        every = [] if gradients is None else [p.grad for p in gradients.parameters]
        sparse = [grad for grad in every if grad is not None and grad.is_sparse]
        if sparse and case.fake:  # (test_sparse_gradients_are_in_the_forecast)
            raise NotImplementedError("fakes do not tell how many entries a gradient has")
    return meter.timeline(), -(-sum(map(bytes_of, sparse)) // size)


def extrapolated(steps: Sequence[Timeline], first: int, n: int) -> Timeline:
    """Return the timeline of `n` samples on the polynomials through those of first, first + 1, ...

    By Newton's forward differences, for fewer samples than `first`, too: two steps lead to a line,
    three to a parabola, on which the bytes of a loss lie that compares all samples.

    Raises:
        NotAffineError: the steps do not show the same events.
    """
    if any((one.events, one.owners) != (steps[0].events, steps[0].owners) for one in steps):
        raise NotAffineError
    live = np.stack([one.live for one in steps])
    weights = [prod(n - first - i for i in range(k)) // factorial(k) for k in range(len(steps))]
    found = sum(each * np.diff(live, k, axis=0)[0] for k, each in enumerate(weights))
    return Timeline(steps[0].owners, steps[0].events, np.asarray(found))


def holds_all_of(line: Timeline, step: Timeline) -> bool:
    """Say whether a line has each number of bytes that a step has, by owner and in order.

    It may hold more between two changes, as a step on values does that compares its loss again.
    """
    if line.owners != step.owners:
        return False
    every, now = iter(map(tuple, line.live.tolist())), None
    for row in map(tuple, step.live.tolist()):
        if row != now and row not in every:  # which goes on behind it
            return False
        now = row
    return True


def _gathered(step: Step, case: Case, around: Around) -> None:
    """Rehearse both passes of a coupled loss: few micro-batches, and the loss of all samples.

    Over ranks the joined outputs are sent to the tensor of all samples.
    """
    rows, micro_batches = case.rows, step.feed()
    first = next(micro_batches)
    if case.fake and step.calls is not None:  # a first step learns that the loss couples samples
        step.compare(step.forward(first), first)
    with torch.no_grad():
        outputs = step.forward(first)
    own = size = max(step.batch.size, first.size)
    all_rows = _rows_of_all(step, outputs, size)
    parts, trains = Parts(step, first.inputs), step.gradients is not None
    found = parts.outputs(first, graph=trains) if step.offloader is None else []
    places = [0, *accumulate(len(pytree.flat(one)) for one in found)]
    last = found[-1:]
    del found
    cut = pytree.rows(rows.targets, 0, min(size, rows.size), rows.size)
    of_all = partial(_targets_of_all, cut, device=case.device)
    with around():
        every, targets = _rows_of_all(step, outputs, size), of_all(size)
        del all_rows
        if case.global_samples:
            here = every, targets
            size = max(size, case.global_samples)
            every, targets = _rows_of_all(step, outputs, size), of_all(size)
            del here
        del outputs
        full = Rows(every, targets, size, 0, leads=True, here=own)
        local = step.global_batch
        if case.global_samples:
            step.global_batch = AbsentRanks(size)
        if step.gradients is None:
            value_of_all(step, full)
            return
        captured, step.global_batch = loss_of_all(step, full), local
    for graph in map(pytree.flat, last):
        place = len(captured.gradients) - len(graph)
        step.pull(*shares(step, graph, captured.gradients, 0, place))
        del graph
    last.clear()

    def again(micro: MicroBatch, lap: Lap) -> None:
        pull(step, micro, captured.gradients, 0, lap=lap, place=places[lap or 0])

    for lap in laps(step):
        for micro in chain([first], micro_batches) if lap is None else feed(step, lap):
            step.under(partial(again, lap=lap))(micro)
    step.finish()


def _rows_of_all(step: Step, outputs: Any, size: int) -> Any:
    """Return outputs of `size` samples like those of a few."""
    axes = iter(step.traits.axes)

    def grown(tensor: Tensor) -> Tensor:
        axis, shape = next(axes), list(tensor.shape)
        if axis is not None:
            shape[axis] = size
        return _repeated(tensor.new_zeros(shape), tensor, axis)

    return pytree.map_tensors(grown, outputs)


def _repeated(rows: Tensor, few: Tensor, axis: int | None) -> Tensor:
    """Fill rows with those of a few samples, over and over: of zeros a loss may fail."""
    if type(few) is Tensor and axis is not None and few.shape[axis]:  # fakes have no values
        with Unseen(rows, few), torch.no_grad():
            few = few.detach().to(rows.device)
            places = torch.arange(rows.shape[axis], device=rows.device) % few.shape[axis]
            torch.index_select(few, axis, places, out=rows)
    return rows


def _targets_of_all(few: Any, size: int, device: torch.device) -> Any:
    """Return targets of `size` samples like those of a few, which may be on the host."""

    def grown(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor.to(device)
        rows = tensor.new_zeros((size, *tensor.shape[1:]), device=device)
        return _repeated(rows, tensor, 0)

    return pytree.map_tensors(grown, few)


# Setup of a dry run: its case is prepared and metered, and all changes are restored.
#
#   gradients set aside │ hooks of parameters off │ what modules keep is noted │ the step │ all back
#
# Fakes are discarded, so only state that forward stores outside of them is restored.


def unharmed(case: Case, rows: int, *, writes: bool) -> Case:
    """Return the case with its own copy of rows, where forward `writes` to its inputs."""
    return case if case.fake or not writes else replace(case, rows=own_rows(case, rows))


def own_rows(case: Case, rows: int) -> TensorBatch:
    """Return the first rows as copies, except leaves that receive a gradient."""
    pair = (case.rows.inputs, case.rows.targets)
    count = min(rows, case.rows.size)
    with case.mode():
        inputs, targets = pytree.map_tensors(
            lambda t: t if t.requires_grad else t.clone(),
            pytree.rows(pair, 0, count, case.rows.size),
        )
    return TensorBatch(inputs, targets, count)


@contextmanager
def put_back(case: Case, *, undivided: bool = False) -> Iterator[Before]:
    """Run the body on a case without its gradients, and restore all that it changed.

    `undivided`: the batch is not divided, so BatchNorm is torch's own.

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
    python = _earlier().state(case)
    state = None if case.state is None else case.state.snapshot(Depth.THOROUGH)
    norms = NonReducingNorms if undivided else LoneNorms  # one lane runs; no statistics move
    _forget_casts(case)
    try:
        before.suspend_hooks()  # what a hook adds up elsewhere must not hear of a rehearsal
        Gradients(case.leaves).set_aside()
        for _, module in [] if case.fake else renormalised(case.modules):
            module.max_norm = None  # or a rehearsal would write to its weight
        with (
            NoOptimizerStep(before),
            # C++ code that asks a fake its device cannot fail, so Ctrl-C is held back.
            uninterrupted() if case.fake else nullcontext(),
            case.mode(),
            norms(counters(case.modules), rows=case.together) if case.lanes else nullcontext(),
        ):
            yield before
    finally:
        with uninterrupted():
            python.put_back()
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


def shapes_of_moments(rows: Tensor) -> Moments:
    """Return moments as they are made of rows with data, past all modes: mean 0 and variance 1.

    They count one value more a channel, as there are other rows.
    """
    mean = rows.new_zeros(rows.shape[1], dtype=torch.float64, device=home(rows.device))
    count = rows.numel() // max(rows.shape[1], 1) + 1
    return Moments(count, mean, torch.full_like(mean, count))


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


@contextmanager
def metered(
    case: Case, *, undivided: bool = False, limit: int | None = None
) -> Iterator[tuple[Meter, Before]]:
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
        nullcontext() if case.fake or case.state is None else case.state.large_restored(),
        Meter(case.device, owned, spare=case.spare, limit=limit) as meter,
        uncounted(meter, case.leaves, case.paged),
    ):
        yield meter, before


def make_step(
    case: Case, link: DeviceLink, n: int, gradients: Gradients | None, count: int
) -> Step:
    """Return the step of a case in micro-batches of `n`, of which `count` will be run."""
    buffers, state = tensors_of((module for _, module in case.modules), "_buffers"), case.state
    called = state is not None and (state or state.written_by_person)
    return Step(
        model=case.model,
        loss=Rehearsed(case.loss) if type(case.loss) is CallableLoss else case.loss,
        batch=case.batch(count),
        micro_batch=n,
        link=link,
        buffers=ForwardBuffers([], set(), None if buffers else frozenset()),
        gradients=gradients,
        batchnorm=case.batchnorm,
        calls=LossCalls(state) if state is not None and called else None,
        budgeted=True,
        chunked=chunks_of(case.chunked),
        tiles=case.tiles,
    )


def claim_gradients(meter: Meter, gradients: Gradients | None) -> None:
    """Claim the existing gradients for their owner in the meter."""
    if gradients is not None:
        meter.claim("gradients", gradients.held)
