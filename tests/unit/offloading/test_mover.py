from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.offloads import instead, small_leave
from tests.unit.offloading.steps import bounds, equal, mlp, plain, states

import anybatch
from anybatch.errors import StoreError

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
    small_leave(monkeypatch)
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
    small_leave(monkeypatch)
    model, x = mlp()
    low, high = bounds(model, lambda ours: ours(x).sum().backward())
    off = anybatch.offload(memory=(low + high) // 2, device="cpu", recompute=False)
    with off:
        model(x).sum().backward()
    model.zero_grad()
    instead(monkeypatch, "space", lambda _: 100)
    with pytest.raises(StoreError, match="the folder of the spill file has 100 B left"), off:
        raise AssertionError
    monkeypatch.undo()
