"""An optimizer's state that is away because a plan has it so."""

from __future__ import annotations

from os import PathLike

from torch import optim

from anybatch._plan import States
from anybatch._states import OffloadedStates, default_room, offload_states
from anybatch.spill import maker
from anybatch.states.optimizers import device_of, inner_step, state_bound
from anybatch.units import parse_bytes


def states_of(
    store: str,
    folder: str | PathLike[str] | None,
    optimizer: optim.Optimizer | None,
    memory: int | str | None,
) -> States:
    """Return where an optimizer's state will wait, as a plan has it.

    Args:
        store: "host" or "file".
        folder: of the file, or None.
        optimizer: whose state it is.
        memory: the budget of a step: as much of it as parameters and gradients leave is halved
            between the state and the rest of an update. None (default) is no budget.

    Raises:
        NotExactError: parts of this optimizer's step would not be its step.
        ValueError: there is no optimizer, or the store means nothing here.
    """
    if optimizer is None:
        raise ValueError(
            f"states={store!r} says where an optimizer's state waits, and there is none: give "
            "optimizer="
        )
    inner_step(optimizer)
    if folder is not None and store == "file":
        maker(folder, device_of(optimizer))
    maker(store, device_of(optimizer))
    room = default_room(optimizer)
    if memory is not None:
        every = [(g, p) for g in optimizer.param_groups for p in g["params"]]
        left = parse_bytes(memory) - 2 * sum(p.nbytes for _, p in every)
        largest = max(state_bound(optimizer, g, p) for g, p in every)
        room = max(largest, min(room, left // 2))
    return States(store, None if folder is None else str(folder), room)


def away(states: States, optimizer: optim.Optimizer | None) -> OffloadedStates:
    """Let an optimizer's state leave as a plan has it.

    Raises:
        ValueError: there is no optimizer.
    """
    if optimizer is None:
        raise ValueError(
            "a plan in which an optimizer's state leaves needs that optimizer: give optimizer="
        )
    where = states.folder if states.store == "file" and states.folder else states.store
    return offload_states(optimizer, memory=states.room, store=where)
