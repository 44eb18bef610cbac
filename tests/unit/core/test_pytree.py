from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from anybatch.core import pytree
from anybatch.errors import BatchError


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass(frozen=True)
class Record:
    image: Tensor
    name: str
    extra: dict[str, Tensor]


def nested(n: int) -> dict[str, Any]:
    x = torch.arange(n * 2.0).view(n, 2)
    return {
        "pair": Pair(x, [x + 1, "text", None]),
        "record": Record(x + 2, "a name", {"deep": x + 3}),
        "user": UserDict({"u": x + 4}),
        "ordered": OrderedDict(o=x + 5),
        "number": 3,
        "scalar": torch.tensor(7.0),
    }


def test_paths_read_like_the_expression_that_reaches_the_tensor() -> None:
    assert [path for path, _ in pytree.tensors(nested(3), "inputs")] == [
        "inputs['pair'].left",
        "inputs['pair'].right[0]",
        "inputs['record'].image",
        "inputs['record'].extra['deep']",
        "inputs['user']['u']",
        "inputs['ordered']['o']",
        "inputs['scalar']",
    ]


@given(n=st.integers(1, 9), size=st.integers(1, 10))
def test_rows_joined_are_the_full_batch_and_types_remain(n: int, size: int) -> None:
    full = nested(n)
    parts = [pytree.rows(full, i, min(i + size, n)) for i in range(0, n, size)]
    joined = pytree.join(parts)
    for (path, a), (other, b) in zip(pytree.tensors(joined), pytree.tensors(full), strict=True):
        assert path == other
        assert torch.equal(a, b)
    assert type(joined["pair"]) is Pair
    assert type(joined["record"]) is Record
    assert type(joined["user"]) is UserDict
    assert type(joined["ordered"]) is OrderedDict
    assert joined["pair"].right[1:] == ["text", None]
    assert full["user"]["u"].shape[0] == n, "the original is untouched"


def test_rows_are_views() -> None:
    x = torch.zeros(4, 2)
    pytree.rows({"x": x}, 1, 3)["x"].fill_(1.0)
    assert x.sum() == 4


def test_batch_size_ignores_what_has_no_rows() -> None:
    assert pytree.batch_size(inputs=nested(5), targets=torch.zeros(5)) == 5


def test_leaves_of_different_sizes_are_all_named() -> None:
    with pytest.raises(
        BatchError, match=r"inputs\['a'\]: 3, inputs\['b'\]\[0\]: 3, targets: 4.*0-dim tensor"
    ):
        pytree.batch_size(
            inputs={"a": torch.zeros(3), "b": [torch.zeros(3)]}, targets=torch.zeros(4)
        )


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(BatchError, match="at least one tensor.*inputs, targets hold none"):
        pytree.batch_size(inputs="text", targets=torch.tensor(1))
    with pytest.raises(BatchError, match="at least one sample, and this one holds 0"):
        pytree.batch_size(inputs=torch.zeros(0, 3))


def test_layouts_without_rows_are_refused() -> None:
    with pytest.raises(BatchError, match=r"inputs\[0\] has layout torch.sparse_coo"):
        pytree.batch_size(inputs=[torch.eye(3).to_sparse()])
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    with pytest.raises(BatchError, match=r"layout .*\(nested\)"):
        pytree.batch_size(inputs=nested)


def test_a_packed_sequence_is_refused() -> None:
    packed = pack_sequence([torch.zeros(3, 1), torch.zeros(2, 1)])
    with pytest.raises(BatchError, match="PackedSequence are time steps.*pack them inside"):
        pytree.batch_size(inputs=packed)


def test_a_graph_behind_the_inputs_is_refused() -> None:
    x = torch.zeros(3, requires_grad=True) * 2
    with pytest.raises(BatchError, match="inputs has an autograd graph.*detach"):
        pytree.batch_size(inputs=x)


def test_parts_of_different_structure_cannot_be_joined() -> None:
    with pytest.raises(BatchError, match="same number of output tensors, and they gave 1, 2"):
        pytree.join([[torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]])


def test_a_mapping_that_cannot_be_written_becomes_a_dict() -> None:
    from types import MappingProxyType

    assert pytree.rows(MappingProxyType({"x": torch.arange(4)}), 1, 3)["x"].tolist() == [1, 2]


