"""A step on tensors without data, or on a few rows, under the meter: what it would hold, and when.

What a formula for activations forgets (a loss's intermediates, the gradient that waits to be added,
what is kept of a first pass) the step itself knows. So nothing is modelled: the mechanism that will
run the batch is run, on fakes of the model, the loss and the rows, for three micro-batches: the
first finds no gradients, the second finds them and another micro-batch on its way, the third is
like the second. The events of later ones are the same again.

    look: forward, forward of fewer │ mu_0 │ mu_1 │ mu_2 │ update        bytes live at every kernel

Real tensors go the same way where fakes cannot (a value is read, a kernel hides its workspace).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import tree
from anybatch.batch import MicroBatch, TensorBatch
from anybatch.buffers import ForwardBuffers
from anybatch.case import MICRO_BATCHES, Case, Claiming
from anybatch.device import Link
from anybatch.discover import discoverer
from anybatch.fakes import Fakes
from anybatch.gather import COUPLED, loss_of_all, shares
from anybatch.gradients import Gradients
from anybatch.kept import Kept
from anybatch.look import eager, layout_of, quietly, two_sizes, written
from anybatch.meter import Meter
from anybatch.modules import Modules
from anybatch.step import Layout, Step
from anybatch.stream import stream
from anybatch.timeline import Timeline
from anybatch.undivided import undivided
from anybatch.undo import Before, no_optimizer_step, uninterrupted

COMPARED = 6
"""Copies of the fewer outputs that a comparison makes."""


@dataclass(frozen=True)
class Look:
    """What the first look finds out.

    Attributes:
        layout: where the outputs hold the samples.
        copies: forward writes to its inputs, so it gets copies.
        coupled: the loss needs all outputs at once.
        loss: the loss in words.
    """

    layout: Layout
    copies: bool
    coupled: bool = False
    loss: str = ""


def look(case: Case, n: int) -> tuple[Timeline, Look]:
    """Rehearse the first look at a model, as `anybatch.look` takes it.

    Args:
        case: what is rehearsed.
        n: samples in a micro-batch.

    Returns:
        What it holds, and what it finds out.
    """
    with _metered(case) as (meter, _), torch.no_grad():
        step = make_step(case, Claiming(case.device, meter), n, None, MICRO_BATCHES)
        whole, part = two_sizes(step)
        outputs, fewer = step.forward(whole), step.forward(part)
        layout = layout_of(outputs, fewer, whole.size, part.size) if step.loss.takes_outputs else ()
        compared = [t.new_empty((COMPARED, *t.shape)) for _, t in tree.tensors(fewer)]
        del compared
    return meter.timeline(), Look(layout, written(whole) or written(part))


def divided(case: Case, n: int, seen: Look, *, apart: bool) -> Timeline:
    """Rehearse the first micro-batches of a divided step.

    Args:
        case: what is rehearsed.
        n: samples in a micro-batch.
        seen: what the first look found out.
        apart: gradients are summed in an accumulator.
    """
    with _metered(case) as (meter, before):
        gradients = Gradients(case.leaves, apart=apart) if case.trains else None
        step = make_step(case, Claiming(case.device, meter), n, gradients, MICRO_BATCHES)
        step.layout, step.copies = seen.layout, seen.copies
        step.discover = discoverer(step, before)
        with torch.set_grad_enabled(case.trains):
            if seen.coupled:
                _gathered(step, case.rows)
            else:
                stream(step)
        _claim_gradients(meter, gradients)
    return meter.timeline()


def watch_loss(case: Case, seen: Look) -> Look:
    """Return what was seen, and what the loss is, as the first micro-batch tells."""
    with _metered(case) as (meter, _), torch.no_grad():
        step = make_step(case, Claiming(case.device, meter), 2, None, 1)
        step.layout, step.copies = seen.layout, seen.copies
        coupled = stream(step) is None
    return replace(seen, coupled=coupled, loss=COUPLED if coupled else step.found)


def whole(case: Case, size: int, seen: Look | None = None) -> Timeline:
    """Rehearse an undivided step of `size` samples, as torch alone would take it."""
    case = case if seen is None else unharmed(case, size, seen)
    with _metered(case) as (meter, before):
        gradients = Gradients(case.leaves, wide=False) if case.trains else None
        step = make_step(replace(case, size=size), Claiming(case.device, meter), size, gradients, 1)
        step.discover = discoverer(step, before)
        with torch.set_grad_enabled(case.trains):
            undivided(step)
        _claim_gradients(meter, gradients)
    return meter.timeline()


def _gathered(step: Step, rows: TensorBatch) -> None:
    """Rehearse both passes of a coupled loss: few micro-batches, and the loss of all samples."""
    micro_batches = step.feed()
    first = next(micro_batches)
    with torch.no_grad():
        outputs = step.forward(first)
    size = max(step.batch.size, first.size)
    kept = _rows_of_all(step, outputs, size)
    last = step.forward(first)
    cut = tree.rows(rows.targets, 0, min(size, rows.size), rows.size)
    targets = tree.map_tensors(lambda t: t.new_zeros((size, *t.shape[1:])) if t.dim() else t, cut)
    joined = _rows_of_all(step, outputs, size)
    del kept, outputs
    whole = MicroBatch(None, targets, size)
    if step.gradients is None:
        step.loss.whole(joined, whole)
        return
    _, gradients = loss_of_all(step, joined, whole)
    step.pull(*shares(step, last, gradients, 0))
    del last
    for micro in chain([first], micro_batches):
        step.pull(*shares(step, step.forward(micro), gradients, 0))
    step.finish()


def _rows_of_all(step: Step, outputs: Any, size: int) -> Any:
    """Return outputs of `size` samples like those of a few."""
    axes = iter(step.layout or ())

    def grown(tensor: Tensor) -> Tensor:
        axis, shape = next(axes), list(tensor.shape)
        if axis is not None:
            shape[axis] = size
        return tensor.new_zeros(shape)

    return tree.map_tensors(grown, outputs)


def unharmed(case: Case, rows: int, seen: Look) -> Case:
    """Return the case with rows of its own, where forward writes to those it is given."""
    if case.fake or not seen.copies:
        return case
    pair = (case.rows.inputs, case.rows.targets)
    count = min(rows, case.rows.size)
    inputs, targets = tree.map_tensors(
        lambda t: t if t.requires_grad else t.clone(), tree.rows(pair, 0, count, case.rows.size)
    )
    return replace(case, rows=TensorBatch(inputs, targets, count))


@contextmanager
def put_back(case: Case) -> Iterator[Before]:
    """Run the body on a case without its gradients, and put back whatever it moved."""
    before = Before([] if case.fake else case.modules, case.leaves)  # fakes are thrown away
    hooks = [] if case.fake else [found for found in map(_hooks, case.leaves) if found]
    kept = Kept()
    kept.modules((module for _, module in case.modules), attributes=not case.fake)
    for held in (*hooks, *case.loss.functions()):
        kept.container(held) if isinstance(held, dict) else kept.function(held)
    try:
        for found in hooks:
            found.clear()  # what a hook adds up elsewhere must not hear of a rehearsal
        Gradients(case.leaves).set_aside()
        with no_optimizer_step(before), _in_one_piece(case), case.mode():
            yield before
    finally:
        with uninterrupted():
            kept.put_back()
            failures = before.put_back()
        for failure in failures:
            raise failure


def _in_one_piece(case: Case) -> AbstractContextManager[None]:
    """Hold back Ctrl-C while fakes are computed: C++ code that asks one its device cannot fail."""
    return uninterrupted() if case.fake else nullcontext()


def _hooks(leaf: Tensor) -> dict[Any, Any]:
    """Return the hooks that run when the gradient of a leaf has been added."""
    return getattr(leaf, "_post_accumulate_grad_hooks", None) or {}


@contextmanager
def _metered(case: Case) -> Iterator[tuple[Meter, Before]]:
    """The same under a meter that knows the tensors of the model."""
    modules = [module for _, module in case.modules]
    known = {
        "parameters": [*_of(modules, "_parameters"), *case.leaves],
        "buffers": _of(modules, "_buffers"),
    }
    with quietly(), put_back(case) as before, Meter(case.device, known) as meter:
        yield meter, before


def make_step(case: Case, link: Link, n: int, gradients: Gradients | None, count: int) -> Step:
    """Return the step of a case in micro-batches of `n`, of which `count` will be run."""
    return Step(
        model=case.model,
        loss=case.loss,
        batch=case.batch(count),
        micro_batch=n,
        link=link,
        buffers=ForwardBuffers([], set(), None),
        gradients=gradients,
        batchnorm=case.batchnorm,
    )


def _of(modules: list[nn.Module], kind: str) -> list[Tensor]:
    every = [tensor for module in modules for tensor in getattr(module, kind).values()]
    return [tensor for tensor in every if tensor is not None]


def _claim_gradients(meter: Meter, gradients: Gradients | None) -> None:
    if gradients is not None:
        meter.claim("gradients", (p.grad for p in gradients.parameters if p.grad is not None))


def update(optimizer: torch.optim.Optimizer, modules: list[nn.Module]) -> Timeline | None:
    """Rehearse the first ``optimizer.step()``, on fakes, with every gradient there.

    Args:
        optimizer: the real one.
        modules: all that a step runs; their tensors are there too.

    Returns:
        What it holds; None where the optimizer is not torch's own, or reads a value.
    """
    fakes = Fakes()
    twin = fakes.optimizer(optimizer)
    if twin is None:
        return None
    stepped = [p for group in twin.param_groups for p in group["params"]]
    device = next((p.device for p in stepped), torch.device("cpu"))
    try:
        there = {id(p) for p in stepped}
        trained = [fakes.of(p) for p in _of(modules, "_parameters") if p.requires_grad]
        others = [p for p in trained if id(p) not in there]  # another optimizer's, perhaps
        with fakes.mode:
            beside = [torch.empty_like(p) for p in others]
            for parameter in stepped:
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        for group in twin.param_groups:
            if device.type == "cuda" and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True  # what torch does there, and not for fakes
        known = {
            "parameters": [*stepped, *map(fakes.of, _of(modules, "_parameters"))],
            "buffers": map(fakes.of, _of(modules, "_buffers")),
            "gradients": [*beside, *(p.grad for p in stepped if p.grad is not None)],
        }
        with quietly(), torch.no_grad(), fakes.mode, Meter(device, known) as meter:
            type(twin).step(twin)
    except Exception:  # whatever an optimizer does that fakes cannot
        return None
    meter.claim("optimizer", state_tensors(twin))
    found: Timeline = meter.timeline()
    return found


@contextmanager
def measured(
    device: torch.device,
    modules: Modules,
    optimizer: torch.optim.Optimizer | None,
    before: Before,
) -> Iterator[Callable[[], int]]:
    """Count what the body holds at its peak, and what is there beside it.

    Args:
        device: CUDA counts for itself; elsewhere the body runs under the meter.
        modules: their tensors are there.
        optimizer: and its state.
        before: and the gradients that were there.

    Yields:
        What returns the bytes once the body is done.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        return
    every = [module for _, module in modules]
    known = {
        "parameters": _of(every, "_parameters"),
        "buffers": [
            *_of(every, "_buffers"),
            *(b.values for b in before.buffers if b.values is not None),
        ],
        "optimizer": [] if optimizer is None else state_tensors(optimizer),
        "gradients": [gradient for _, gradient in before.gradients if gradient is not None],
    }
    with eager(), Meter(device, known) as meter:
        yield lambda: int(meter.peak)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor of an optimizer's state."""
    return [tensor for state in optimizer.state.values() for _, tensor in tree.tensors(dict(state))]


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of that state."""
    held = [] if optimizer is None else state_tensors(optimizer)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
