"""The bytes that a step may hold: the default, and the error where they are too few.

A budget includes the existing tensors of the step, and all that the step allocates.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from anybatch.core import accelerator, accelerators
from anybatch.core.absent import ASSUMED, AbsentDevice, absent, enough
from anybatch.core.memory_errors import out_of_memory
from anybatch.core.rounding import rounded
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError
from anybatch.execution.case import Case
from anybatch.memory.limits import available_memory
from anybatch.memory.meter import storages
from anybatch.memory.paged import paged
from anybatch.planner.forecast import LOSS, WORKSPACE, Forecast
from anybatch.planner.ladder import SMALL
from anybatch.planner.probe import workspace
from anybatch.planner.updates import state_bytes

CUBLAS = "cuBLAS"
"""The owner of its workspaces, as they are assumed of a device that is not there."""


def budget_error(budget: int, source: str, foreseen: Forecast, size: int) -> BudgetError:
    """Return the error with the bytes needed, the budget, and a budget that would fit."""
    n, floor = foreseen.least(size)
    owners = sorted(foreseen.owners(n, size).items(), key=lambda pair: -pair[1])
    listed = ", ".join(f"{name} {show_bytes(count)}" for name, count in owners)
    cut = "undivided" if n == size else "with micro-batches of one sample"
    workspace = "a smaller workspace, " if any(name == WORKSPACE for name, _ in owners) else ""
    return BudgetError(
        f"a step must fit in memory, and {cut} it needs {show_bytes(floor)} ({listed}), and the "
        f"budget is {show_bytes(budget)} ({source}): give {enough(floor)} or more, {workspace}a "
        "smaller model, smaller samples, or an optimizer with less state",
        needed=floor,
        budget=budget,
    )


def other_tensors(case: Case, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of tensors on a device that are no states of a step.

    Args:
        case: the real one.
        optimizer: whose state is there.
    """
    # Workspaces of other threads and streams would count twice: a step makes its own
    # (test_the_peak_of_a_step_is_what_was_foreseen).
    accelerators.clear_workspaces()
    states = _bytes_of_states(case) + state_bytes(optimizer)
    other = accelerator.of(case.device).allocated(case.device) - states
    # `Engine.last` has the loss of the last step while the next one runs
    # (test_the_floor_is_enough).
    return max(0, other) + rounded(LOSS, case.device)


def ran_out(device: torch.device, budget: int, source: str) -> BudgetError:
    """Return the error of a dry run that ran out of a device's memory, within the budget or not."""
    there = accelerator.of(device)
    every = there.left(device) + there.allocated(device)
    return BudgetError(
        f"a few samples must fit on {device} before a step is planned, and in a dry run of them "
        f"memory ran out: it has {show_bytes(every)} for all tensors of this process, and the "
        f"budget is {show_bytes(budget)} ({source}). Free memory of the device, or give smaller "
        "samples or a smaller model, or micro_batch= instead of memory=, which needs no dry run",
        needed=every + 1,
        budget=budget,
    )


def on_cuda(
    found: Forecast,
    *,
    case: Case,
    others: int,
    budget: int,
    size: int,
) -> Forecast:
    """Return the forecast plus the workspace and the other tensors of CUDA's allocator.

    Workspace is measured at one sample, at few, and at the most that fit: kernels use other
    workspaces for few samples than for more. Only sizes that fit are run. If none does, or memory
    runs out, it is that of cuBLAS as assumed for a device that is not there.

    Args:
        found: without them.
        case: the real one.
        others: bytes of the other tensors; see `other_tensors`.
        budget: bytes.
        size: N_B, samples in the mini-batch.
    """
    found = found.with_more("other tensors", others)
    measured = dict[int, int]()
    few = [] if found.indivisible else sorted({1, min(SMALL, size)}, reverse=True)
    while (n := few.pop() if few else found.largest(budget, size)) and n not in measured:
        if found.peak(n, size) > budget:
            continue
        took = _workspace(case, found, n, size)
        if took is None:
            return found.with_more(CUBLAS, ASSUMED)
        measured[n] = took
        most = max(measured.values())
        found = found.with_constant({"workspace": most}) if most else found
    return found if measured else found.with_more(CUBLAS, ASSUMED)


def _workspace(case: Case, found: Forecast, n: int, size: int) -> int | None:
    """Return the bytes of workspace of a micro-batch of `n`; None where memory runs out."""
    run = replace(case, lanes=case.lanes and n < size)  # undivided, BatchNorm is torch's own
    try:
        return workspace(run, found.inspection, n, _own_bytes(found, n, size))
    except Exception as error:
        if out_of_memory(error) or n > 1 or size == 1:
            raise
    return 0  # the model takes more than one


def on_absent(found: Forecast, case: Case, device: AbsentDevice) -> Forecast:
    """Return the forecast plus the bytes assumed of an absent device: loss and cuBLAS workspace."""
    found = found.with_more("other tensors", rounded(LOSS, case.device))
    return found.with_more(CUBLAS, device.workspace)


def _own_bytes(found: Forecast, n: int, size: int) -> int:
    """Return the bytes that a micro-batch of `n` allocates where no other is on its way."""
    line = found.divided.at(n) if n < size else found.undivided.at(n)
    held = line.at_peak()
    there = held.get("parameters", 0) + held.get("buffers", 0)
    return sum(held.values()) - there - (held.get("inputs", 0) // 2 if n < size else 0)


def default_budget(case: Case, optimizer: torch.optim.Optimizer | None) -> tuple[int, str]:
    """Return the default budget (free bytes plus the step's own tensors), and its source."""
    device = absent()
    if device is not None:
        return device.budget(None)
    free, words = available_memory(case.device)
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
    # Weights of a recurrent layer are views of one storage, which is rounded up once
    # (test_a_storage_that_weights_share_counts_once).
    found = {s._cdata: s for t in states if not pages.holds(t) for s in storages(t)}
    here = sum(rounded(s.nbytes(), s.device) for s in found.values()) + pages.here
    return here + (case.sharded.bytes if case.sharded is not None else 0)