class Bag(MutableMapping[str, Any]):
    """Keeps its items in an inner dict, which copy.copy shares."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_a_mapping_of_a_persons_own_is_not_written_to() -> None:
    """Its shallow copy shared the items, and slicing cut the person's own batch."""
    bag = Bag({"x": torch.arange(8)})
    part = pytree.rows(bag, 0, 3)
    assert type(part) is dict
    assert len(part["x"]) == 3
    assert len(bag["x"]) == 8


def test_a_field_that_a_dataclass_makes_itself_is_no_child() -> None:
    """It was read before it was there: AttributeError."""

    @dataclass
    class Output:
        cache: Tensor = field(init=False)
        logits: Tensor = field(default_factory=lambda: torch.zeros(0))

    full = Output(logits=torch.arange(4.0))
    assert [path for path, _ in pytree.tensors(full, "out")] == ["out.logits"]
    assert pytree.rows(full, 1, 3).logits.tolist() == [1.0, 2.0]
    assert pytree.join([full, full]).logits.shape == (8,)


@given(n=st.integers(1, 9), size=st.integers(1, 10))
def test_arrays_and_captions_have_rows(n: int, size: int) -> None:
    """They were carried along whole, beside a slice of everything else."""
    full = {
        "x": torch.arange(n),
        "array": np.arange(n * 2).reshape(n, 2),
        "captions": [f"a {i}" for i in range(n)],
        "names": tuple(f"b {i}" for i in range(n)),
        "classes": ["cat"] * (n + 1),
        "constant": np.array(3.0),
    }
    starts = range(0, n, size)
    parts = [pytree.rows(full, i, min(i + size, n), n) for i in starts]
    for i, part in zip(starts, parts, strict=True):
        stop = min(i + size, n)
        assert np.array_equal(part["array"], full["array"][i:stop])
        assert part["captions"] == full["captions"][i:stop]
        assert part["names"] == full["names"][i:stop]
        assert part["classes"] is full["classes"]
        assert part["constant"] == 3.0
    if size > n:
        return
    del full["classes"]
    parts = [{k: v for k, v in part.items() if k != "classes"} for part in parts]
    joined = pytree.join(parts, sizes=[len(part["x"]) for part in parts])
    assert joined["captions"] == full["captions"]
    assert joined["names"] == full["names"]
    assert np.array_equal(joined["array"], full["array"])
    assert pytree.rows({"c": ["a"] * n, "x": torch.tensor(1)}, 0, 1)["c"] == ["a"] * n, "no N known"
    assert pytree.rows({"c": ["a"] * n, "x": torch.zeros(n)}, 0, 1)["c"] == ["a"]
    assert pytree.join(parts)["captions"] == full["captions"]


def test_a_list_stays_what_it_was_for_the_full_batch() -> None:
    """A pair of lists in a micro-batch of two was two entries."""
    full = {"x": torch.arange(5), "of": [list("abcde"), list("vwxyz")], "sizes": (2, 2), "n": []}
    found = pytree.marked(full, 5, "inputs")
    two = pytree.rows(found, 1, 3, 5)
    assert two["of"] == [["b", "c"], ["w", "x"]]
    assert pytree.rows(two, 1, 2, 2)["of"] == [["c"], ["x"]]
    assert pytree.rows(two, 1, 2, 2)["sizes"] == (2, 2)
    parts = [pytree.rows(found, i, i + 2, 5) for i in (0, 2)] + [pytree.rows(found, 4, 5, 5)]
    assert pytree.join(parts, sizes=[2, 2, 1])["of"] == full["of"]
    assert pytree.join(copy.deepcopy(parts), sizes=[2, 2, 1])["of"] == full["of"]
    of_none = {"x": full["x"], "classes": ("a", "b"), "size": torch.Size([5]), "p": ((1, 2), 0)}
    assert pytree.marked(of_none, 5, "inputs") is of_none


def test_a_pair_may_be_one_entry_or_one_sample() -> None:
    for names in ([("a", "b"), ("c", "d")], [["a", "b"], ["c", "d"]]):
        with pytest.raises(BatchError, match=r"targets has 2 entries, .* write it as a mapping"):
            pytree.marked(names, 2, "targets")
        named = pytree.marked({"one": names[0], "other": names[1]}, 2, "targets")
        assert list(pytree.rows(named, 0, 1, 2)["other"]) == ["c"]


