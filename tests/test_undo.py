from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from tests.oracle import same, snapshot
from torch import nn

from anybatch import NotExactError
from anybatch.modules import walk
from anybatch.undo import Before, no_optimizer_step, note_buffers, uninterrupted, whole_or_nothing


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_buffers_come_back_as_the_tensors_they_were() -> None:
    norm = nn.BatchNorm1d(3)
    (mean, *_) = states = note_buffers(walk(norm))
    assert [state.path for state in states] == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    old = norm.running_mean
    assert not mean.written()
    assert not mean.moved()
    norm.running_mean = torch.ones(3)
    assert mean.written()
    assert mean.moved()
    mean.put_back()
    assert norm.running_mean is old


def test_batch_norm_moves_statistics_without_a_version_and_is_seen_all_the_same() -> None:
    norm = nn.BatchNorm1d(3)
    mean = note_buffers(walk(norm))[0]
    norm(torch.randn(8, 3))
    assert not mean.written(), "if this fails torch counts the write now: written() suffices"
    assert mean.moved()
    mean.put_back()
    assert not mean.moved()


def test_failure_puts_back_what_was_noted() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.grad = torch.ones(3, 3)
    before, note = snapshot(model), Before(walk(model), model.parameters())
    with pytest.raises(ZeroDivisionError), whole_or_nothing(note, lambda: None):
        model[0].weight.grad = None
        model(torch.randn(4, 3)).sum().backward()
        torch.set_grad_enabled(False)
        raise ZeroDivisionError
    assert same(before, snapshot(model))


@pytest.mark.usefixtures("_ctrl_c")
def test_an_interrupt_during_delivery_comes_after_it() -> None:
    model = nn.Linear(2, 2)
    delivered: list[str] = []

    def deliver() -> None:
        signal.raise_signal(signal.SIGINT)
        delivered.append("all of it")
        model.weight.grad = torch.ones(2, 2)

    with (
        pytest.raises(KeyboardInterrupt),
        whole_or_nothing(Before(walk(model), model.parameters()), deliver),
    ):
        pass
    assert delivered == ["all of it"]
    assert model.weight.grad is not None, "what was delivered is not undone"


@pytest.mark.usefixtures("_ctrl_c")
def test_a_held_interrupt_is_let_through_once_and_the_handler_is_back() -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_handlers_are_left_alone() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with uninterrupted():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []


def test_an_ignored_signal_stays_ignored() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


def test_an_optimizer_may_step_again_when_the_step_is_over() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = Before(walk(model), model.parameters())
    with no_optimizer_step(before), pytest.raises(NotExactError, match="SGD"):
        optimizer.step()
    optimizer.step()
    with no_optimizer_step(before):
        before.open = False
        optimizer.step()
