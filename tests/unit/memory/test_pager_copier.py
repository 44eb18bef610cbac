from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.busy import busy, no_idle
from tests.unit.core.made_up import modules

from anybatch.memory.pager import Copier

__all__ = ["modules"]

CPU = torch.device("cpu")


def test_jobs_are_done_in_order_in_another_thread_that_waits_for_others() -> None:
    before, done = busy(), []
    copier = Copier(CPU)
    assert busy() == before
    jobs = [
        copier.start(lambda number=number: done.append((number, threading.get_ident())))  # type: ignore[misc]
        for number in range(20)
    ]
    copier.wait(jobs[-1])
    assert [number for number, _ in done] == list(range(20))
    assert threading.get_ident() not in {thread for _, thread in done}
    assert all(job.done for job in jobs)
    copier.close()
    assert busy() == before
    copier.close()


def test_what_a_job_raises_goes_to_who_waits_for_it_and_the_next_is_done() -> None:
    def fails() -> None:
        raise OSError("no space left")

    copier, done = Copier(CPU), []
    bad = copier.start(fails)
    good = copier.start(lambda: done.append(1))
    copier.wait(good)
    with pytest.raises(OSError, match="no space left"):
        copier.wait(bad)
    assert done == [1]
    copier.close()


def test_closing_waits_for_what_was_started() -> None:
    go, done = threading.Event(), []
    copier = Copier(CPU)
    copier.start(lambda: done.append(go.wait(10)))
    threading.Timer(0.05, go.set).start()
    copier.close()
    assert done == [True]


def test_where_no_thread_starts_a_job_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    copier, done = Copier(CPU), []
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", fails)
        no_idle(patch)
        job = copier.start(lambda: done.append(threading.current_thread()))
        copier.wait(job)
        fault = copier.start(partial(int, "no number"))
        with pytest.raises(ValueError, match="no number"):
            copier.wait(fault)
    copier.wait(copier.start(lambda: done.append(threading.current_thread())))
    assert done[0] is threading.current_thread()
    assert done[1] is not threading.current_thread()
    copier.close()


def test_without_a_stream_a_copy_is_a_job(modules: dict[str, SimpleNamespace]) -> None:
    del modules
    copier, done = Copier(torch.device("mps")), []
    copier.wait(copier.start(lambda: done.append(1)))
    copier.close()
    assert done == [1]
