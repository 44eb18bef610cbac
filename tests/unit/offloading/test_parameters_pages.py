"""Pages that come and go, and what dies in the middle of it."""

from __future__ import annotations

import pytest
import torch
from tests.unit.memory.copies import host

from anybatch.offloading.parameters import ParameterPager

ROWS = 1024
BYTES = 4 * ROWS


def test_what_dies_during_an_eviction_is_not_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = ParameterPager(host(), torch.device("cpu"), [], 3 * BYTES)
    alive = {n: torch.full((ROWS,), float(n)) for n in range(4)}
    keys = {}
    for number, tensor in alive.items():
        keys[number] = int(tensor.untyped_storage()._cdata)
        pages.add(keys[number], tensor.untyped_storage(), 0, number)
    assert pages.all[keys[0]].storage().nbytes() == 0  # it made room for the last one
    requested, orders = 0, pages._order.next

    def collected(item: tuple[int, int]) -> int:
        """Answer as ever; the garbage collector comes at the first question."""
        nonlocal requested
        requested += 1
        assert requested < 20, "nobody leaves, and it is asked for ever"
        alive.pop(1, None)
        return orders(item)

    monkeypatch.setattr(pages._order, "next", collected)
    pages.use([(keys[0], False)], "a kernel")
    assert torch.equal(alive[0], torch.zeros(ROWS))
    pages.close()
    assert all(torch.equal(t, torch.full((ROWS,), float(n))) for n, t in alive.items())
