"""Results for small masks, which are computed once for the same bits."""

from __future__ import annotations

from functools import reduce
from itertools import product
from operator import or_
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.execution.proof import masks
from anybatch.execution.proof.masks import SMALL, Masks, fold, has, of_bits, once

SHAPES = [(1,), (7,), (4, 1), (3, 5), (2, 0, 3), (4, 6, 1, 3), (33, 2)]


def drawn(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_union_along_dimensions_has_the_bits_of_all_its_numbers(
    shape: tuple[int, ...], *, keep: bool
) -> None:
    mask = drawn(shape)
    for chosen in product([False, True], repeat=len(shape)):
        dims = [d for d, folded in enumerate(chosen) if folded]
        wanted = mask.clone()
        for d in reversed(dims):
            parts = [one.unsqueeze(d) for one in wanted.unbind(d)]
            none = wanted.new_zeros([1 if k == d else n for k, n in enumerate(wanted.shape)])
            wanted = reduce(or_, parts, none)
            wanted = wanted if keep else wanted.squeeze(d)
        assert torch.equal(fold(mask, dims, keep=keep), wanted)
        assert torch.equal(fold(once(mask), dims, keep=keep), wanted)


def test_the_same_bits_are_computed_with_once_and_others_anew() -> None:
    asked = list[Any]()

    @of_bits
    def note(mask: Tensor, number: int) -> int:
        asked.append(mask.tolist())
        return number

    small, large = drawn((4, 1)), drawn((SMALL + 1,))
    assert once(small) is once(small.clone())
    assert [note(once(small.clone()), 3) for _ in range(3)] == [3, 3, 3]
    assert note(once(small), 5) == 5
    assert asked == [small.tolist()] * 2
    assert once(large) is large
    assert [note(large, 3), note(large, 3)] == [3, 3]
    assert len(asked) == 4


def test_a_mask_that_its_owner_writes_to_later_changes_nothing_that_was_computed_once() -> None:
    mask = torch.tensor([[1], [2], [4]], dtype=torch.uint8)
    kept = once(mask)
    assert not has(kept, 8)
    mask.fill_(8)
    assert kept.tolist() == [[1], [2], [4]]
    assert has(once(mask), 8)


def test_writes_to_a_part_change_no_mask_of_another_tensor() -> None:
    rows = torch.tensor([[1], [2], [4], [8]], dtype=torch.uint8)
    found, first, second = Masks(), torch.zeros(4, 3), torch.zeros(4, 3)
    for one in (first, second):
        found.put(one, rows.clone())
    found.write(first[:1], torch.full((1, 1), 2, dtype=torch.uint8))
    of_first, of_second = found.of(first), found.of(second)
    assert of_first is not None
    assert of_second is not None
    assert of_first.expand(4, 3)[:, 0].tolist() == [2, 2, 4, 8]
    assert of_second.expand(4, 3)[:, 0].tolist() == [1, 2, 4, 8]


def test_no_mode_hears_what_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[str]()

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(masks, "_ONCE", {})
    mask = torch.tensor([[3], [5]], dtype=torch.uint8)
    with Kernels():
        kept = once(mask)
        bits = [has(kept, 4), has(kept, 4), has(kept, 8)]
    assert bits == [True, True, False]
    assert heard == []
