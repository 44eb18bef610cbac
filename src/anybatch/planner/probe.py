"""Bytes of a real micro-batch or step, and of an optimizer's update, as their device counts them.

What kernels allocate besides tensors is in no dry run. So a micro-batch is run on the device, twice
because the second one finds sums of gradients, and all state is restored.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from anybatch.core import accelerator, accelerators, pytree
from anybatch.core.absent import type_of
from anybatch.core.batch import MicroBatch
from anybatch.core.modules import tensors_of
from anybatch.core.oom import out_of_memory
from anybatch.core.optimizers import (
    SMALL,
    inner_step,
    resident_state_bytes,
    state_bound,
    state_tensors,
)
from anybatch.distributed.fsdp import Sharded
from anybatch.execution.few_rows import quietly
from anybatch.execution.gradients import Gradients
from anybatch.execution.prefetch import link_to
from anybatch.execution.signature import Case, few
from anybatch.execution.step import Step
from anybatch.execution.streaming import Parts, discoverer
from anybatch.memory.fakes import Fakes, interrupted_between_functions, large, paged
from anybatch.memory.ledger import Timeline
from anybatch.memory.meter import FOREIGN, Meter, read_peak
from anybatch.offloading.state_mover import parts_of, widest
from anybatch.planner.forecast import Forecast
from anybatch.planner.rehearsal import Inspection, make_step, put_back, unharmed


def ran(case: Case, inspection: Inspection, n: int) -> bool:
    """Run forward and backward of one micro-batch of the real case twice, and restore all state.

    The second run finds sums of gradients, where it would. Return whether memory was enough.
    """
    try:
        single, once_only = n >= case.size, 2 * n > case.size
        case = unharmed(few(case, n), n, writes=inspection.copies)
        with put_back(case) as before, torch.set_grad_enabled(case.trains):
            gradients = Gradients(case.leaves, wide=not single) if case.trains else None
            step = make_step(case, link_to(case.device), n, gradients, 1)
            step.traits.layout, step.traits.copies = inspection.layout, inspection.copies
            step.discover = discoverer(step, before)
            step.coupled = inspection.coupled and not single
            (micro,) = step.feed()
            for _ in range(2):
                if once_only and step.gradients is not None:
                    step.gradients.restart()  # it comes first, and finds no sums
                _run(step, micro)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return False
    return True


def workspace(case: Case, found: Forecast, n: int, size: int) -> int | None:
    """Return the bytes that CUDA's allocator adds to a micro-batch's forecast tensors.

    0 on a device without a statistic, None if memory runs out.
    """
    device, there = case.device, accelerator.of(case.device)
    if not there.peaks:
        return 0
    held = (found.divided.at(n) if n < size else found.undivided.at(n)).at_peak()
    resident = held.get("parameters", 0) + held.get("buffers", 0)
    if n < size:  # no other micro-batch is on its way
        resident += held.get("inputs", 0) // 2
    accelerators.clear_workspaces()
    before = there.allocated(device)
    case = replace(case, lanes=case.lanes and n < size)  # undivided, BatchNorm is torch's own
    peak = read_peak(device, anew=True)
    try:
        enough = ran(case, found.inspection, n)
    except Exception:
        if n > 1 or size == 1:
            raise
        return 0  # the model takes more than one
    if not enough:
        return None
    # Bytes that remain are exact; those at the peak are foreseen, and may be less
    # (test_the_peak_of_a_step_is_what_was_foreseen).
    stays = max(0, there.allocated(device) - before)
    foreseen = sum(held.values()) - resident
    return stays + max(0, (peak() or 0) - before - stays - foreseen)


def _run(step: Step, micro: MicroBatch) -> None:
    """Run one micro-batch; its gradients remain."""

    def train(micro: MicroBatch) -> None:
        parts = Parts(step, micro.inputs)
        if step.coupled:
            # Such a loss is never called with a part of the batch: each part of the model is run,
            # and backward from it.
            for at in range(len(parts)):
                roots = [t for _, t in pytree.tensors(parts.forward(micro, at)) if t.requires_grad]
                step.pull(roots, [torch.ones_like(root) for root in roots])
                del roots
            return
        with step.in_chunks():
            loss = step.loss.full_batch(step.forward(micro), micro)
        step.pull([loss], step.scaled([torch.ones_like(loss)]))

    step.under(train)(micro)
    accelerator.finish(step.device)


# Optimizer state and update of a forecast, by a dry run on fakes before the first step.
#
# The state is made by the first ``optimizer.step()``; until then only a dry run shows its bytes.

IN_PARTS = "optimizer, in parts"
"""The owner of state that passes through memory."""


def update(
    optimizer: torch.optim.Optimizer, modules: list[nn.Module], sharded: Sharded | None = None
) -> Timeline | None:
    """Rehearse the first ``optimizer.step()``, on fakes, with every gradient there.

    Return its bytes, in parts if its state is offloaded; None if the optimizer is not torch's own,
    or reads a value. Tensors of `modules` are there too; `sharded` has gathered them only for the
    step.
    """
    fakes = Fakes()
    twin = fakes.optimizer(optimizer)
    if twin is None:
        return None
    stepped = [p for group in twin.param_groups for p in group["params"]]
    device = next((p.device for p in stepped), torch.device("cpu"))
    try:
        there = {id(p) for p in stepped}
        resident = _parameters(modules, sharded)
        trained = [fakes.of(p) for p in resident if p.requires_grad]
        others = [p for p in trained if id(p) not in there]  # another optimizer's, perhaps
        pages = paged()
        real = [*(p for group in optimizer.param_groups for p in group["params"]), *resident]
        paged_ids = frozenset(id(fakes.of(p)) for p in real if pages.holds(p))
        made = _with_gradients(fakes, stepped, others)
        foreach = accelerator.of(type_of(device)).facts.foreach
        for group in twin.param_groups:  # over lists of tensors, as torch does on some devices
            if foreach and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
        parameters = [*stepped, *map(fakes.of, resident)]
        gradients = [gradient for p, gradient in made if id(p) in paged_ids and large(gradient)]
        owned = {
            FOREIGN: [*(p for p in parameters if id(p) in paged_ids), *gradients],
            "parameters": parameters,
            "buffers": map(fakes.of, tensors_of(modules, "_buffers")),
            "gradients": [gradient for _, gradient in made],
        }
        available = resident_state_bytes(optimizer)
        with (
            interrupted_between_functions(),
            quietly(),
            torch.no_grad(),
            fakes.mode,
            Meter(device, owned) as meter,
        ):
            if available is None:
                type(twin).step(twin)
            else:
                _step_in_parts(twin, available, meter, both=bool(paged_ids))
    except Exception:  # whatever an optimizer does that fakes cannot
        return None
    meter.claim("optimizer", state_tensors(twin))
    found: Timeline = meter.timeline()
    return found if available is None else _with_parts(found, 0 if paged_ids else available)


def _with_gradients(
    fakes: Fakes, stepped: list[Tensor], others: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return all parameters that have a gradient, with it; those that are stepped hold theirs."""
    with interrupted_between_functions(), fakes.mode:
        made = [(p, torch.empty_like(p)) for p in others]
        for parameter in stepped:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return [*made, *((p, p.grad) for p in stepped if p.grad is not None)]


