from __future__ import annotations

import itertools

import pytest
import torch

from anybatch.execution.full_batch_rng.law import Law, RowRange, candidates, fitted, pattern_of

N, SIZE = 6, 2
SHAPES = [(1, 1), (1, 3), (2, 1), (2, 3)]
"""Entries of a dimension before and behind the samples."""


def arranged(before: int, after: int, order: tuple[int, ...], n: int) -> torch.Tensor:
    """A tensor [4, before * n * after, 3] in some order in memory."""
    sizes = (4, before * n * after, 3)
    inner = torch.empty([sizes[d] for d in order])
    return inner.permute([order.index(d) for d in range(3)])


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize(("before", "after"), SHAPES)
@pytest.mark.parametrize("size", [1, SIZE, 3])
def test_a_law_finds_the_draw_of_the_batch_and_the_rows_in_it(
    order: tuple[int, ...], before: int, after: int, size: int
) -> None:
    observed = [arranged(before, after, order, n) for n in (4, 2, 3)]
    law = fitted([pattern_of(one) for one in observed], (4, 2, 3))
    assert law is not None
    assert law.dim == 1
    every = candidates(law, before * after * 4, 4)
    law = next(one for one in every if one.parts(before * after, 1) == (before, after))
    rows = RowRange(2, size, N)
    full = law.full_pattern(pattern_of(arranged(before, after, order, size)), rows)
    wanted = arranged(before, after, order, N)
    assert full is not None
    assert full.clean() == pattern_of(wanted).clean()
    values = torch.arange(4 * before * N * after * 3).view(4, before, N, after, 3)
    wanted.copy_(values.reshape(wanted.shape))
    mine = values[:, :, 2 : 2 + size].reshape(4, -1, 3)
    assert torch.equal(law.select(wanted, rows), mine)
    turned = values[:, :, 2 : 2 + size].flip(2).reshape(4, -1, 3)
    assert torch.equal(law.select(wanted, rows._replace(turned=True)), turned)
    put = torch.zeros_like(wanted)
    law.put(put, turned.to(put.dtype), rows._replace(turned=True))
    assert torch.equal(law.select(put, rows), mine.to(put.dtype))
    assert put.count_nonzero() == mine.count_nonzero()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_one_row_is_drawn_in_the_order_of_several(order: tuple[int, ...]) -> None:
    """A kernel that sees one row may lay its result out as if it were contiguous."""

    def rows(n: int) -> torch.Tensor:
        sizes = (n, 2, 3)
        return torch.empty([sizes[d] for d in order]).permute([order.index(d) for d in range(3)])

    law = fitted([pattern_of(rows(n)) for n in (4, 2, 3)], (4, 2, 3))
    assert law is not None
    full = law.full_pattern(pattern_of(torch.empty(1, 2, 3)), RowRange(5, 1, N))
    assert full is not None
    assert full.clean() == pattern_of(rows(N)).clean()


def shapes(*found: tuple[int, ...]) -> Law | None:
    counts = (8, 4, 7)[: len(found)]
    return fitted([pattern_of(torch.empty(sizes)) for sizes in found], counts)


def test_a_dimension_that_does_not_grow_holds_no_samples() -> None:
    assert shapes((8, 8), (8, 8), (8, 8)) == Law(None)
    assert shapes((8, 8), (8, 4), (8, 7)) == Law(1)


@pytest.mark.parametrize(
    "found",
    [
        [(8, 8), (4, 4), (7, 7)],  # samples with samples
        [(9, 8), (5, 8), (8, 8)],  # and one more
        [(8, 2), (4, 2), (8, 2)],  # padded to a power of two
        [(4,), (2,), (3,)],  # half of them
        [(8,), (4, 1)],
        [(28,), (6,)],  # pairs
    ],
)
def test_what_does_not_grow_with_the_samples_has_no_law(found: list[tuple[int, ...]]) -> None:
    assert shapes(*found) is None


def test_a_draw_that_does_not_fit_its_law_is_reported() -> None:
    rows = RowRange(0, 4, 20)
    assert Law(0).full_pattern(pattern_of(torch.empty(7, 4)), rows) is None
    assert Law(2).full_pattern(pattern_of(torch.empty(4, 4)), rows) is None
    assert Law(0, 2, 3).full_pattern(pattern_of(torch.empty(16, 4)), rows) is None
    assert Law(None).full_pattern(pattern_of(torch.empty(7, 4)), rows) == pattern_of(
        torch.empty(7, 4)
    )