def test_an_array_of_another_size_is_named() -> None:
    with pytest.raises(BatchError, match=r"inputs: 3, targets\['a'\]: 4"):
        pytree.batch_size(
            inputs=torch.zeros(3), targets={"a": np.zeros((4, 2)), "b": np.float64(1), "c": ["d"]}
        )
    assert pytree.batch_size(inputs=np.zeros((3, 2))) == 3


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (4, 2, r"outputs\['n'\] is 4 in one micro-batch and 2 in another.*return one value"),
        (torch.tensor(1.5), torch.tensor(2.5), r"outputs\['n'\] is 1.5 in one.* and 2.5 in anoth"),
        (np.array(1), np.array(2), r"outputs\['n'\] is array\(1\)"),
        (["a", "b"], ["c"], r"outputs\['n'\] is \['a', 'b'\] in one"),
        (object(), object(), r"outputs\['n'\] is <object"),
        (4, 4.0, r"outputs\['n'\] is 4 in one micro-batch and 4.0 in another"),
        (np.zeros(2), 1, r"outputs\['n'\] is array"),
        ("x" * 99, "y", r"outputs\['n'\] is 'x{56}\.\.\. in one"),
        ("x" * 99, "x" * 98, r"outputs\['n'\] has other values in one micro-batch than in another"),
    ],
)
def test_a_leaf_without_rows_must_be_the_same_in_all_parts(
    one: Any, other: Any, words: str
) -> None:
    """That of the first micro-batch was taken for all: len(x) of a part for the whole's."""
    parts = [{"o": torch.zeros(4), "n": one}, {"o": torch.zeros(2), "n": other}]
    with pytest.raises(BatchError, match=words):
        pytree.join(parts)
    last = pytree.join([{"o": torch.zeros(4), "n": other}, {"o": torch.zeros(2), "n": other}])
    assert last["n"] is other


def test_values_that_differ_in_one_shape_are_not_called_by_their_shape() -> None:
    parts = [[torch.zeros(size, 2), torch.tensor([float(size)])] for size in (4, 2)]
    with pytest.raises(
        BatchError, match=r"outputs\[1\] has other values .*of shape \(1,\) in both"
    ):
        pytree.join(parts, [0, None])


def test_constants_of_nan_are_the_same() -> None:
    for value in (float("nan"), torch.tensor(float("nan")), np.array(float("nan"))):
        pytree.join([[torch.zeros(1), value], [torch.zeros(2), copy.deepcopy(value)]])


def test_tensors_are_joined_along_the_dimensions_passed() -> None:
    """An output ``[T, n, C]`` was joined along T; a constant ``[K, D]`` was repeated."""
    constant = torch.randn(4, 2)
    full = [torch.randn(3, 5, 2), {"rows": torch.randn(5), "constant": constant}]

    def part(start: int, stop: int) -> list[Any]:
        rows = {"rows": full[1]["rows"][start:stop], "constant": constant.clone()}
        return [full[0][:, start:stop], rows]

    parts = [part(0, 2), part(2, 4), part(4, 5)]
    joined = pytree.join(parts, [1, 0, None])
    assert torch.equal(joined[0], full[0])
    assert torch.equal(joined[1]["rows"], full[1]["rows"])
    assert joined[1]["constant"] is parts[-1][1]["constant"]
    parts[0][1]["constant"][0, 0] += 1
    with pytest.raises(BatchError, match=r"\['constant'\] has other values.*\(4, 2\) in both"):
        pytree.join(parts, [1, 0, None], name="targets")


def test_parts_padded_to_different_lengths_cannot_be_joined() -> None:
    """torch.cat's own message named neither the output nor what to do."""
    parts = [[torch.zeros(3, 9)], [torch.zeros(2, 8)]]
    with pytest.raises(BatchError, match=r"outputs\[0\] has shapes \(3, 9\), \(2, 8\): pad to"):
        pytree.join(parts)


def test_parts_with_other_keys_cannot_be_joined() -> None:
    with pytest.raises(BatchError, match="outputs of the same structure.*same keys and numbers"):
        pytree.join([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}])


def test_what_cannot_be_compared_is_not_the_same() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise TypeError

        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(BatchError, match=r"outputs\[0\]"):
        pytree.join([[Odd()], [Odd()]])
