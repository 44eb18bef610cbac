from __future__ import annotations

import _thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.core.made_up import modules

from anybatch.execution.prefetch import HostLink, MicroBatch, Shipment, StreamLink, feed, link_to

__all__ = ["modules"]


class RecordingLink:
    """A link that writes down what is asked of it, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def send(self, micro_batch: MicroBatch) -> Shipment:
        self.log.append(f"send {micro_batch.targets}")
        return Shipment(micro_batch)

    def receive(self, shipment: Shipment) -> MicroBatch:
        self.log.append(f"receive {shipment.micro_batch.targets}")
        return shipment.micro_batch


def micro(i: int) -> MicroBatch:
    return MicroBatch(torch.zeros(1), i, 1)


def test_one_micro_batch_is_on_its_way_while_another_is_computed() -> None:
    link = RecordingLink()
    for part in feed(map(micro, range(3)), link):
        link.log.append(f"compute {part.targets}")
    assert link.log == [
        "send 0",
        "send 1",
        "receive 0",
        "compute 0",
        "send 2",
        "receive 1",
        "compute 1",
        "receive 2",
        "compute 2",
    ]


def test_none_is_on_its_way_where_each_is_made_by_who_computes_it() -> None:
    link = RecordingLink()
    for part in feed(map(micro, range(2)), link, ahead=False):
        link.log.append(f"compute {part.targets}")
    assert link.log == [
        *("send 0", "receive 0", "compute 0"),
        *("send 1", "receive 1", "compute 1"),
    ]


def test_a_single_micro_batch_and_none_are_fed() -> None:
    assert [part.targets for part in feed([micro(7)], RecordingLink())] == [7]
    assert list(feed([], RecordingLink())) == []


def test_on_the_host_nothing_is_copied() -> None:
    x = torch.arange(6.0).view(6, 1)
    link = link_to(torch.device("cpu"))
    assert isinstance(link, HostLink)
    parts = list(feed([MicroBatch({"x": part}, None, len(part)) for part in x.split(4)], link))
    assert [part.inputs["x"].data_ptr() for part in parts] == [x.data_ptr(), x[4:].data_ptr()]


class Interrupting:
    """Is freed with Ctrl-C pressed: the handler runs at the next line of Python."""

    __del__ = staticmethod(_thread.interrupt_main)


def test_an_interrupt_while_an_unfinished_loop_is_freed_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python would print it and go on, in a generator that has something to do at its end."""
    monkeypatch.setattr(HostLink, "settle", lambda _link: None, raising=False)
    fed = feed(map(micro, range(3)), link_to(torch.device("cpu")))
    next(fed)
    freed: list[Any] = [fed, Interrupting()]  # from the end on
    del fed
    with pytest.raises(KeyboardInterrupt):
        del freed
        sum(range(10))


def test_copies_overlap_kernels_where_there_are_streams(
    modules: dict[str, SimpleNamespace],
) -> None:
    del modules
    links = {
        device_type: type(link_to(torch.device(device_type)))
        for device_type in ("cpu", "xpu", "mps", "hpu")
    }
    assert links == {"cpu": HostLink, "xpu": StreamLink, "mps": HostLink, "hpu": HostLink}
