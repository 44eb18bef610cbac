from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.offloading.steps import LOTS, bounds, equal, mlp, plain, states

import anybatch
from anybatch.errors import StoreError
from anybatch.memory.stores import FileStore
from anybatch.offloading import saved_tensors

Fault = Callable[..., Any]


def _full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def _broken(*_: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


def _short(*_: Any) -> int:
    return 0


FAULTS: dict[str, tuple[str, Fault, str]] = {
    "full": ("pwrite", _full, "could not be written to .*No space left"),
    "write error": ("pwrite", _broken, "could not be written to .*Input/output error"),
    "read error": ("preadv", _broken, "could not be read from .*Input/output error"),
    "short read": ("preadv", _short, "could not be read from .*the spill file ends at"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_store_that_fails_says_so_and_the_next_step_is_right(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_tensors, "SMALL", 64)
    model, x = mlp()
    low, high = bounds(model, lambda ours: ours(x).sum().backward())
    wanted = plain(model, lambda ours: ours(x).sum().backward(), 1)[0]
    call, fault, match = FAULTS[name]
    off = anybatch.offload(memory=(low + high) // 2, device="cpu", recompute=False)
    for fails in (True, False, True, False):  # while it records, and while it follows a plan
        model.zero_grad()
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(os, call, fault)
                with pytest.raises(StoreError, match=match), off:
                    model(x).sum().backward()
            else:
                with off:
                    model(x).sum().backward()
                assert equal(states(model), wanted)
    off.close()


def test_a_step_that_does_not_fit_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "SMALL", 64)
    model, x = mlp()
    low, high = bounds(model, lambda ours: ours(x).sum().backward())
    off = anybatch.offload(memory=(low + high) // 2, device="cpu", recompute=False)
    with off:
        model(x).sum().backward()
    model.zero_grad()
    monkeypatch.setattr(FileStore, "space", lambda _: 100)
    with pytest.raises(StoreError, match="the folder of the spill file has 100 B left"), off:
        raise AssertionError
    monkeypatch.undo()


def test_the_space_of_a_file_is_its_own_and_what_is_left(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    before = store.space()
    store.writing(1, torch.ones(1 << 20, dtype=torch.uint8).untyped_storage())()
    assert before < LOTS << 30
    assert store.space() > 1 << 20
    store.close()
    store.close()
