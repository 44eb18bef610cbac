from __future__ import annotations

import threading

import pytest
import torch

from anybatch.copier import Copier

CPU = torch.device("cpu")


def test_jobs_are_done_in_order_in_another_thread_that_ends() -> None:
    before, done = threading.active_count(), []
    copier = Copier(CPU)
    assert threading.active_count() == before
    jobs = [
        copier.start(lambda number=number: done.append((number, threading.get_ident())))  # type: ignore[misc]
        for number in range(20)
    ]
    copier.wait(jobs[-1])
    assert [number for number, _ in done] == list(range(20))
    assert threading.get_ident() not in {thread for _, thread in done}
    assert all(job.done for job in jobs)
    copier.close()
    assert threading.active_count() == before
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


def test_a_thread_that_does_not_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copier = Copier(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start"):
            copier.start(lambda: None)
    copier.close()
