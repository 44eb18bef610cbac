"""Where the samples of a batch meet inside a model: BatchNorm in training.

It normalises with the statistics of the rows it is given, so rows that come in micro-batches give
another function than rows that come at once. Modules are found by walking the model; a bare
``F.batch_norm`` only shows itself when it is called.
"""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

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
