"""Expandable CUDA segments: memory made of pages, so that offloaded tensors fit on return.

torch's allocator allocates segments and splits them. If tensors are offloaded and return all the
time, the free parts of many segments are enough bytes and yet in no one piece: in simulation best
fit loses a half of the held bytes, and pages a few hundredths
(`benchmarks.simulators.fragmentation`). The paper has pages of its own for that, by virtual
addresses; torch has them since 2.1, switched off:

    PYTORCH_ALLOC_CONF=expandable_segments:True

It holds for the whole process, and only for memory that is allocated afterwards. So a library must
not switch it on silently; a plan states it. The command, which begins its own process, switches it
on, unless the user has set it or memory has been allocated already.

Source: Hayakawa and Narihira, section 4; torch, "Optimizing memory usage".
"""

from __future__ import annotations

import os
from typing import Protocol

import torch

from anybatch.core import accelerator

SETTING = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a user sets it; the first one that is set counts."""


class Segments(Protocol):
    """Protocol of the memory segments of a device."""

    def in_words(self) -> str:
        """Return the plan's words on the segments; empty where there is nothing to report."""

    def ask(self) -> str:
        """Request pages from now on, where permitted, and return the resulting state in words."""


def segments_of(device: torch.device) -> Segments:
    """Return the memory segments of a device.

    Args:
        device: of CUDA; any other has nothing to ask for.

    Returns:
        An object with ``ask()``, which requests expandable segments for this process, unless a
        person has set them or it is too late, and returns the resulting state in words; and with
        ``in_words()``, the words that a plan has on it.
    """
    return (
        CudaSegments(device)
        if accelerator.of(device).has("get_allocator_backend")
        else HostSegments()
    )


class HostSegments:
    """The null object: the host's memory is always made of pages."""

    def in_words(self) -> str:
        """Return nothing."""
        return ""

    def ask(self) -> str:
        """Do nothing."""
        return ""


class CudaSegments:
    """torch's allocator for a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._there = device, accelerator.of(device)

    def in_words(self) -> str:
        """Return how it is, and how to change it."""
        if self._there.allocator != "native":
            return ""
        if SETTING in _settings():
            return "CUDA memory is in expandable segments: fragments cost little"
        return (
            "CUDA memory is in segments of fixed size, and what is free in them may be in too "
            f"small parts: {VARIABLES[0]}={SETTING} in the environment makes them expandable"
        )

    def ask(self) -> str:
        """Request pages, unless there is a setting or it is too late."""
        settings, backend = _settings(), self._there.allocator
        if backend != "native":
            return f"CUDA segments: none, the allocator is {backend}"
        if "expandable_segments" in settings:
            return f"CUDA segments: as was set ({settings})"
        if self._there.reserved(self._device):
            return "CUDA segments: fixed (memory was taken before they could be made expandable)"
        chosen = f"{settings},{SETTING}" if settings else SETTING  # it replaces all that was set
        torch._C._accelerator_setAllocatorSettings(chosen)
        return "CUDA segments: expandable (offloaded and prefetched tensors leave no gaps)"


def _settings() -> str:
    """Return the allocator's settings: from torch, or in older versions from the environment."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return str(ask())
    return next((found for name in VARIABLES if (found := os.environ.get(name))), "")
