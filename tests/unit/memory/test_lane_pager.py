from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.memory.copies import host, stores
from torch import Tensor

from anybatch.memory.lane_pager import SMALL, LanePager, LockstepLimits, Paging, Store

CPU = torch.device("cpu")
KIB = 1024 // 4


def filled(count: int) -> Tensor:
    return torch.arange(float(count))


def pager(available: int, store: Store | None = None) -> LanePager:
    return LanePager(available, store or host(), CPU)


@pytest.mark.parametrize("store_name", ["host", "file"])
def test_a_waiting_lane_is_offloaded_and_has_its_memory_again(
    store_name: str, tmp_path: Path
) -> None:
    it = pager(0, stores(tmp_path)[store_name])
    it.begin(0)
    with Paging(it):
        retained = filled(KIB) * 2
        view = retained[10:20]
    it.end(0, [1, 0])
    assert retained.untyped_storage().nbytes() == 0
    it.begin(1)
    it.end(1, [1, 0])
    it.begin(0)
    with Paging(it):
        total = (view + 1).sum()
    assert total == (2 * torch.arange(10.0, 20.0) + 1).sum()
    assert torch.equal(retained, filled(KIB) * 2)
    it.close()


def test_what_was_used_last_remains_in_memory() -> None:
    it = pager(2 * 1024)
    it.begin(0)
    with Paging(it):
        old = filled(KIB) + 1
    it.end(0, [1, 0])
    it.begin(1)
    it.end(1, [0, 1])
    it.begin(0)
    with Paging(it):
        new, newer = filled(KIB) + 2, filled(KIB) + 3
    it.end(0, [1, 0])
    sizes = [one.untyped_storage().nbytes() for one in (old, new, newer)]
    assert sizes == [0, 1024, 1024]
    it.close()
    assert torch.equal(old, filled(KIB) + 1)


@pytest.mark.parametrize("store_name", ["host", "file"])
def test_within_a_limit_the_lane_that_runs_is_offloaded_too(
    store_name: str, tmp_path: Path
) -> None:
    it = LanePager(0, stores(tmp_path)[store_name], CPU, inside=LockstepLimits(3 * 1024))
    it.begin(0)

    def here() -> list[int]:
        it.settle()
        return [number for number, one in enumerate(made) if one.untyped_storage().nbytes()]

    made: list[Tensor] = []
    with Paging(it):
        made.append(torch.zeros(KIB) + 1)
        for _ in range(5):
            made.append(made[-1] + 1)
            assert len(here()) <= 4
    assert here() == [2, 3, 4, 5]  # what was used last, and what the last kernel has made
    observed = it.moved
    with Paging(it):
        total = made[5] + made[4]
        assert 2 not in here()
        total += made[0]
        both = [one.clone() for one in (made[0], made[1])]
    assert it.moved > observed
    it.close()
    assert torch.equal(total, torch.full((KIB,), 12.0))
    for number, one in enumerate(made):
        assert torch.equal(one, torch.full((KIB,), number + 1.0))
    assert torch.equal(both[1], made[1])


def test_a_kernel_that_needs_more_than_the_limit_has_it_all_the_same() -> None:
    it = LanePager(0, host(), CPU, inside=LockstepLimits(1024))
    it.begin(0)
    with Paging(it):
        made = [filled(KIB) + number for number in range(4)]
        joined = torch.cat(made)
    it.close()
    assert torch.equal(joined, torch.cat([filled(KIB) + number for number in range(4)]))


def test_what_was_not_written_to_is_not_copied_out_again() -> None:
    it = pager(0)
    it.begin(0)
    with Paging(it):
        retained = filled(KIB) * 1
    it.end(0, [0])
    for writes, moved in ((False, 1), (False, 1), (True, 2)):
        before = it.moved
        it.begin(0)
        with Paging(it):
            retained.add_(1) if writes else retained.sum()
        it.end(0, [0])
        assert it.moved - before == moved * 1024
    it.close()
    assert torch.equal(retained, filled(KIB) + 1)


def test_what_two_lanes_use_stays() -> None:
    it = pager(0)
    it.begin(0)
    with Paging(it):
        shared = filled(KIB) * 1
    it.end(0, [1, 0])
    it.begin(1)
    with Paging(it):
        shared.add_(1)
    it.end(1, [0, 1])
    assert shared.untyped_storage().nbytes() == 1024
    it.close()


def test_what_is_small_or_was_there_before_stays() -> None:
    it, before = pager(0), filled(KIB)
    it.begin(0)
    with Paging(it):
        small = torch.zeros(SMALL // 4 - 1)
        before.mul_(2)
    it.end(0, [1, 0])
    assert small.untyped_storage().nbytes() > 0
    assert before.untyped_storage().nbytes() > 0
    it.close()


def test_what_dies_while_it_is_offloaded_is_forgotten(tmp_path: Path) -> None:
    store: Any = stores(tmp_path)["file"]
    it = pager(0, store)
    it.begin(0)
    with Paging(it):
        retained = filled(KIB) * 1
    it.end(0, [1, 0])
    assert len(store._places) == 1
    del retained
    it.begin(1)
    assert store._places == {}
    it.close()
