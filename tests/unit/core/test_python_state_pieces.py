"""Tensors are compared in pieces, as at once and with few bytes; a dict is restored as it was."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.peaks import metered
from torch import Tensor, nn

from anybatch.core import python_state

SHAPES = [(), (1,), (7,), (5, 3), (3, 1, 4), (2, 9000), (9000, 2), (4, 30, 200), (2, 50000, 3)]


@pytest.mark.parametrize("shape", [*SHAPES, (0,), (3, 0, 2)])
@pytest.mark.parametrize("parts", [1, 16])
def test_the_pieces_cover_a_tensor_once(shape: tuple[int, ...], parts: int) -> None:
    count = torch.zeros(shape)
    for place in python_state.places(shape, parts):
        count[place] += 1
        assert count[place].numel() <= max(python_state.LEAST, count.numel() // parts)
    assert bool((count == 1).all())


def at_once(a: Tensor, b: Tensor) -> tuple[float, float]:
    finite = a.isfinite() & b.isfinite()
    a, b = a[finite], b[finite]
    return (float((a - b).abs().max()), float(a.abs().max())) if len(a) else (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_difference_is_that_of_the_tensors_at_once(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    for one, value in ((a, math.nan), (b, math.inf), (a, -math.inf)):
        if one.numel() > 8:
            one.view(-1)[torch.randint(one.numel(), (3,))] = value
    assert python_state.difference(a, b) == at_once(a, b)
    for axis in range(a.dim()):
        assert python_state.difference(a, b, axis) == at_once(a.flip(axis), b)
    assert python_state.difference(a.mT, b.mT) == at_once(a, b) if a.dim() > 1 else True


def test_a_difference_that_overflows_is_infinite() -> None:
    a = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    assert python_state.difference(a, -a) == (math.inf, 60000.0)


def test_numbers_that_are_not_finite_are_left_out() -> None:
    a, b = torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.inf])
    assert python_state.difference(a, b) == (0.0, 0.0)


def test_one_number_in_the_last_piece_distinguishes_tensors() -> None:
    a = torch.zeros(3, (1 << 20) + 5)
    b = a.clone()
    assert python_state.equal(a, b)
    b[-1, -1] = 1e-30
    assert not python_state.equal(a, b)


@pytest.mark.parametrize("shape", [(5000,), (3, 40000), (2, 500, 300)])
def test_a_comparison_holds_what_its_rehearsal_does(shape: tuple[int, ...]) -> None:
    a, b = torch.randn(shape), torch.randn(shape)
    with metered() as compared:
        python_state.difference(a, b, 0)
    with metered() as rehearsed:
        python_state.rehearse_difference(b)
    assert 0.8 * rehearsed.peak <= compared.peak <= rehearsed.peak
    assert (
        compared.peak <= 4 * max(python_state.LEAST, b.numel() // python_state.PARTS) * b.itemsize
    )


class Makes(OrderedDict[str, Any]):
    """A dict as transformers has it for activations: of classes, and what is read is an object."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_a_dict_that_makes_its_values_is_left_as_it_is() -> None:
    makes = Makes(tanh=nn.Tanh)
    state = python_state.PythonState()
    state.container(makes)
    state.put_back()
    assert dict.items(makes) == {"tanh": nn.Tanh}.items()
    assert isinstance(makes["tanh"], nn.Tanh)


class Loads(OrderedDict[str, Any]):
    """A dict as transformers has it for models: its entries are loaded where they are read."""

    def __iter__(self) -> Iterator[str]:
        return iter(("gpt2", "llama"))

    def __len__(self) -> int:
        return 2

    def keys(self) -> Any:
        return ["gpt2", "llama"]

    def __getitem__(self, key: str) -> Any:
        raise ImportError(key)

    def values(self) -> Any:
        raise ImportError("sentencepiece")

    def items(self) -> Any:
        raise ImportError("sentencepiece")

    def copy(self) -> Any:
        raise ImportError("sentencepiece")

    def __deepcopy__(self, memo: Any) -> Any:
        return Loads([*dict.items(self)])


@pytest.mark.parametrize("stored", [{}, {"own": 1}])
def test_a_dict_with_entries_of_its_own_is_left_as_it_is(stored: dict[str, int]) -> None:
    loads = Loads(stored)
    state = python_state.PythonState()
    state.container(loads)
    OrderedDict.__setitem__(loads, "more", 2)
    state.put_back()
    assert dict.items(loads) == stored.items()
    assert [*reversed(loads)] == [*stored]  # the order that an OrderedDict stores beside them


class Elsewhere(OrderedDict[str, float]):
    """A dict as transformers has it for models: its keys and values are those of another one."""

    def __init__(self, other: dict[str, float]) -> None:
        super().__init__()
        self.other = other

    def __iter__(self) -> Any:
        return iter(self.other)

    def __len__(self) -> int:
        return len(self.other)

    def __getitem__(self, key: str) -> float:
        return self.other[key]

    def keys(self) -> Any:
        return self.other.keys()

    def items(self) -> Any:
        return self.other.items()


class Lists(defaultdict[str, list[int]]):
    def __init__(self) -> None:
        super().__init__(list, a=[1])


class Recent(deque[int]):
    def __init__(self, size: int) -> None:
        super().__init__([1, 2], size)


@pytest.mark.parametrize("held", [Elsewhere({"a": 1.0}), Lists(), Recent(2)], ids=repr)
def test_a_container_of_a_persons_class_is_left_as_it_is(held: Any) -> None:
    def reads() -> int:
        return len(held)

    was, state = (repr(held), python_state.entries_of(held)), python_state.PythonState()
    state.function(reads)
    if isinstance(held, Recent):
        held.append(3)
    else:
        held["b"] = [2]
    state.put_back()
    assert (repr(held), python_state.entries_of(held)) == was


FIXED = np.arange(3.0)
FIXED.flags.writeable = False


@pytest.mark.parametrize(
    "values",
    [
        FIXED,
        np.broadcast_to(np.ones(1), 3),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        ctypes.c_char_p(b"text"),
    ],
    ids=["for reading only", "spread", "dates", "a pointer"],
)
def test_an_array_that_cannot_be_written_or_copied_stays(values: Any) -> None:
    state = python_state.PythonState()
    state.container({"values": values})
    state.put_back()


@pytest.mark.parametrize("held", [array("d", [1.0]), bytearray(b"1")])
def test_an_array_that_has_grown_has_its_length_again(held: Any) -> None:
    was, state = bytes(held), python_state.PythonState()
    state.container({"values": held})
    held.extend(held)
    state.put_back()
    assert bytes(held) == was
