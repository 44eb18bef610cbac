"""Paged parameters, as the forecast, the plan and the meter of a step count them.

Inside `anybatch.offload_states` with a model, parameters and gradients share a number of bytes,
however many they are. So a step is counted without them, and that limit is added to it.

    parameters, gradients from when they are added     in the limit
    a new gradient until it is added, and all else     counted

Source: Hayakawa and Narihira, Out-of-core training, section 3: all variables are scheduled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anybatch.core import optimizers
from anybatch.core.hooks import service
from anybatch.memory.meter import Meter
from anybatch.memory.pager import key_of

OWNER = "paged parameters"
"""Owner of the limit, in a ledger: parameters and gradients, and a part of an update's state."""

PAGES = "pages"
"""The attribute of a mode that prefetches parameters for kernels: where parameters are."""


class BoundedMemory(Protocol):
    """A bounded memory for parameters and gradients.

    Attributes:
        limit: bytes that may be here.
        most: the most bytes that were here at a time.
    """

    limit: int
    most: int

    @property
    def here(self) -> int:
        """Bytes that are here now."""

    def has(self, key: int) -> bool:
        """Return whether a storage is in it, resident or offloaded."""

    def use(self, accesses: list[tuple[int, bool]], name: str) -> None:
        """Make storages be here.

        Args:
            accesses: their keys, and whether they are written to.
            name: of the kernel that needs them.
        """


@dataclass(frozen=True)
class Paged:
    """Every bounded memory that is in use in this thread.

    Attributes:
        every: they are few: one for each model.
    """

    every: tuple[BoundedMemory, ...]

    @property
    def limit(self) -> int:
        """Bytes that may be here."""
        return sum(pages.limit for pages in self.every)

    @property
    def here(self) -> int:
        """Bytes that are here now."""
        return sum(pages.here for pages in self.every)

    @property
    def most(self) -> int:
        """No fewer bytes than were here at any time."""
        return sum(pages.most for pages in self.every)

    def holds(self, tensor: Tensor) -> bool:
        """Say whether a tensor is paged."""
        if not self.every or tensor.layout is not torch.strided:
            return False
        with torch._C.DisableTorchFunction():  # nobody asks for its address here
            key = key_of(tensor)
        return key is not None and any(pages.has(key) for pages in self.every)

    @contextmanager
    def here_for(self, tensor: Tensor | None) -> Iterator[None]:
        """Have the memory of a tensor here at the beginning of the body, if it comes and goes.

        A read of its address there is no use of it, and does not make it resident.
        """
        if tensor is None or not self.holds(tensor):
            yield
            return
        with torch._C.DisableTorchFunction():
            key = key_of(tensor)
            assert key is not None
            for pages in self.every:
                pages.use([(key, False)], "a look at it")
            yield

    def ids(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the ids of the tensors that are paged."""
        return frozenset(id(t) for t in tensors if self.holds(t)) if self.every else frozenset()


def paged() -> Paged:
    """Return the bounded memories in use in this thread now."""
    found = (getattr(mode, PAGES, None) for mode in _get_current_dispatch_mode_stack())
    return Paged(tuple(pages for pages in found if pages is not None))


def large(tensor: Tensor) -> bool:
    """Return whether a tensor would be paged if it were a parameter: small ones are not."""
    if tensor.layout is not torch.strided:
        return False
    with torch._C.DisableTorchFunction():
        return bool(tensor.untyped_storage().nbytes() >= optimizers.SMALL)


@contextmanager
def uncounted(meter: Meter, leaves: Iterable[Tensor], ids: frozenset[int]) -> Iterator[None]:
    """Count a gradient in the body until it has been added, and then no more.

    Args:
        meter: counts.
        leaves: tensors that receive gradients, real or fake.
        ids: of those of them whose memory comes and goes.
    """

    @service
    def added(leaf: Tensor) -> None:
        if leaf.grad is not None and large(leaf.grad):
            meter.exclude([leaf.grad])

    chosen: list[Any] = [leaf for leaf in leaves if id(leaf) in ids and leaf.requires_grad]
    handles = [leaf.register_post_accumulate_grad_hook(added) for leaf in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
