"""Wrappers of a library around a user's optimizer: unwrapped, or refused by name.

``accelerator.prepare(model, optimizer)`` returns an optimizer that forwards everything to its inner
one, except ``step()``: that does nothing while gradients are accumulated, and uses a loss scaler
where there is one. A dry run of an update, and a move of state, need the optimizer that has the
code; and a skipped step would let full batches add up:

    AcceleratedOptimizer ── same state, same groups ──> AdamW        rehearsed, counted, moved
                        └── gradient_state ──> steps are left out?   refused
                        └── scaler ──────────> gradients are scaled by it, as its step expects

Recognised by behaviour and not by class, so nothing is imported here. Source: accelerate 1.15,
``AcceleratedOptimizer`` and ``GradientState``.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from torch import nn

from anybatch.errors import NotExactError, NotYetError

OptimizerT = TypeVar("OptimizerT", torch.optim.Optimizer, torch.optim.Optimizer | None)

FOREIGN = {"deepspeed": "DeepSpeed", "megatron": "Megatron-LM"}
"""Packages whose models and optimizers run backward and update in their own way."""


def bare(optimizer: OptimizerT) -> OptimizerT:
    """Return the optimizer that has the code of the update.

    Args:
        optimizer: the user's; for one that wraps another with the same groups and the same state,
            and so has no part in the update itself, it is the inner one. None stays None.
    """
    found: Any = optimizer
    inner = getattr(found, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer) and _same(found, inner):
        found, inner = inner, getattr(inner, "optimizer", None)
    return found  # type: ignore[no-any-return]


def refuse_scaled(optimizer: Any) -> None:
    """Refuse to replace a step that accelerate has put aside, to call it where no scale is too big.

    Raises:
        NotExactError: it has.
    """
    if getattr(optimizer, "scaler", None) is not None:
        raise NotExactError(
            "step() must be the optimizer's own when its state is offloaded, and accelerate has "
            "replaced it for a loss scaler: call offload_states() on the optimizer, and then "
            "accelerator.prepare(...)"
        )


def _same(outer: Any, inner: Any) -> bool:
    return outer.param_groups is inner.param_groups and outer.state is inner.state


class Prepared:
    """Wrappers of accelerate around an engine's model and optimizer, if there are any.

    Args:
        model: the user's, before any unwrapping.
        optimizer: theirs, as they gave it, or None.

    Raises:
        NotYetError: another library owns backward.
        ValueError: gradients are to be accumulated.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        _refuse_foreign(model, optimizer)
        self.scaler = getattr(optimizer, "scaler", None)
        self._model, self._state = model, getattr(optimizer, "gradient_state", None)
        if self._state is None and getattr(model, "_is_accelerate_prepared", False):
            self._state = sys.modules["accelerate.state"].GradientState()
        self.refuse_loop()

    def refuse_loop(self) -> None:
        """Refuse a step that would not be followed by an update of its own, or not on all ranks.

        Raises:
            ValueError: ``optimizer.step()`` and ``zero_grad()`` would be left out.
            NotYetError: ranks may leave the loop one after another.
        """
        if getattr(getattr(self._model, "_join_config", None), "enable", False):
            raise NotYetError(
                "every rank must take every step, and in join_uneven_inputs (torch's Join) some "
                "may have none left: leave it out, and call engine.backward on a rank without "
                "samples, too, with empty tensors"
            )
        steps = 1 if self._state is None else self._state.num_steps
        if steps != 1:
            raise ValueError(
                "with an engine a step is one batch already, and "
                f"Accelerator(gradient_accumulation_steps={steps}) skips optimizer.step() in all "
                f"but one of {steps}: leave it out, and make the loader's batch_size as large as "
                "the optimisation wants"
            )


def _refuse_foreign(model: nn.Module, optimizer: Any) -> None:
    classes = [*type(model).__mro__, *type(optimizer).__mro__, *type(bare(optimizer)).__mro__]
    for cls in classes:
        library = FOREIGN.get(cls.__module__.partition(".")[0])
        if library is not None:
            raise NotYetError(
                f"an engine runs backward itself, and {cls.__name__} of {library} does that in its "
                "own way: give Accelerator no such plugin; DistributedDataParallel and FSDP2 "
                "(fully_shard) are supported"
            )
