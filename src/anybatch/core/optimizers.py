"""Optimizers: unwrapped, stepped a few parameters at a time, and the bytes of their state.

An update that reads one parameter, its gradient and its state gives the same bits whether the
others are updated in the same call or not. That holds for torch's optimizers below. An optimizer
that reads all of them (LBFGS), or whose code is not torch's, is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim

from anybatch.core import accelerator, pytree
from anybatch.core.absent import type_of
from anybatch.core.modules import is_spread, local, parts_of_sparse
from anybatch.errors import NotExactError, NotYetError

COPIES: dict[type[optim.Optimizer], int] = {
    optim.Adadelta: 2,
    optim.Adafactor: 2,
    optim.Adagrad: 1,
    optim.Adam: 2,
    optim.AdamW: 2,
    optim.Adamax: 2,
    optim.ASGD: 1,
    optim.Muon: 1,
    optim.NAdam: 2,
    optim.RAdam: 2,
    optim.RMSprop: 3,
    optim.Rprop: 2,
    optim.SGD: 1,
    optim.SparseAdam: 2,
}
"""At most so many tensors like a parameter does an optimizer keep of it; AMSGrad keeps one more."""

RESIDENT = "_anybatch_resident_bytes"
"""The attribute of a step in parts: the bytes of state that are in memory at a time."""

SMALL = 4096
"""Bytes below which a tensor of a state is not offloaded: a block of the file would be larger."""

MADE_OF = ("step", "_init_group")
"""Methods that a step is made of."""


def inner_step(optimizer: optim.Optimizer) -> Callable[[Any], Any]:
    """Return the step of an optimizer without its hooks.

    Raises:
        NotExactError: its step cannot be made a few parameters at a time.
    """
    cls = type(optimizer)
    base = next((one for one in cls.__mro__ if one in COPIES), None)
    if base is None or any(_plain(cls, name) is not _plain(base, name) for name in MADE_OF):
        listed = ", ".join(one.__name__ for one in COPIES)
        raise NotExactError(
            "optimizer state can be offloaded only where each parameter is updated by itself, so "
            f"that a few at a time give the same bits, and of {cls.__module__}.{cls.__qualname__} "
            f"that is not known: use one of torch.optim's {listed}, or a subclass that does not "
            "override step()"
        )
    _refuse_groups(optimizer)
    step: Callable[[Any], Any] = _plain(cls, "step")
    return step


def state_bound(optimizer: optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    """Return the most bytes of state that a step makes of a parameter."""
    base = next(one for one in type(optimizer).__mro__ if one in COPIES)
    sizes = [parameter.element_size()]
    if parameter.grad is not None:
        sizes.append(parameter.grad.element_size())
    copies = COPIES[base] + bool(group.get("amsgrad"))
    return copies * rounded(parameter.numel() * max(sizes), parameter.device)


def resident_state_bytes(optimizer: optim.Optimizer) -> int | None:
    """Return the bytes of state that are in memory at a time; None where all of it is."""
    found: int | None = getattr(vars(optimizer).get("step"), RESIDENT, None)
    return found


def device_of(optimizer: optim.Optimizer) -> torch.device:
    """Return the device of an optimizer's parameters.

    Raises:
        NotExactError: they are on several.
    """
    every = {p.device for group in optimizer.param_groups for p in group["params"]}
    if len(every) > 1:
        raise NotExactError(
            "optimizer state can be offloaded from one device, and the parameters are on "
            f"{', '.join(sorted(map(str, every)))}: use one optimizer for each device"
        )
    (device,) = every
    return torch.device(device)


def _refuse_groups(optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise NotExactError(
                "optimizer state can be offloaded only where no graph holds it, and this "
                "optimizer was made with differentiable=True: leave that out"
            )
        if any(is_spread(p) for p in group["params"]):
            raise NotExactError(
                "optimizer state can be offloaded only where parameters are not sharded, and "
                "there are DTensors (FSDP): their state is sharded over the ranks already"
            )


def _plain(cls: type, name: str) -> Any:
    """Return a method without the wrapper that torch adds for its hooks."""
    found = getattr(cls, name, None)
    while getattr(found, "hooked", False):
        found = found.__wrapped__  # type: ignore[union-attr]
    return found


# Wrappers of a library around a user's optimizer: unwrapped, or refused by name.
#
# ``accelerator.prepare(model, optimizer)`` returns an optimizer that forwards everything to its
# inner one, except ``step()``: that does nothing while gradients are accumulated, and uses a loss
# scaler where there is one. A dry run of an update, and a move of state, need the optimizer that
# has the code; and a skipped step would let full batches add up:
#
#     AcceleratedOptimizer ── same state, same groups ──> AdamW        rehearsed, counted, moved
#                         └── gradient_state ──> steps are left out?   refused
#                         └── scaler ──────────> gradients are scaled by it, as its step expects
#
# Recognised by behaviour and not by class, so nothing is imported here. Source: accelerate 1.15,
# ``AcceleratedOptimizer`` and ``GradientState``.

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
        self._model: Any = model
        self._joins = hasattr(model, "_join_config")  # of torch's Joinable, from its beginning
        self._state = getattr(optimizer, "gradient_state", None)
        if self._state is None and getattr(model, "_is_accelerate_prepared", False):
            self._state = sys.modules["accelerate.state"].GradientState()
        self.refuse_loop()

    def refuse_loop(self) -> None:
        """Refuse a step that would not be followed by an update of its own, or not on all ranks.

        Raises:
            ValueError: ``optimizer.step()`` and ``zero_grad()`` would be left out.
            NotYetError: ranks may leave the loop one after another.
        """
        if self._joins and getattr(self._model._join_config, "enable", False):
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


# Bytes of an allocation: the requested bytes, rounded up as a device's allocator does.
#
# torch's allocator for CUDA allocates multiples of 512 bytes, so a gradient of one number takes
# 512. A forecast that adds up the bytes of tensors would be too low by as many roundings as there
# are tensors; each of them is counted as its allocator counts it.


def rounding(device: torch.device) -> int:
    """Return the granularity in bytes to which a device's allocator rounds up."""
    return accelerator.of(type_of(device)).facts.rounding


def rounded(nbytes: int, device: torch.device) -> int:
    """Return the bytes that an allocation of `nbytes` takes on a device."""
    grain = rounding(device)
    return -(-nbytes // grain) * grain


def allocated(tensor: Tensor) -> int:
    """Return the bytes that memory for a tensor's elements takes; of a sparse one, for its entries.

    A tensor that is spread over ranks counts with the part that is here.
    """
    tensor = local(tensor)
    parts = parts_of_sparse(tensor) or (tensor,)
    return sum(rounded(part.numel() * part.element_size(), part.device) for part in parts)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor of an optimizer's state that is resident."""
    states = optimizer.state.values()
    every = [local(tensor) for state in states for _, tensor in pytree.tensors(dict(state))]
    return [tensor for tensor in every if not tensor.is_meta]


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of that state."""
    held = [] if optimizer is None else state_tensors(optimizer)
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in held}
    return sum(rounded(one.nbytes(), one.device) for one in storages.values())
