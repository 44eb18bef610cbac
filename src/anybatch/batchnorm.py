"""Where the samples of a batch meet inside a model: BatchNorm in training.

It normalises with the statistics of the rows it is given, so rows that come in micro-batches give
another function than rows that come at once. Modules are found by walking the model; a bare
``F.batch_norm`` only shows itself when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from anybatch.errors import NotExactError
from anybatch.modules import Modules

WAY_OUT = (
    'Use batchnorm="local" to normalise each micro-batch by its own statistics, knowingly; or call '
    "eval() on these layers, replace them by GroupNorm, or give micro_batch >= the batch size"
)


def training_batchnorms(modules: Modules) -> list[str]:
    """Return the names of the BatchNorm modules that would use the statistics of their rows."""
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in modules
        if isinstance(module, _BatchNorm)
        and (module.training or (module.running_mean is None and module.running_var is None))
    ]


def running_statistics(modules: Modules) -> set[tuple[int, str]]:
    """Return ``(id(module), buffer name)`` of every running statistic."""
    return {
        (id(module), name)
        for _, module in modules
        if isinstance(module, _NormBase)
        for name in module._buffers
    }


def refuse(names: list[str]) -> None:
    """Raise `NotExactError` naming the layers where samples meet, if there are any."""
    if names:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise NotExactError(
            "samples must not meet inside the model when the batch is split, and they meet in "
            f"BatchNorm in training mode: {shown}. {WAY_OUT}"
        )


class NoBatchNorm(TorchFunctionMode):
    """Refuse a bare ``F.batch_norm(..., training=True)`` that runs inside the context."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the call, and let it."""
        kwargs = kwargs or {}
        if func is batch_norm and (kwargs.get("training") or (len(args) > 5 and args[5])):
            refuse(["F.batch_norm(training=True) called in forward"])
        if func is torch.batch_norm and (kwargs.get("training") or (len(args) > 5 and args[5])):
            refuse(["torch.batch_norm(training=True) called in forward"])
        return func(*args, **kwargs)
