from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.execution.streaming import (
    MicroBatch,
    Step,
    TensorBatch,
    cut,
    in_pieces,
    memory_is_too_small,
)

NOT_USED: Any = None
HERE: Any = SimpleNamespace(send=lambda micro: micro, receive=lambda micro: micro)
NO_BUFFERS: Any = SimpleNamespace(statistics=lambda: None, go_back=lambda _: None)


def step(size: int = 10, micro_batch: int = 4) -> Step:
    return Step(
        model=nn.Identity(),
        loss=NOT_USED,
        batch=TensorBatch(torch.arange(size), None, size),
        micro_batch=micro_batch,
        link=HERE,
        buffers=NO_BUFFERS,
        gradients=None,
    )


@dataclass
class Work:
    """Notes the first row and the size of what it is given; fails at the sizes or calls named."""

    calls: tuple[int, ...] = ()
    above: int = 10**9
    error: Exception = field(default_factory=MemoryError)
    ran: list[tuple[int, int]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    def __call__(self, micro: MicroBatch) -> None:
        self.ran.append((int(micro.inputs[0]), micro.size))
        if len(self.ran) - 1 in self.calls or micro.size > self.above:
            raise self.error
        self.done += micro.inputs.tolist()


def run(over: Step, work: Work) -> None:
    for micro in over.feed():
        in_pieces(over, micro, work)


def test_without_a_fault_everything_is_done_once() -> None:
    over, work = step(), Work()
    run(over, work)
    assert work.ran == [(0, 4), (4, 4), (8, 2)]
    assert (over.retries, over.limit) == (0, 4)


def test_a_micro_batch_is_done_again_in_halves_and_the_rest_too() -> None:
    over, work = step(), Work(calls=(1,))
    run(over, work)
    assert work.ran == [(0, 4), (4, 4), (4, 2), (6, 2), (8, 2)]
    assert work.done == list(range(10))
    assert (over.retries, over.attempts.failed, over.limit) == (1, 4, 2)


def test_halves_of_halves() -> None:
    over, work = step(11, 5), Work(above=1)
    run(over, work)
    assert work.ran[:4] == [(0, 5), (0, 3), (0, 2), (0, 1)]
    assert work.done == list(range(11))
    assert (over.retries, over.attempts.failed, over.limit) == (3, 2, 1)


def test_a_ragged_rest_that_fails_costs_the_size_one_half_only() -> None:
    """A last micro-batch of 2 is cut in two; the size of the next step is not 1 for that."""
    over, work = step(66, 64), Work(calls=(1,))
    run(over, work)
    assert work.ran == [(0, 64), (64, 2), (64, 1), (65, 1)]
    assert over.limit == 32


def test_a_single_sample_is_tried_again_as_long_as_the_size_may_shrink() -> None:
    over, work = step(5, 4), Work(calls=(1, 2))
    run(over, work)
    assert work.ran == [(0, 4), (4, 1), (4, 1), (4, 1)]
    over, work = step(5, 4), Work(calls=(1, 2, 3))
    with pytest.raises(MemoryError):
        run(over, work)


def test_other_errors_go_out_at_once() -> None:
    over, work = step(), Work(calls=(1,), error=ValueError("a fault"))
    with pytest.raises(ValueError, match="a fault"):
        run(over, work)
    assert len(work.ran) == 2
    assert over.retries == 0


@pytest.mark.parametrize("phase", ["backward", "summed", "shown"])
def test_what_cannot_be_undone_goes_out(phase: Any) -> None:
    over = step()

    def work(_: MicroBatch) -> None:
        over.phase = phase
        raise MemoryError

    with pytest.raises(MemoryError):
        run(over, work)
    assert over.retries == 0


def test_sizes_that_were_decided_before() -> None:
    over, work = step(), Work()
    full = MicroBatch(torch.arange(10), torch.arange(10), 10)
    over.limit = 3
    in_pieces(over, full, work, [2, 5, 1])
    assert work.ran == [(0, 2), (2, 3), (5, 2), (7, 1)]


def test_parts_are_views_of_everything_that_has_rows() -> None:
    x = torch.arange(10)
    named = MicroBatch({"x": x, "names": [str(i) for i in range(10)], "k": 3}, x, 10)
    first, second = cut(named, [4, 6])
    assert second.inputs["x"].data_ptr() == x[4:].data_ptr()
    assert second.inputs["names"] == ["4", "5", "6", "7", "8", "9"]
    assert (first.size, first.inputs["k"], first.targets.tolist()) == (4, 3, [0, 1, 2, 3])


def test_memory_halves_the_size_of_the_next_attempt() -> None:
    over = step()
    assert memory_is_too_small(over, torch.OutOfMemoryError(), None)
    over.shrink(MemoryError())
    assert (over.attempts.limit, over.attempts.failed, over.retries) == (2, 4, 1)


def test_a_step_of_fewer_samples_than_a_micro_batch_is_halved_itself() -> None:
    over = step()
    over.micro_batch = over.limit = 64
    over.shrink(MemoryError())
    assert over.attempts.limit == 5


def test_a_single_sample_or_what_was_shown_is_not_tried_smaller() -> None:
    over = step()
    over.phase = "fired"
    assert not memory_is_too_small(over, MemoryError(), None)
    over.phase, over.limit = "forward", 1
    assert not memory_is_too_small(over, MemoryError(), None)


def test_another_error_after_memory_ran_out_has_it_as_its_cause() -> None:
    over, first, fault = step(), MemoryError(), ValueError("a fault")
    assert not memory_is_too_small(over, fault, None)
    over.attempts.explain(fault)
    assert fault.__cause__ is None
    over.shrink(first)
    over.attempts.explain(fault)
    assert fault.__cause__ is first
    over.attempts.explain(first)
    assert first.__cause__ is None
