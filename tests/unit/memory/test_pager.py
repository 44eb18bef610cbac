from __future__ import annotations

import ast
import random
import threading
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.memory.copies import Broken, Slow, Whenever, host

import anybatch
from anybatch.memory.pager import (
    EVICTING,
    OFFLOADED,
    PREFETCHING,
    RESIDENT,
    Copies,
    MemoryPage,
    Pager,
)

CPU = torch.device("cpu")
KIB = 1024 // 4


def test_what_is_used_on_its_way_out_stays_as_it_is() -> None:
    store = Slow()
    hold, retained = Pager(store, CPU, []), torch.arange(float(KIB))
    key = int(retained.untyped_storage()._cdata)
    hold.register(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    held, hold.since, hold.touched = hold.all[key], 2, 0
    for _ in range(2):  # the same copy is still under way
        hold.evict(held)
        assert (held.state, hold.going, hold.here) == (EVICTING, 1024, 1024)
        hold.touch(held, 2)
        assert (held.state, hold.going, hold.here) == (RESIDENT, 0, 1024)
        held.used, hold.touched = 1, 0
    threading.Timer(0.05, store.go.set).start()
    hold.forget_copy(held)
    retained.add_(1)
    hold.settle()
    assert (held.state, hold.moved) == (RESIDENT, 1024)
    hold.evict(held)
    while hold.wait():
        pass
    assert (held.state, hold.here, retained.untyped_storage().nbytes()) == (OFFLOADED, 0, 0)
    hold.prefetch(held)
    assert (held.state, hold.here, hold.moved) == (PREFETCHING, 1024, 3 * 1024)
    hold.touch(held, 3)
    assert torch.equal(retained, torch.arange(float(KIB)) + 1)
    hold.close()


@pytest.mark.parametrize("used", [False, True])
def test_what_could_not_be_copied_out_stays(*, used: bool) -> None:
    store = Broken("out")
    hold, retained = Pager(store, CPU, []), torch.arange(float(KIB))
    key = int(retained.untyped_storage()._cdata)
    hold.register(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    held = hold.all[key]
    for _ in range(2):
        hold.evict(held)
        if used:
            hold.bring_back(held)
        with pytest.raises(OSError, match="the disk is gone"):
            _ = hold.forget_copy(held) if used else hold.wait()
        assert (held.state, held.has_copy, hold.here, hold.going) == (RESIDENT, False, 1024, 0)
    store.ways = ()
    hold.settle()
    hold.evict(held)
    hold.wait()
    assert (held.state, retained.untyped_storage().nbytes()) == (OFFLOADED, 0)
    hold.close()
    assert torch.equal(retained, torch.arange(float(KIB)))


@pytest.mark.parametrize("called", [False, True])
def test_what_cannot_be_read_back_is_nan_and_the_rest_comes(*, called: bool) -> None:
    store = Broken()
    hold, retained = Pager(store, CPU, []), [torch.arange(float(KIB)) for _ in range(2)]
    for number, tensor in enumerate(retained):
        key = int(tensor.untyped_storage()._cdata)
        hold.register(key, tensor.untyped_storage(), tensor.nbytes, 0, number, 1)
        hold.evict(hold.all[key])
    while hold.wait():
        pass
    first = int(retained[0].untyped_storage()._cdata)
    store.ways = ("back",)
    if called:
        hold.prefetch(hold.all[first])
        with pytest.raises(OSError, match="the disk is gone"):
            hold.bring_back(hold.all[first])
    real = store.reading

    def once(key: Hashable, storage: Any) -> Callable[[], None]:
        found = real(key, storage)
        store.ways = ()
        return found

    store.reading = once  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        hold.close()
    assert retained[0].isnan().all()
    assert torch.equal(retained[1], torch.arange(float(KIB)))


def test_an_interrupt_while_all_comes_back_leaves_none_of_the_others_behind() -> None:
    store = host()
    hold, retained = Pager(store, CPU, []), [torch.arange(float(KIB)) for _ in range(3)]
    keys = [int(tensor.untyped_storage()._cdata) for tensor in retained]
    for number, tensor in enumerate(retained):
        hold.register(keys[number], tensor.untyped_storage(), tensor.nbytes, 0, number, 1)
        hold.evict(hold.all[keys[number]])
    while hold.wait():
        pass
    real = store.reading

    def interrupted() -> None:
        raise KeyboardInterrupt

    def reading(key: Hashable, storage: Any) -> Callable[[], None]:
        return interrupted if key == keys[1] else real(key, storage)

    store.reading = reading  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        hold.close()
    assert retained[1].isnan().all()
    assert torch.equal(retained[0], torch.arange(float(KIB)))
    assert torch.equal(retained[2], torch.arange(float(KIB)))


def test_what_is_used_on_its_way_out_waits_until_it_has_been_copied() -> None:
    """Whoever lets go of it before that, the copy does not."""
    store = Slow()
    hold, retained = Pager(store, CPU, []), torch.arange(float(KIB))
    key = int(retained.untyped_storage()._cdata)
    hold.register(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    held, hold.since, hold.touched = hold.all[key], 2, 0
    hold.evict(held)
    hold.touch(held, 2)
    assert (hold.here, hold.touched) == (1024, 0)
    store.go.set()
    hold._copiers[0].wait(hold._moving[0][1])
    hold.settle()
    assert (hold.here, hold.touched) == (1024, 1024)
    hold.close()


def test_what_dies_when_its_copy_has_ended_is_forgotten_at_once() -> None:
    store = Slow()
    hold, gone = Pager(store, CPU, []), torch.zeros(KIB)
    key = int(gone.untyped_storage()._cdata)
    hold.register(key, gone.untyped_storage(), gone.nbytes, 0, 1, 1)
    held = hold.all[key]
    hold.evict(held)
    hold.bring_back(held)  # it is used after all, and then dropped: only its copy holds it
    job = held.job
    assert job is not None
    del gone
    hold.settle()
    assert key in hold.movable
    store.go.set()
    hold._copiers[0].wait(job)
    hold.settle()
    assert (hold.stirred(), hold.here, hold.all, hold.movable) == (False, 0, {}, {})
    hold.close()


def test_what_is_chosen_while_it_is_copied_out_and_is_offloaded_by_then_is_not_moved() -> None:
    """It was taken for a storage that somebody had resized to nothing, and its bytes were lost."""
    hold, retained = Pager(host(), CPU, []), torch.arange(float(KIB))
    key = int(retained.untyped_storage()._cdata)
    hold.register(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    held = hold.all[key]
    hold.evict(held)
    while hold.wait():
        pass
    hold.evict(held)
    assert (held.state, held.size, hold.here, hold.going) == (OFFLOADED, 1024, 0, 0)
    hold.bring_back(held)
    assert torch.equal(retained, torch.arange(float(KIB)))
    hold.close()


def test_what_is_to_remain_is_held_by_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts no more with what may leave, so when it dies its memory must go at once."""
    monkeypatch.setattr("anybatch.memory.pager.Copier", lambda _: Whenever(random.Random(0), 0.0))
    hold, retained = Pager(host(), CPU, []), torch.arange(float(KIB))
    key, there = int(retained.untyped_storage()._cdata), weakref.ref(retained.untyped_storage())
    hold.register(key, retained.untyped_storage(), retained.nbytes, 0, 1, 1)
    hold.evict(hold.all[key])
    hold.touch(hold.all[key], 2)
    hold.pin(hold.all[key])
    assert torch.equal(retained, torch.arange(float(KIB)))
    del retained
    assert there() is None
    hold.settle()
    assert (hold.here, hold.all) == (0, {})
    hold.close()


def test_memory_is_given_up_in_one_place_and_only_with_a_complete_copy() -> None:
    """A tensor whose bytes are lost is a fault of one function, whoever its owner is."""
    files = Path(anybatch.__file__).parent.rglob("*.py")
    calls = [
        f"{path.name}: {ast.unparse(node)}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    found = [call for call in calls if call.endswith((".resize_(0)", "page.let_go()"))]
    assert sorted(found) == ["pager.py: page.let_go()", "pager.py: storage.resize_(0)"]
    copies, page, storage = Copies(Slow, CPU), MemoryPage(1, 4), torch.ones(4).untyped_storage()
    with pytest.raises(AssertionError):
        copies.empty(page)  # there is no copy
    copies.start(0, page, storage)
    with pytest.raises(AssertionError):
        copies.empty(page)  # it is on its way
    copies._store.go.set()  # type: ignore[union-attr]
    copies.close()
