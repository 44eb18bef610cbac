"""Micro-batches on their way to the device, one ahead of the one being computed (MBS, Fig. 1).

``tensor.to(device, non_blocking=True)`` overlaps nothing unless the source is pinned and another
stream does the copy. `StreamLink` copies each micro-batch into one of two pinned buffers, sends it
on a stream of its own, and lets the computing stream wait for just that copy. `HostLink` is its
null object: the same calls, and a plain copy where a tensor is elsewhere, as on a device that has
no streams. The streaming code knows neither.

    copy stream      mu_0   mu_1   mu_2   mu_3
    compute stream          mu_0   mu_1   mu_2   mu_3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from anybatch.core import accelerator, pytree
from anybatch.core.accelerator import Accelerator, of
from anybatch.core.batch import MicroBatch, TensorBatch

T = TypeVar("T")


@dataclass(frozen=True)
class Shipment:
    """Micro-batch in transfer: its tensors on the device, and the event to wait for."""

    micro_batch: MicroBatch
    copied: Any = None
    borrowed: bool = False


def feed(
    micro_batches: Iterable[MicroBatch], link: DeviceLink, *, ahead: bool = True
) -> Iterator[MicroBatch]:
    """Yield each micro-batch on the device while the next one is already on its way.

    Args:
        micro_batches: on the host or on the device.
        link: the way to the device.
        ahead: send the next one before this one is computed. Default True. Not with offloading of
            new tensors at once: a lane must make its own tensors, and their eviction waits only for
            the computing stream.
    """
    if type(link) is HostLink:  # nothing is to be waited for, so no shipments are made
        placed = map(link.place, micro_batches)
        return _one_behind(placed) if ahead else placed
    sent = map(link.send, micro_batches)
    fed = map(link.receive, _one_behind(sent) if ahead else sent)
    return _settled(fed, link) if isinstance(link, StreamLink) else fed


def _one_behind(every: Iterable[T]) -> Iterator[T]:
    """Yield each element after the next one has been made."""
    waiting: list[T] = []
    for coming in every:
        waiting.append(coming)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _settled(fed: Iterator[MicroBatch], link: StreamLink) -> Iterator[MicroBatch]:
    # Not on the host, where nothing is to be done: an interrupt in here, while the generator of an
    # unfinished loop is freed, would be lost
    # (test_an_interrupt_while_an_unfinished_loop_is_freed_is_not_lost).
    try:
        for micro_batch in fed:  # noqa: UP028, it would free what is on its way before `settle`
            yield micro_batch
    finally:
        link.settle()


def link_to(device: torch.device) -> DeviceLink:
    """Return the link to `device`."""
    there = accelerator.of(device)
    fast = there.streams and there.facts.pins
    return StreamLink(device, there) if fast else HostLink(device)


class HostLink:
    """The null object: on the CPU a micro-batch is already where it is needed.

    Args:
        device: the host, or one whose copies run in the stream of its kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, micro_batch: MicroBatch) -> Shipment:
        """Return the micro-batch; leaves on other devices are moved."""
        return Shipment(self.place(micro_batch))

    def place(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch; leaves on other devices are moved."""
        device, inputs, targets = self.device, micro_batch.inputs, micro_batch.targets
        if type(inputs) is type(targets) is Tensor and inputs.device == targets.device == device:
            return micro_batch
        for tensor in pytree.flat((inputs, targets)):
            if tensor.device != device:
                return micro_batch.map(lambda tensor: tensor.to(device))
        return micro_batch

    def holds(self, batch: Any) -> bool:
        """Say whether a batch is two tensors that are on the device already."""
        if type(batch) is not TensorBatch or not batch.bare:
            return False
        return bool(batch.inputs.device == batch.targets.device == self.device)

    def receive(self, shipment: Shipment) -> MicroBatch:
        """Return it as it is."""
        return shipment.micro_batch


class StreamLink:
    """Two sets of pinned buffers, a copy stream, and an event for each copy.

    The target of a copy is allocated on the computing stream, and the copy waits for the work
    launched before it. So the next inputs reuse the memory of those of the micro-batch before the
    last one, however far the host runs ahead; with `Tensor.record_stream` each would be held until
    the device has reached its end, and they would exceed the budget.
    """

    def __init__(self, device: torch.device, there: Accelerator) -> None:
        self.device, self._there = device, there
        self.stream = there.stream(device)
        self._buffers: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        self._copied: list[Any] = [None, None]
        self._slot = 0

    def send(self, micro_batch: MicroBatch) -> Shipment:
        """Copy on the copy stream, through the two sets of pinned buffers in alternation."""
        slot, self._slot = self._slot, 1 - self._slot
        before = self._copied[slot]
        if before is not None:
            before.synchronize()  # what these buffers held has left them
        copies: list[tuple[Tensor, Tensor]] = []
        sent = micro_batch.map(partial(self._place, copies, self._buffers[slot]))
        computed = self._there.current_stream(self.device).record_event()
        with self._there.on(self.stream):
            self.stream.wait_event(computed)  # who had this memory before may still read it
            for there, here in copies:
                there.copy_(here, non_blocking=True)
            copied = self._there.event()
            copied.record(self.stream)
        self._copied[slot] = copied
        borrowed = any(
            of(tensor.device).host and tensor.is_pinned()
            for _, tensor in pytree.tensors((micro_batch.inputs, micro_batch.targets))
        )
        return Shipment(sent, copied, borrowed)

    def receive(self, shipment: Shipment) -> MicroBatch:
        """Let the computing stream wait for the copy."""
        self._there.current_stream(self.device).wait_event(shipment.copied)
        if shipment.borrowed:  # the caller may write to its own pinned memory after the step
            shipment.copied.synchronize()
        return shipment.micro_batch

    def settle(self) -> None:
        """Make the computing stream wait for all copies, so that their targets may be freed."""
        self._there.current_stream(self.device).wait_stream(self.stream)

    def _place(
        self, copies: list[tuple[Tensor, Tensor]], buffers: dict[int, Tensor], tensor: Tensor
    ) -> Tensor:
        """Return a tensor's place on the device, with its strides; record the copy into it."""
        plain = of(tensor.device).host and type(tensor) is Tensor and not tensor.requires_grad
        if not plain or tensor.dim() == 0:
            return tensor.to(self.device)
        place = torch.empty_like(tensor, device=self.device)
        here = tensor if tensor.is_pinned() else _staged(tensor, place, buffers, len(copies))
        copies.append((place, here))
        return place


DeviceLink = HostLink | StreamLink
"""How a micro-batch reaches the device."""


def _staged(tensor: Tensor, place: Tensor, buffers: dict[int, Tensor], leaf: int) -> Tensor:
    """Return a copy in pinned memory, with the strides of where it goes: it is one run of bytes."""
    buffer = buffers.get(leaf)
    if buffer is None or buffer.dtype != tensor.dtype or buffer.numel() < tensor.numel():
        buffer = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        buffers[leaf] = buffer
    pinned = buffer.as_strided(place.shape, place.stride())
    pinned.copy_(tensor)
    return pinned
