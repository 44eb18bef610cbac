from __future__ import annotations

import copy

import pytest
import torch
from tests.cases import case_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anybatch import LazyBatch
from anybatch.execution.signature import Case, as_fakes, bytes_of, few, first_rows, shapes_of


def case(n: int, *, lazy: bool = False) -> Case:
    model, x, y = nn.Linear(2, 3), torch.arange(2.0 * n).view(n, 2), torch.zeros(n).long()
    rows = (LazyBatch(TensorDataset(x, y)),) if lazy else (x, y)
    return case_of(model, F.cross_entropy, *rows)


def test_shapes_know_no_rows() -> None:
    assert shapes_of(case(4).rows) == shapes_of(case(2).rows) == ((2,), ())


def test_the_bytes_of_a_sparse_tensor_are_those_of_places_and_values() -> None:
    entries = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.ones(2), (9,), check_invariants=True
    )
    assert bytes_of(entries) == 2 * (8 + 4)


@pytest.mark.parametrize(("n", "rows"), [(1, 6), (4, 9), (5, 6), (6, 6), (20, 6)])
def test_few_rows_are_repeated_to_just_as_many_and_never_copied_in_vain(n: int, rows: int) -> None:
    full = case(n)
    found = few(full, rows)
    assert found.rows.size == found.size == max(n, rows)
    if n >= rows:
        assert found is full
    else:
        assert torch.equal(found.rows.inputs, full.rows.inputs[torch.arange(rows) % n])
        assert len(found.rows.targets) == rows


def test_no_more_samples_meet_than_the_batch_has() -> None:
    for made in (few(case(4), 9), as_fakes(case(4)), few(as_fakes(case(4)), 15)):
        assert made.rows.size > 4
        assert made.together == 4
    assert first_rows(as_fakes(case(20)), 5).together == 5
    assert few(case(20, lazy=True), 12).together == 20


def test_only_the_first_micro_batches_are_requested() -> None:
    sizes = [micro.size for micro in case(20).batch(3).micro_batches(4)]
    assert sizes == [4, 4, 4]
    assert case(20).batch(3).size == 20
    lazy = case(20, lazy=True)
    assert (lazy.size, lazy.rows.size) == (20, 9)
    assert [micro.size for micro in lazy.batch(3).micro_batches(2)] == [2, 2, 2]


def test_a_case_of_fakes_holds_no_data_and_shares_nothing() -> None:
    real = case(5)
    weights = copy.deepcopy(real.model.state_dict())
    fake = as_fakes(real)
    assert fake.fake
    assert not real.fake
    assert isinstance(fake.rows.inputs, FakeTensor)
    assert fake.rows.size >= 12
    assert all(isinstance(one, FakeTensor) for one in fake.leaves)
    assert {id(leaf) for leaf in fake.leaves} == {id(p) for p in fake.model.parameters()}
    assert first_rows(fake, 5).rows.inputs.shape == (5, 2)
    for name, value in real.model.state_dict().items():
        assert torch.equal(value, weights[name])
