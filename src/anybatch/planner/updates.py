"""Optimizer state and update of a forecast, by a dry run on fakes before the first step.

The state is made by the first ``optimizer.step()``; until then only a dry run shows its bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from anybatch.core import accelerator, tree
from anybatch.core.absent import type_of
from anybatch.core.modules import local, tensors_of
from anybatch.core.optimizers import SMALL, inner_step, resident_state_bytes, state_bound
from anybatch.core.rounding import rounded
from anybatch.distributed.sharded import Sharded
from anybatch.execution.inspection import quietly
from anybatch.memory.fakes import Fakes, interrupted_between_functions
from anybatch.memory.meter import FOREIGN, Meter
from anybatch.memory.paged import large, paged
from anybatch.memory.timeline import Timeline
from anybatch.offload.states.parts import parts_of, widest

IN_PARTS = "optimizer, in parts"
"""The owner of state that passes through memory."""


def update(
    optimizer: torch.optim.Optimizer, modules: list[nn.Module], sharded: Sharded | None = None
) -> Timeline | None:
    """Rehearse the first ``optimizer.step()``, on fakes, with every gradient there.

    Args:
        optimizer: the real one.
        modules: all that a step runs; their tensors are there too.
        sharded: has gathered them only for the step. Default None.

    Returns:
        Its bytes, in parts if its state is offloaded; None if the optimizer is not
        torch's own, or reads a value.
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
        with interrupted_between_functions(), fakes.mode:
            other_gradients = [torch.empty_like(p) for p in others]
            for parameter in stepped:
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        foreach = accelerator.of(type_of(device)).facts.foreach
        for group in twin.param_groups:
            if foreach and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True  # what torch does there, and not for fakes
        pairs = [*zip(others, other_gradients, strict=True), *((p, p.grad) for p in stepped)]
        made = [(p, gradient) for p, gradient in pairs if gradient is not None]
        owned = {
            FOREIGN: _paged(made, [*stepped, *map(fakes.of, resident)], paged_ids),
            "parameters": [*stepped, *map(fakes.of, resident)],
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


def _paged(
    made: list[tuple[Tensor, Tensor]], parameters: list[Tensor], paged_ids: frozenset[int]
) -> list[Tensor]:
    """Return parameters that are paged, and gradients that are."""
    gradients = [gradient for p, gradient in made if id(p) in paged_ids and large(gradient)]
    return [*(p for p in parameters if id(p) in paged_ids), *gradients]


def _step_in_parts(
    twin: torch.optim.Optimizer,
    available: int,
    meter: Meter,
    *,
    both: bool,
) -> None:
    """Step a few parameters at a time; only small entries of their state remain.

    Args:
        twin: the optimizer, of fakes.
        available: bytes of state that may be in memory at a time.
        meter: counts.
        both: parameters and gradients are paged within half of these.
    """
    every, inner = twin.param_groups, inner_step(twin)
    size_of = partial(state_bound, twin)
    size_of, available = (
        (partial(widest, size_of), available // 2) if both else (size_of, available)
    )
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


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor of an optimizer's state that is resident."""
    states = optimizer.state.values()
    every = [local(tensor) for state in states for _, tensor in tree.tensors(dict(state))]
    return [tensor for tensor in every if not tensor.is_meta]


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of that state."""
    held = [] if optimizer is None else state_tensors(optimizer)
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in held}
    return sum(rounded(one.nbytes(), one.device) for one in storages.values())
