"""A few steps of training that leave nothing behind: all that they move is put back.

A step that failed is undone by `anybatch.undo`, which notes what a step moves before the optimizer:
gradients, buffers and dice. Steps that are only tried move the parameters and the optimizer's
state, too. Copies of them wait in memory of the host and go back into the same tensors, so whoever
holds one (a schedule, an average, another optimizer) keeps holding the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anybatch.modules import Modules, local
from anybatch.undo import Before, uninterrupted


@contextmanager
def as_it_was(
    modules: Modules, leaves: Iterable[Tensor], optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    """Let the body train, and put everything back, whatever ends it.

    Args:
        modules: every module that a step runs.
        leaves: every parameter that is trained.
        optimizer: the one that steps; its groups' options and its state are put back, too. None
            where none does.

    Raises:
        RuntimeError: something could not be put back; its notes say what.
    """
    every = list(leaves)
    before = Before(modules, every)
    values = [(leaf, _copied(leaf)) for leaf in every]
    states, groups = _noted(optimizer)
    for leaf in every:
        leaf.grad = None  # those that are there are not written to
    try:
        yield
    finally:
        with uninterrupted():
            failures = before.put_back()
            with torch.no_grad():
                for leaf, value in values:
                    local(leaf).copy_(value)
                if optimizer is not None:
                    _put_back(optimizer, states, groups)
        if failures:
            error = RuntimeError("what steps that were tried have moved could not be put back")
            for failure in failures:
                error.add_note(str(failure))
            raise error


def _copied(tensor: Tensor) -> Tensor:
    return local(tensor).detach().to("cpu", copy=True)


States = dict[Tensor, dict[str, tuple[Any, Any]]]


def _noted(optimizer: torch.optim.Optimizer | None) -> tuple[States, list[dict[str, Any]]]:
    """Return the state of each parameter, and the options of each group."""
    if optimizer is None:
        return {}, []
    states = {leaf: _state_of(found) for leaf, found in optimizer.state.items()}
    groups = optimizer.param_groups
    return states, [{k: v for k, v in group.items() if k != "params"} for group in groups]


def _state_of(found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each entry, with a copy of a tensor's values."""
    return {
        name: (one, _copied(one) if isinstance(one, Tensor) else None)
        for name, one in found.items()
    }


def _put_back(
    optimizer: torch.optim.Optimizer, states: States, groups: list[dict[str, Any]]
) -> None:
    """Let the optimizer hold just the states that it held, in the same tensors, and its options."""
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)
    for leaf in [leaf for leaf in optimizer.state if leaf not in states]:
        del optimizer.state[leaf]
    for leaf, entries in states.items():
        held = optimizer.state[leaf]
        for name in [name for name in held if name not in entries]:
            del held[name]
        for name, (one, value) in entries.items():
            held[name] = one
            if value is not None:
                local(one).copy_(value)
