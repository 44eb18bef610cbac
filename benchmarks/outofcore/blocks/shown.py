"""Values of hooks in a torch that does not show them: each saved tensor is asked for once.

`anybatch.offload` reads recipes from ``SavedTensor.data``, which the torch of a machine may be too
old to have. Then its value of a saved tensor is what the hook gets that unpacks it. Only steps
without other hooks may be run so: those of a checkpoint would compute it again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anybatch.offloading import recompute, saved_tensors


@contextmanager
def shown() -> Iterator[None]:
    """Read recipes in the body from the values that the hooks of `anybatch.offload` get."""
    hooks, substitute = saved_tensors.StepHooks, recompute._substitute
    unpack = hooks.unpack
    seen: list[Any] = []
    asking = False

    def unpacked(self: saved_tensors.StepHooks, packed: Any) -> Tensor:
        if not asking:
            return unpack(self, packed)
        seen.append(packed)
        return torch.empty(0)

    def value(node: Any, name: str) -> Any:
        nonlocal asking
        if not hasattr(node, f"_raw_saved_{name}"):
            return None
        seen.clear()
        asking = True
        try:
            found = getattr(node, f"_saved_{name}")
        finally:
            asking = False
        if seen:
            return seen.pop()
        return recompute.Number(found) if isinstance(found, Tensor) and not found.dim() else None

    hooks.unpack = unpacked  # type: ignore[method-assign]
    recompute._substitute = value
    try:
        yield
    finally:
        hooks.unpack = unpack  # type: ignore[method-assign]
        recompute._substitute = substitute
