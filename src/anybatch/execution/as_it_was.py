"""Snapshot and restore of all state around trial steps of training.

A step that failed is undone by `anybatch.core.undo`, which records the state that a step changes
before the optimizer: gradients, buffers and RNG. Trial steps change the parameters and the
optimizer's state, too. Copies of them wait in host memory and are copied back into the same
tensors, so references to these (of a schedule, an average, another optimizer) remain valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybatch.core.modules import Modules, local
from anybatch.core.undo import Before, uninterrupted
from anybatch.errors import NotYetError

Back = Callable[[], Any]
"""Puts a thing back as it was, and returns it."""


@contextmanager
def as_it_was(
    modules: Modules, leaves: Iterable[Tensor], optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    """Run the body as trial training, and restore all state however it ends.

    Args:
        modules: every module that a step runs.
        leaves: every parameter that is trained.
        optimizer: the one that steps; its groups' options and its state are restored, too. None
            where none does.

    Raises:
        NotYetError: the optimizer's state waits elsewhere.
        RuntimeError: something could not be restored; its notes name it. An exception of the body
            is raised instead, with these notes.
    """
    every = list(leaves)
    steps: list[Back] = [restorer(leaf) for leaf in every]
    steps += [] if optimizer is None else [_states(optimizer), _options(optimizer)]
    before, raised = Before(modules, every), None
    try:
        before.suspend_hooks()
        for leaf in every:
            leaf.grad = None  # those that are there are not written to
        yield
    except BaseException as error:
        raised = error
        raise
    finally:
        with uninterrupted():
            failures = before.put_back()
            with torch.no_grad():
                failures += [failed for step in steps if (failed := _tried(step)) is not None]
        if failures:
            found = raised or RuntimeError(
                "the state that tried steps changed could not be restored"
            )
            for failure in failures:
                found.add_note(
                    f"and the state before the tried steps could not be restored: {failure}"
                )
            if raised is None:
                raise found


def _tried(step: Back) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


def restorer(one: Any) -> Back:
    """Return a function that restores a tensor's values, or all entries of a list or mapping.

    Raises:
        NotYetError: a tensor has no data: it waits elsewhere.
    """
    if isinstance(one, Tensor):
        if one.is_meta:
            raise NotYetError(
                "a step must be able to restore all that it changes, and a tensor of the "
                "optimizer's state is offloaded: bring it back first"
            )
        return partial(_values_back, one, local(one).detach().to("cpu", copy=True))
    if isinstance(one, dict):
        return partial(_entries_back, one, {name: restorer(value) for name, value in one.items()})
    if isinstance(one, list | tuple):
        return partial(_items_back, one, [restorer(value) for value in one])
    return _left(one)


def _left(one: Any) -> Back:
    def same() -> Any:
        return one

    return same


def _values_back(tensor: Tensor, values: Tensor) -> Tensor:
    local(tensor).copy_(values)
    return tensor


def _entries_back(found: dict[Any, Any], entries: dict[Any, Back]) -> dict[Any, Any]:
    for name in [name for name in found if name not in entries]:
        del found[name]
    for name, back in entries.items():
        found[name] = back()
    return found


def _items_back(found: Any, items: list[Back]) -> Any:
    values = [back() for back in items]
    if isinstance(found, list):
        found[:] = values
    return found


def _states(optimizer: torch.optim.Optimizer) -> Back:
    """Return a function that restores the optimizer's states, and drops those added since."""
    return partial(
        _entries_back,
        optimizer.state,
        {leaf: restorer(one) for leaf, one in optimizer.state.items()},
    )


def _options(optimizer: torch.optim.Optimizer) -> Back:
    """Return a function that restores the parameter groups and every option of each."""
    groups = list(optimizer.param_groups)
    entries = [
        {name: _left(one) if name == "params" else restorer(one) for name, one in group.items()}
        for group in groups
    ]

    def back() -> None:
        optimizer.param_groups[:] = groups
        for group, options in zip(groups, entries, strict=True):
            _entries_back(group, options)

    return back
