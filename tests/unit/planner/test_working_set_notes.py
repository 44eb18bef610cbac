from __future__ import annotations

from functools import partial

import torch

from anybatch.planner.working_set import (
    Moments,
    Paging,
    SingleLaneBarrier,
    StorageRecorder,
    keep,
)

CPU = torch.device("cpu")
KIB = 1024


def test_what_a_segment_has_not_used_may_be_offloaded_and_what_dies_is_forgotten() -> None:
    notes = StorageRecorder(CPU)
    with Paging(notes):
        one, two = torch.zeros(256), torch.zeros(512)
        assert (notes.untouched, notes.holds) == (0, 3 * KIB)
        notes.phase += 1
        assert notes.untouched == 3 * KIB
        view = one[:3] + 1
        assert notes.untouched == 2 * KIB
        del two
        assert (notes.untouched, notes.holds) == (0, KIB + view.nbytes)


def test_what_stays_or_is_shared_does_not_wait() -> None:
    notes = StorageRecorder(CPU)
    with Paging(notes):
        retained, also = torch.zeros(256), torch.zeros(256)
        with notes.sharing():
            shared = torch.zeros(256)
    keep(notes, retained)
    assert (notes.holds, notes.accounted) == (KIB, 2 * KIB)
    notes.release(int(also.untyped_storage()._cdata))
    assert (notes.holds, notes.accounted) == (0, KIB)
    assert shared.nbytes == KIB


def test_a_meeting_ends_a_segment_and_another_one_makes_it_unknown() -> None:
    notes, ended = StorageRecorder(CPU), list[int]()
    single = SingleLaneBarrier(notes, partial(ended.append, 1))
    moments = Moments(3, torch.zeros(3), torch.full((3,), 3.0))
    found = single.reduce("norm", lambda: moments, max, lambda t: t)
    assert isinstance(found, Moments)
    assert (found.count, found.mean.shape, ended, notes.unknown) == (3, (3,), [1], False)
    assert single.exchange("loss", 5, lambda parts: parts) == 5
    assert notes.unknown
    assert single.gather("rows", found.mean) == (found.mean, 0)
