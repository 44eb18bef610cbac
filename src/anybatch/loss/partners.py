"""Detection of a loss in which each sample is to find its partner in the full batch.

InfoNCE is written as a cross-entropy of N x N similarities whose right classes are 0, 1 ... N - 1;
CLIP takes it of both directions. Then `anybatch.contrastive` says the same in memory that grows
with the batch, not with its square.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anybatch.core.batch import TensorBatch
from anybatch.core.functions import keywords
from anybatch.core.modules import call_model


class Partners(TorchFunctionMode):
    """Counts the cross-entropies in which sample i is to find the i-th of all.

    Args:
        size: N, samples in the batch.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.directions = 0
        self._size = size

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count a cross-entropy, and run every function."""
        kwargs = keywords(func, kwargs)
        if func is F.cross_entropy:
            arguments = dict(zip(("input", "target"), args, strict=False)) | kwargs
            self.directions += self._pairs(arguments.get("input"), arguments.get("target"))
        return func(*args, **kwargs)

    def _pairs(self, scores: Any, target: Any) -> bool:
        if not (isinstance(scores, Tensor) and isinstance(target, Tensor)):
            return False
        if scores.shape != (self._size, self._size) or target.shape != (self._size,):
            return False
        return bool((target == torch.arange(self._size, device=target.device)).all())


def directions(model: nn.Module, loss_fn: Any, batch: TensorBatch) -> int:
    """Return the number of directions in which partners are searched, 0 for no search."""
    partners = Partners(batch.size)
    with torch.no_grad():
        outputs = call_model(model, batch.inputs)
        with partners:
            _ = loss_fn(outputs) if batch.targets is None else loss_fn(outputs, batch.targets)
    return partners.directions
