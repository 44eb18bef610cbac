"""Bytes of an allocation: the requested bytes, rounded up as a device's allocator does.

torch's allocator for CUDA allocates multiples of 512 bytes, so a gradient of one number takes 512.
A forecast that adds up the bytes of tensors would be too low by as many roundings as there are
tensors; each of them is counted as its allocator counts it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anybatch.core import accelerator
from anybatch.core.absent import type_of
from anybatch.core.modules import local


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
    parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
    return sum(rounded(part.numel() * part.element_size(), part.device) for part in parts)
