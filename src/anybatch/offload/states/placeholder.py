"""Offloaded tensor of an optimizer's state, its stand-in, and the errors where it is missing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybatch.memory.copier import Job
from anybatch.memory.stores import store_errors as errors_of

WRITTEN = (
    "an optimizer's state must not be written to while it is offloaded, and the placeholder of a "
    "part of it was: the write is lost. Write between back() and a new offload_states(), or "
    "replace the tensor by another"
)
STORE_CLOSED = (
    "an optimizer's state must be resident or in its store, and the store was closed: load a "
    "state with optimizer.load_state_dict(), or call back() instead of close() to keep it"
)

State = dict[Any, Any]
"""An optimizer's state of one parameter: name -> tensor or number."""


class Placeholder:
    """Offloaded tensor, or one on its way, and the meta tensor in its place.

    Attributes:
        state: where it stands.
        name: under this name.
        key: its name in the store.
        size: bytes.
        stand_in: a tensor of the same shape on the meta device.
        tensor: it, while it is written or read; else None.
        version: its count of writes when its eviction began.
        job: that copy.
    """

    __slots__ = ("device", "job", "key", "name", "size", "stand_in", "state", "tensor", "version")

    def __init__(self, state: State, name: Any, key: int, stride: tuple[int, ...]) -> None:
        tensor: Tensor = state[name]
        self.state, self.name, self.key = state, name, key
        self.size, self.device, self.version = tensor.nbytes, tensor.device, tensor._version
        self.stand_in = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
        self.tensor: Tensor | None = tensor
        self.job: Job | None = None

    def empty(self) -> Tensor:
        """Return an empty tensor like it, made by a kernel that dispatch modes can count."""
        like = self.stand_in
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)


STATE = "an optimizer's state"
state_errors = partial(errors_of, of=STATE, then="state that was not stored is still in memory")
"""Explain an error of the system for an optimizer's state."""


def compact(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy where its storage holds more than it."""
    exact = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.storage_offset() == 0
    return tensor if exact else tensor.clone()
