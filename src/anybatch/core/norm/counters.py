"""Where the samples of a batch meet inside a model: BatchNorm in training.

It normalises with the statistics of the rows it is given, so rows that come in micro-batches give
another function than rows that come at once; then micro-batches go in lanes. Modules are found by
walking the model; a bare ``F.batch_norm`` only shows itself when it is called.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from anybatch.core.modules import Modules, in_training
from anybatch.errors import NotExactError

WAY_OUT = (
    'Use batchnorm="local" to normalise each micro-batch by its own statistics, which is inexact; '
    "or call eval() on these layers, replace them by GroupNorm, or give micro_batch >= the batch "
    "size"
)

SCRIPTED = ("aten::batch_norm", "aten::native_batch_norm", "aten::_batch_norm_impl_index")
"""Kernels whose sixth operand says that they use the statistics of their rows."""


class BatchStatisticsError(NotExactError):
    """A kernel normalises over the batch, and no module said that it would."""


class ScriptedNormError(NotExactError):
    """TorchScript normalises over the batch, where micro-batches cannot wait for each other."""


class GatherError(BatchStatisticsError):
    """Error of a forward that gathers the rows of the full batch.

    Attributes:
        call: the call of it, in words.
    """

    def __init__(self, what: str) -> None:
        self.call = f"a call of {what} in forward"
        super().__init__(
            "samples must not meet inside the model when the batch is split, and they meet in "
            f'{what} called in forward. Use batchnorm="exact", or give micro_batch >= the batch '
            "size"
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


def counters(modules: Modules) -> list[Tensor]:
    """Return every ``num_batches_tracked``."""
    found = [
        getattr(m, "num_batches_tracked", None) for _, m in modules if isinstance(m, _NormBase)
    ]
    return [counter for counter in found if counter is not None]


def names_of_norms(modules: Modules) -> dict[int, str]:
    """Return id of every running mean and weight of BatchNorm -> the path of its module."""
    return {
        id(tensor): path or "the model"
        for path, module in modules
        if isinstance(module, _BatchNorm)
        for tensor in (module.running_mean, module.weight)
        if tensor is not None
    }


def refuse(name: str) -> NoReturn:
    """Raise `BatchStatisticsError` for a kernel that normalises over the batch."""
    raise BatchStatisticsError(
        "samples must not meet inside the model when the batch is split, and they meet in "
        f"BatchNorm in training mode: {name}. {WAY_OUT}"
    )


def refuse_lanes(modules: Modules, names: list[str], *, literal: bool) -> None:
    """Raise where micro-batches cannot wait for each other in BatchNorm.

    Args:
        modules: of the model.
        names: the layers where samples meet.
        literal: the loss is Algorithm 1 to the letter, which knows no full batch.

    Raises:
        NotExactError: naming the first of the layers.
    """
    compiled = [
        name or "the model"
        for name, module in modules
        if _is_compiled(module) and any(isinstance(inner, _BatchNorm) for inner in module.modules())
    ]
    reason = f"torch.compile has compiled {compiled[0]}" if compiled else ""
    if literal:
        reason = "Algorithm 1 to the letter computes the loss of each micro-batch by itself"
    if reason:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise NotExactError(
            "micro-batches must wait for each other where samples meet, which is BatchNorm in "
            f"training mode ({shown}), and {reason}, where they cannot. {WAY_OUT}"
        )


def refuse_scripted_norms(modules: Modules) -> None:
    """Raise where TorchScript normalises over the batch: its calls are none that can wait.

    Raises:
        ScriptedNormError: naming the first of the modules.
    """
    for name, module in modules:
        if isinstance(module, ScriptModule) and _normalises_in_script(module):
            raise ScriptedNormError(
                "micro-batches must wait for each other where samples meet, and "
                f"{name or 'the model'} is a torch.jit.ScriptModule with BatchNorm in training "
                "mode, where they cannot: use the module it was made of, or freeze its statistics "
                "with .eval() before it is scripted or traced, or give micro_batch >= the batch "
                "size"
            )


def _normalises_in_script(module: ScriptModule) -> bool:
    """Return whether a scripted or traced module has a batch norm that uses its batch's rows."""
    graph = getattr(module, "inlined_graph", None)  # none where it has no forward
    nodes = [] if graph is None else [n for name in SCRIPTED for n in graph.findAllNodes(name)]
    for flag in (list(node.inputs())[5] for node in nodes):
        constant = flag.node().kind() == "prim::Constant"
        if flag.toIValue() if constant else any(map(in_training, module.modules())):
            return True
    return False


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
