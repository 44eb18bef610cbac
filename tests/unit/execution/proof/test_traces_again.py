"""Traces of an earlier comparison stand for a forward only where the others are as these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.execution.proof.congruent import CallTrace, Comparison

ROWS = torch.randn(4, 6), 4


class Net(nn.Module):
    """A network whose body a test exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.double_at, self.relu = 0, False

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        h = h.relu() if self.relu else h.tanh()
        return h * 2 if len(h) == self.double_at else h


def compared(net: Net, sizes: list[int], traces: dict[int, CallTrace]) -> tuple[list[int], str]:
    """Return the sizes that were traced, and where samples meet."""
    ran: list[int] = []

    def run(model: nn.Module, inputs: Any, size: int) -> Any:
        ran.append(size)
        return model(inputs)

    found = Comparison(net, ROWS, run, trains=True, traces=traces)(sizes)
    assert not found.doubts
    return ran, found.meets


def test_only_new_sizes_are_traced_and_a_different_one_is_found() -> None:
    net, traces = Net(), dict[int, CallTrace]()
    assert compared(net, [16, 5, 4], traces) == ([16, 5, 4], "")
    assert compared(net, [16, 7, 4], traces) == ([7], "")
    assert compared(net, [16, 4], traces) == ([], "")
    net.double_at = 6
    ran, meets = compared(net, [16, 6, 4], traces)
    assert ran == [6, 16, 6, 4], "the full batch is traced again before anything is refused"
    assert "calls mul for 6 samples and not for 16" in meets
    assert not traces, "and what was found before holds no longer"


@pytest.mark.parametrize("change", ["relu", "inputs"])
def test_a_model_that_has_changed_is_traced_again_and_not_refused(change: str) -> None:
    net, traces = Net(), dict[int, CallTrace]()
    assert compared(net, [16, 5, 4], traces) == ([16, 5, 4], "")
    if change == "relu":
        net.relu = True
    else:
        net.first = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    assert compared(net, [16, 7, 4], traces) == ([7, 16, 7, 4], "")
    assert compared(net, [16, 9, 4], traces) == ([9], "")


def test_a_call_that_comes_before_is_not_in_these_traces() -> None:
    net, traces = Net(), dict[int, CallTrace]()
    compared(net, [16, 5, 4], traces)
    before = dict(traces)
    ran: list[int] = []

    def run(model: nn.Module, inputs: Any, size: int) -> Any:
        ran.append(size)
        return model(inputs)

    Comparison(net, ROWS, run, trains=True, traces=traces)([16, 5], earlier=0)
    assert ran == [16, 16, 5, 5]
    assert traces == before


@pytest.mark.parametrize("from_size", [16, 5])
def test_a_full_batch_that_cannot_be_traced_is_tried_once(from_size: int) -> None:
    net, traces = Net(), dict[int, CallTrace]()
    ran: list[int] = []

    def run(model: nn.Module, inputs: Any, size: int) -> Any:
        ran.append(size)
        outputs = model(inputs)
        return outputs[outputs.nonzero()[:, 0]] if size <= from_size else outputs

    def doubts(*sizes: int) -> tuple[str, ...]:
        return Comparison(net, ROWS, run, trains=True, traces=traces)(sizes).doubts

    whole = from_size == 16
    (why,) = doubts(16, 5, 4)
    assert why.startswith("forward of 16 samples could not be traced without data")
    assert ran == ([16] if whole else [16, 5])
    assert doubts(16, 5, 4) == doubts(16, 7, 4) == (why,) if whole else doubts(16, 7, 6) == ()
    assert ran == ([16] if whole else [16, 5, 16, 7, 6])
