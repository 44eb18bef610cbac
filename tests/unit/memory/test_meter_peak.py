"""The peak that an allocator tells, and whose statistic it is: over a made-up allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anybatch import Engine
from anybatch.memory.meter import read_peak


class Allocator:
    """Bytes that are allocated, the most that ever were, and how often that began anew."""

    def __init__(self, now: int, most: int) -> None:
        self.now, self.most, self.resets = now, most, 0

    def take(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)

    def reset(self, _: object = None) -> None:
        self.most, self.resets = self.now, self.resets + 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator(100, 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: found.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: found.most)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    return found


@pytest.mark.parametrize(
    ("before", "anew", "reported", "resets"),
    [
        (100, False, 130, 0),  # nothing above what is allocated was in it
        (120, False, 130, 0),  # it grows
        (130, False, None, 0),  # this peak, or an earlier one
        (900, False, None, 0),
        (100, True, 130, 0),
        (120, True, 130, 1),
        (900, True, 130, 1),
    ],
)
def test_a_peak_is_reported_where_the_statistic_tells_it(
    made: Allocator, before: int, anew: bool, reported: int | None, resets: int
) -> None:
    made.most = before
    peak = read_peak(torch.device("cuda"), anew=anew)
    made.take(30)
    made.take(-30)
    assert (peak(), made.resets) == (reported, resets)
    if not resets:
        assert made.most == max(before, 130)  # the person's is what it would be without


def test_elsewhere_nothing_is_queried(made: Allocator) -> None:
    peak = read_peak(torch.device("cpu"), anew=True)
    made.take(30)
    assert peak() is None
    assert made.resets == 0


def test_a_step_reads_its_own_device_and_resets_nothing(
    made: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[torch.device] = []
    real = read_peak

    def read(device: torch.device) -> object:
        requested.append(device)
        return real(torch.device("cuda:1"))

    monkeypatch.setattr("anybatch.engine.measurement.read_peak", read)
    model, peaks, sizes = nn.Linear(3, 2), list[int | None](), [50, 50, 90, 20]

    def forward(*_: object) -> None:
        made.take(sizes[0])
        made.take(-sizes.pop(0))

    model.register_forward_hook(forward)
    trained = Engine(model, nn.functional.cross_entropy, micro_batch=4)
    for _ in range(4):
        trained.backward(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
        assert trained.last is not None
        peaks.append(trained.last.peak_bytes)
    assert peaks == [150, None, 190, None]
    assert requested == [torch.device("cpu")] * 4
    assert made.resets == 0
