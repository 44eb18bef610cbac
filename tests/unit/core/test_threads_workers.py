"""Threads of the pool are used again, and hold nothing of what they have run."""

from __future__ import annotations

import _thread
import contextvars
import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from tests.busy import no_idle
from torch import nn

from anybatch import Engine
from anybatch.core import threads


def test_a_task_runs_in_a_thread_that_waits() -> None:
    ran: list[int] = []
    for _ in range(3):
        threads.start_task(lambda: ran.append(threading.get_ident())).wait()
    assert len(set(ran)) == 1
    assert threading.get_ident() not in ran


def test_tasks_at_the_same_time_have_a_thread_each() -> None:
    ran: list[int] = []
    meet = threading.Barrier(5)

    def work() -> None:
        meet.wait()
        ran.append(threading.get_ident())

    tasks = [threads.start_task(work) for _ in range(5)]
    for task in tasks:
        task.wait()
    assert len(set(ran)) == 5
    assert threads.idle() >= 5


def test_a_task_that_runs_no_model_has_a_small_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    before, sizes = threads.stack_size(), []

    def noted(start: Any) -> Any:
        def started(*args: Any) -> None:
            sizes.append(threads.stack_size())
            start(*args)

        return started

    no_idle(monkeypatch)
    monkeypatch.setattr(threads, "start", noted(threads.start))
    monkeypatch.setattr("_thread.start_new_thread", noted(_thread.start_new_thread))
    for small in (False, True, True, False):
        threads.start_task(lambda: None, small=small).wait()
    assert sizes == [before, threads.SMALL]
    assert threads.stack_size() == before


class Held:
    pass


def test_what_a_task_held_is_gone_when_it_has_ended() -> None:
    held = Held()
    there = weakref.ref(held)
    task = threads.start_task(lambda held=held: None)
    task.wait()
    del task, held
    gc.collect()
    assert there() is None


def test_context_variables_of_a_task_end_with_it() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    found: list[int] = []
    threads.start_task(lambda: [variable.set(1), found.append(variable.get())]).wait()  # type: ignore[arg-type,return-value]
    threads.start_task(lambda: found.append(variable.get())).wait()
    assert found == [1, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_begins_with_threads_of_its_own() -> None:
    threads.start_task(lambda: None).wait()
    child = os.fork()
    if child == 0:
        ran: list[int] = []
        threads.start_task(lambda: ran.append(1)).wait()
        os._exit(0 if ran == [1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_lanes_of_the_next_step_run_in_the_threads_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=2)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    engine.backward(x, y)
    assert threads.idle() >= 4
    started: list[threading.Thread] = []
    monkeypatch.setattr(threads, "start", started.append)
    engine.backward(x, y)
    assert engine.last is not None
    assert engine.last.micro_batches == 4
    assert started == []