def _step_in_parts(
    twin: torch.optim.Optimizer, available: int, meter: Meter, *, both: bool
) -> None:
    """Step a few parameters at a time; only small entries of their state remain.

    With `both`, parameters and gradients are paged within half of the available bytes.
    """
    every, inner = twin.param_groups, inner_step(twin)
    size_of = partial(state_bound, twin)
    if both:
        size_of, available = partial(widest, size_of), available // 2
    for part in parts_of(twin, size_of, available):
        twin.param_groups = part.groups(every)
        inner(twin)
        for _, parameter in part.members:
            state = twin.state.get(parameter, {})
            large = [k for k, v in state.items() if isinstance(v, Tensor) and v.nbytes >= SMALL]
            meter.claim(IN_PARTS, [state.pop(name) for name in large])
    twin.param_groups = every


def _with_parts(found: Timeline, available: int) -> Timeline:
    """Return a timeline in which parts fill their budget, since they overlap as they are paged.

    The bytes of all the state are the most that can be in it. Bytes shared with parameters are
    counted with those.
    """
    live = found.live.copy()
    if IN_PARTS in found.owners:
        live[:, found.owners.index(IN_PARTS)] = 0
    sizes, grain = [size for o, size, *_ in found.spans if o == IN_PARTS], found.grain
    made = sum(-(-size // grain) * grain for size in sizes)
    return replace(found, live=live).plus({IN_PARTS: min(available, made)})


def _parameters(modules: list[nn.Module], sharded: Sharded | None) -> list[Tensor]:
    """Return the parameters that are there at an update."""
    every = tensors_of(modules, "_parameters")
    if sharded is None:
        return every
    return [*(p for p in every if not sharded.holds(p)), *sharded.shards]
