"""Dispatch mode that detects batch statistics, writes to parameters and random draws.

Modules can be walked, and functions can be patched; the actual kernels of a model can be
intercepted only where they are dispatched. This mode is on during the inspection of a model
(`anybatch.execution.inspection`) and at no other time. It refuses, before they run, kernels that
normalise over the batch and kernels that write to a parameter, and makes dropout drop nothing, so
that two runs can be compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from anybatch.core.modules import DispatchMode, storage_of
from anybatch.core.norm import refuse
from anybatch.errors import NotExactError
from anybatch.execution.proof.kernel_call import NORMS, trains
from anybatch.execution.step import Step
from anybatch.memory.meter import written_by

UPDATES = "aten::_batch_norm_with_update"

NORMALISING = frozenset((UPDATES, *(f"aten::{name}" for name in NORMS)))
"""Kernels that may normalise over the batch."""


class Guard(DispatchMode):
    """Watch the kernels of a forward pass.

    Attributes:
        own_rng: a kernel drew from a generator that is not the global one.

    Raises:
        NotExactError: from a kernel that a split batch cannot have.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.own_rng = False
        self._local = step.batchnorm == "local"
        self._names = {
            place: name
            for name, parameter in step.model.named_parameters()
            if (place := _place(parameter)) is not None
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check one kernel call, and run it; a dropout kernel drops nothing."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is None:  # control flow: its kernels come one by one
            return func(*args, **kwargs)
        called = schema.name
        if not self._local and called in NORMALISING and _normalises_the_batch(schema, args):
            refuse(f"{called} called in forward")
        for tensor in written_by(func, args, kwargs):
            place = _place(tensor)
            name = self._names.get(place) if place is not None else None
            if name is not None:
                raise NotExactError(
                    f"parameters must not change before the full batch is done, and forward "
                    f"writes to {name}: do it before or after the step, or give micro_batch >= "
                    "the batch size"
                )
        self.own_rng |= any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values()))
        undropped = _dropping_nothing(called, args)
        return func(*args, **kwargs) if undropped is None else undropped


def _place(tensor: Tensor) -> int | None:
    """Return the storage of a dense tensor, as a number; None where it has none of its own."""
    if is_lazy(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return None
    try:
        return storage_of(tensor)
    except (RuntimeError, NotImplementedError):  # a subclass that only wraps others
        return None


def _normalises_the_batch(schema: Any, args: tuple[Any, ...]) -> bool:
    if schema.name != UPDATES and not trains(schema, args):
        return False
    # instance_norm is this kernel on one row of n * C channels
    # (test_instance_norm_is_no_batch_norm).
    return bool(args[0].shape[0] != 1)


def _dropping_nothing(name: str, args: tuple[Any, ...]) -> Any:
    """Return the result of a dropout kernel that drops nothing; None for any other kernel."""
    if name == "aten::bernoulli_":
        return args[0].fill_(1)
    if name == "aten::bernoulli":
        return torch.ones_like(args[0])
    if name == "aten::native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    return None
