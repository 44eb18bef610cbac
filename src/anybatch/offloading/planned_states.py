"""Training state that is offloaded as a plan specifies.

The optimizer's state is offloaded first. If a step does not fit with that, parameters and gradients
share a memory with it, and the plan states its size: the rest is the micro-batch's, and a larger
share saves them transfers to the file and back.

    more resident bytes     fewer bytes are offloaded in a micro-batch
    a larger micro-batch    fewer micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike

from torch import nn, optim

from anybatch.core import optimizers
from anybatch.core.optimizers import allocated, device_of, inner_step, state_bound
from anybatch.core.plan import Plan, States
from anybatch.core.units import parse_bytes, parse_share
from anybatch.errors import BudgetError, NotYetError
from anybatch.memory.spill import maker
from anybatch.offloading.optimizer_states import OffloadedStates, default_resident, offload_states


def states_of(
    store: str,
    folder: str | PathLike[str] | None,
    optimizer: optim.Optimizer | None,
    memory: float | str | None,
) -> States:
    """Return where an optimizer's state will wait, as a plan has it.

    Args:
        store: "host" or "file".
        folder: of the file, or None.
        optimizer: whose state it is.
        memory: the budget of a step: the rest after parameters and gradients is halved between the
            state and the rest of an update. None (default) is no budget.

    Raises:
        NotExactError: parts of this optimizer's step would not be its step.
        ValueError: there is no optimizer, or the store means nothing here.
    """
    if optimizer is None:
        raise ValueError(
            f"states={store!r} names the store of an optimizer's state, and there is no optimizer: "
            "give optimizer="
        )
    inner_step(optimizer)
    if folder is not None and store == "file":
        maker(folder, device_of(optimizer))
    maker(store, device_of(optimizer))
    resident = default_resident(optimizer)
    if memory is not None and parse_share(memory) is None:  # a share is of what is free
        every = [(g, p) for g in optimizer.param_groups for p in g["params"]]
        left = parse_bytes(memory) - 2 * sum(allocated(p) for _, p in every)
        largest = max(state_bound(optimizer, g, p) for g, p in every)
        resident = max(largest, min(resident, left // 2))
    return States(store, None if folder is None else str(folder), resident)


def start_offload(
    states: States, optimizer: optim.Optimizer | None, model: nn.Module | None = None
) -> OffloadedStates:
    """Offload an optimizer's state as a plan specifies.

    Args:
        states: where to.
        optimizer: whose.
        model: whose parameters and gradients are offloaded too, inside the context, if the plan
            says so.
    """
    if optimizer is None:
        raise ValueError(
            "a plan that offloads an optimizer's state needs that optimizer: give optimizer="
        )
    where = states.folder if states.store == "file" and states.folder else states.store
    model = model if states.model else None
    return offload_states(optimizer, model=model, memory=states.resident_bytes, store=where)


def plan_offloaded(
    foresee: Callable[..., Plan],
    where: States,
    optimizer: optim.Optimizer,
    model: nn.Module,
    size: int,
) -> Plan:
    """Return the plan of a training with offloaded optimizer state, and model if necessary.

    Raises:
        BudgetError: not even one sample fits.
    """
    try:
        with start_offload(where, optimizer):
            return replace(foresee(), states=where)
    except BudgetError as error:
        try:
            return plan_with_model(foresee, where, optimizer, model, size)
        except BudgetError as least:
            raise least from error
        except NotYetError:  # over ranks
            raise error from None


def plan_with_model(
    foresee: Callable[..., Plan],
    where: States,
    optimizer: optim.Optimizer,
    model: nn.Module,
    size: int,
) -> Plan:
    """Return the plan of a training with offloaded parameters and gradients, too.

    Args:
        foresee: returns the plan of a step as things are; takes ``timed=False``.
        where: where they go.
        optimizer: whose state goes with them.
        model: whose they are.
        size: N_B, samples in the mini-batch.

    Raises:
        BudgetError: with the fewest resident bytes there can be not even one sample fits.
    """
    least = least_resident(optimizer, model)
    with start_offload(
        replace(where, resident_bytes=least, model=True), optimizer, model
    ) as states:
        found = _with_the_least(foresee, states)
        memory, least = found.memory, states.memory
        assert memory is not None
        other_bytes = {one.micro_batch: one.peak_bytes - least for one in memory.candidates}
        other_bytes.setdefault(found.micro_batch, memory.predicted - least)
        every = [p for p in model.parameters() if p.nbytes >= optimizers.SMALL]
        pageable = sum(allocated(p) * (1 + p.requires_grad) for p in every)
        resident = best_resident(other_bytes, size, memory.budget, least, pageable)
        while True:
            states.memory = resident
            try:
                found = foresee()
                break
            except BudgetError:  # larger parts of an update have larger results
                if resident == least:
                    raise
                resident = least if resident - least < least // 8 else (resident + least) // 2
        return replace(found, states=replace(where, resident_bytes=resident, model=True))


def best_resident(
    other_bytes: Mapping[int, int], size: int, budget: int, least: int, pageable: int
) -> int:
    """Return the budget for parameters and gradients with which a step moves the fewest bytes.

    Args:
        other_bytes: samples in a micro-batch -> bytes that a step holds in addition.
        size: N_B, samples in the mini-batch.
        budget: bytes.
        least: resident bytes that there must be.
        pageable: bytes of all parameters and gradients that may be offloaded.

    Returns:
        The rest of a budget beside a micro-batch of n samples, for the n that minimises
        ``ceil(N_B / n) * max(0, pageable - resident(n))``; of equal ones the largest n.

    Example:
        >>> best_resident({1: 10, 8: 60}, 64, budget=100, least=20, pageable=200)
        40
    """

    def moved(n: int) -> int:
        return -(-size // n) * max(0, pageable - (budget - other_bytes[n]))

    fits = [n for n, held in other_bytes.items() if budget - held >= least]
    n = min(fits, key=lambda n: (moved(n), -n))
    return budget - other_bytes[n]


def least_resident(optimizer: optim.Optimizer, model: nn.Module) -> int:
    """Return the least budget for a training: half of it holds a parameter's state as it steps."""
    groups = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    sizes = [max(state_bound(optimizer, group, p), 2 * allocated(p)) for group, p in groups]
    return int(2 * max([*sizes, *map(allocated, model.parameters())]))


def _with_the_least(foresee: Callable[..., Plan], states: OffloadedStates) -> Plan:
    """Return a plan with the least budget that kernels reading several parameters permit."""
    while True:
        try:
            return foresee(timed=False)
        except BudgetError as error:
            if error.budget != states.memory or error.needed <= states.memory:
                raise
            states.memory = error.needed
