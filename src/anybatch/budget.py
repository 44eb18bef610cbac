"""The bytes that a step may hold: the default, and the error where they are too few.

A budget counts what the step's own tensors hold already, and all that the step allocates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from anybatch import accelerator
from anybatch.case import Case
from anybatch.errors import BudgetError
from anybatch.forecast import WORKSPACE, Forecast
from anybatch.kinds import bytes_of
from anybatch.ladder import SMALL
from anybatch.memory import left
from anybatch.paged import paged
from anybatch.probe import workspace
from anybatch.units import show_bytes
from anybatch.updates import state_bytes


def budget_error(budget: int, source: str, foreseen: Forecast, size: int) -> BudgetError:
    """Return the error that says what is needed, what was given, and what would fit."""
    n, floor = foreseen.least(size)
    owners = sorted(foreseen.owners(n, size).items(), key=lambda pair: -pair[1])
    listed = ", ".join(f"{name} {show_bytes(count)}" for name, count in owners)
    cut = "undivided" if n == size else "with micro-batches of one sample"
    workspace = "a smaller workspace, " if any(name == WORKSPACE for name, _ in owners) else ""
    return BudgetError(
        f"a step must fit in memory, and {cut} it needs "
        f"{show_bytes(floor)} ({listed}), and {show_bytes(budget)} is there ({source}): give "
        f'memory="{-(-floor // 1024)}KiB" or more, {workspace}a smaller model, smaller samples, or '
        "an optimizer that keeps less",
        needed=floor,
        given=budget,
    )


def on_cuda(found: Forecast, case: Case, optimizer: torch.optim.Optimizer | None) -> Forecast:
    """Return the forecast with what only CUDA's allocator knows: workspace, and other tensors."""
    states = _bytes_of_states(case)
    grown = found.undivided.at(SMALL).peak - states
    other = accelerator.of(case.device).allocated(case.device) - states - state_bytes(optimizer)
    more = found.with_more("workspace", workspace(case, found.look, SMALL, grown))
    return more.with_more("other tensors", max(0, other))


def default_budget(case: Case, optimizer: torch.optim.Optimizer | None) -> tuple[int, str]:
    """Return what is left on the device, and what the step's own tensors hold already."""
    free, words = left(case.device)
    return free + _bytes_of_states(case) + state_bytes(optimizer), words


def _bytes_of_states(case: Case) -> int:
    """Return the bytes of parameters, buffers and gradients that are here."""
    pages = paged()
    held: dict[int, Tensor] = {id(leaf): leaf for leaf in case.leaves}
    for _, module in case.modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not is_lazy(tensor):
                held[id(tensor)] = tensor
    states = list(held.values())
    states += [leaf.grad for leaf in case.leaves if leaf.grad is not None]
    here = sum(bytes_of(t) for t in states if not pages.holds(t)) + pages.here
    return here + (case.sharded.bytes if case.sharded is not None else 0)
