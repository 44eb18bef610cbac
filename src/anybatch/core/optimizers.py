"""Which optimizers can step a few parameters at a time, and how much state each of them makes.

An update that reads one parameter, its gradient and its state gives the same bits whether the
others are updated in the same call or not. That holds for torch's optimizers below. An optimizer
that reads all of them (LBFGS), or whose code is not torch's, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

from anybatch.core.modules import is_spread
from anybatch.core.rounding import rounded
from anybatch.errors import NotExactError

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
