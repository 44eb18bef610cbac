from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anybatch import tree
from anybatch.accelerator import of
from anybatch.batch import MicroBatch, TensorBatch
from anybatch.device import HostLink, Shipment, StreamLink, feed, link_to


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


def test_a_single_micro_batch_and_none_are_fed() -> None:
    assert [part.targets for part in feed([micro(7)], RecordingLink())] == [7]
    assert list(feed([], RecordingLink())) == []


def test_on_the_host_nothing_is_copied() -> None:
    x = torch.arange(6.0).view(6, 1)
    link = link_to(torch.device("cpu"))
    assert isinstance(link, HostLink)
    parts = list(feed(TensorBatch.of({"x": x}, None).micro_batches(4), link))
    assert [part.inputs["x"].data_ptr() for part in parts] == [x.data_ptr(), x[4:].data_ptr()]


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log, self.name = log, f"event {sum('record' in line for line in log)}"

    def record(self, _: object) -> None:
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"synchronize {self.name}")


class FakeStream:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"wait {event.name}")


def test_the_cuda_link_waits_for_just_the_right_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real class over null objects for streams, events and pinned memory."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream(log))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream(log))
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, pin_memory: empty(n, dtype=dtype))
    host = torch.device("cpu")
    link = StreamLink(host, of("cuda"))
    x, y = torch.randn(7, 3), torch.arange(7)
    copies = []
    for part in feed(TensorBatch.of([x], y).micro_batches(3), link):
        log.append(f"compute {part.size}")
        copies.append([t.clone() for _, t in tree.tensors((part.inputs, part.targets))])
    assert log == [
        "record event 0",
        "record event 1",
        "wait event 0",
        "compute 3",
        "synchronize event 0",
        "record event 2",
        "wait event 1",
        "compute 3",
        "wait event 2",
        "compute 1",
    ]
