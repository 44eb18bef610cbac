from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from anybatch import BatchError, tree


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
    assert [path for path, _ in tree.tensors(nested(3), "inputs")] == [
        "inputs['pair'].left",
        "inputs['pair'].right[0]",
        "inputs['record'].image",
        "inputs['record'].extra['deep']",
        "inputs['user']['u']",
        "inputs['ordered']['o']",
        "inputs['scalar']",
    ]


@given(n=st.integers(1, 9), size=st.integers(1, 10))
def test_rows_joined_are_the_whole_and_types_stay(n: int, size: int) -> None:
    whole = nested(n)
    parts = [tree.rows(whole, i, min(i + size, n)) for i in range(0, n, size)]
    joined = tree.join(parts)
    for (path, a), (other, b) in zip(tree.tensors(joined), tree.tensors(whole), strict=True):
        assert path == other
        assert torch.equal(a, b)
    assert type(joined["pair"]) is Pair
    assert type(joined["record"]) is Record
    assert type(joined["user"]) is UserDict
    assert type(joined["ordered"]) is OrderedDict
    assert joined["pair"].right[1:] == ["text", None]
    assert whole["user"]["u"].shape[0] == n, "the original is untouched"


def test_rows_are_views() -> None:
    x = torch.zeros(4, 2)
    tree.rows({"x": x}, 1, 3)["x"].fill_(1.0)
    assert x.sum() == 4


def test_batch_size_ignores_what_has_no_rows() -> None:
    assert tree.batch_size(inputs=nested(5), targets=torch.zeros(5)) == 5


def test_leaves_of_different_sizes_are_all_named() -> None:
    with pytest.raises(
        BatchError, match=r"inputs\['a'\]: 3, inputs\['b'\]\[0\]: 3, targets: 4.*0-dim tensor"
    ):
        tree.batch_size(inputs={"a": torch.zeros(3), "b": [torch.zeros(3)]}, targets=torch.zeros(4))


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(BatchError, match="at least one tensor.*inputs, targets hold none"):
        tree.batch_size(inputs="text", targets=torch.tensor(1))
    with pytest.raises(BatchError, match="at least one sample, and this one holds 0"):
        tree.batch_size(inputs=torch.zeros(0, 3))


def test_layouts_without_rows_are_refused() -> None:
    with pytest.raises(BatchError, match=r"inputs\[0\] has layout torch.sparse_coo"):
        tree.batch_size(inputs=[torch.eye(3).to_sparse()])
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    with pytest.raises(BatchError, match=r"layout .*\(nested\)"):
        tree.batch_size(inputs=nested)


def test_a_packed_sequence_is_refused() -> None:
    packed = pack_sequence([torch.zeros(3, 1), torch.zeros(2, 1)])
    with pytest.raises(BatchError, match="PackedSequence are time steps.*pack them inside"):
        tree.batch_size(inputs=packed)


def test_a_graph_behind_the_inputs_is_refused() -> None:
    x = torch.zeros(3, requires_grad=True) * 2
    with pytest.raises(BatchError, match="inputs has a graph behind it.*detach"):
        tree.batch_size(inputs=x)


def test_parts_of_different_structure_cannot_be_joined() -> None:
    with pytest.raises(BatchError, match="same number of output tensors, and they gave 1, 2"):
        tree.join([[torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]])


def test_a_mapping_that_cannot_be_written_becomes_a_dict() -> None:
    from types import MappingProxyType

    assert tree.rows(MappingProxyType({"x": torch.arange(4)}), 1, 3)["x"].tolist() == [1, 2]
