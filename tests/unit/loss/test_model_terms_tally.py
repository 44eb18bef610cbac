"""What micro-batches are divided by, added up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from anybatch.errors import LossError
from anybatch.loss.model_terms import Count, MicroBatch, Tally


def part(begin: int, size: int) -> MicroBatch:
    return MicroBatch(None, None, size, begin)


def added(wholes: Sequence[Count | None], *parts: tuple[int, int, Sequence[Count]]) -> Tally:
    tally = Tally(8, wholes, waits=True)
    for begin, size, counts in parts:
        tally.add(part(begin, size), counts, ["one", "other"])
    return tally


def test_parts_that_are_the_full_batch_are_compared_once_all_are_in() -> None:
    assert added([20, None], (0, 4, [12, 1]), (4, 4, [8, 2])).done
    assert added([torch.tensor(20), None], (4, 4, [torch.tensor(8), 2]), (0, 4, [12, 1])).done
    assert not added([20, None], (0, 4, [12, 1])).done


def test_parts_that_are_not_the_full_batch_are_refused_with_both_numbers() -> None:
    with pytest.raises(LossError, match="other is divided by 23 .* and by 20 in the full"):
        added([None, 20], (0, 4, [1, 12]), (4, 4, [1, 11]))


def test_a_part_that_is_run_again_in_pieces_counts_once() -> None:
    """Memory had run out in its backward."""
    pieces = (0, 2, [5, 0]), (2, 2, [7, 0])
    assert added([20, None], (0, 4, [12, 0]), *pieces, (4, 4, [8, 0])).done
    assert added([20, None], (4, 4, [8, 0]), (0, 4, [12, 0]), *pieces).done
