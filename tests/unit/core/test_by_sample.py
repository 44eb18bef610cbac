"""Rows of any number for each sample, cut and joined as the samples are."""

from __future__ import annotations

import pytest
import torch

from anybatch.core import pytree
from anybatch.core.pytree import BySample, by_sample
from anybatch.errors import BatchError

INDEX = torch.tensor([2.0, 0, 2, 5, 0, 5, 5])
FIELDS = {"box": torch.rand(7, 4), "kind": torch.arange(7)}


def test_rows_come_back_sample_by_sample_in_their_order() -> None:
    index, rows = by_sample(INDEX[:, None], 6, **FIELDS).collated()
    order = INDEX.argsort(stable=True)
    assert index.tolist() == INDEX[order].tolist()
    assert index.dtype == torch.int64
    for name, field in FIELDS.items():
        assert rows[name].dtype == field.dtype
        assert torch.equal(rows[name], field[order])


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 6])
def test_parts_count_samples_from_zero_and_join_to_the_batch(micro_batch: int) -> None:
    tree = {"objects": by_sample(INDEX, 6, **FIELDS), "image": torch.rand(6, 3)}
    parts = [pytree.rows(tree, at, min(at + micro_batch, 6), 6) for at in range(0, 6, micro_batch)]
    for at, part in enumerate(parts):
        index, rows = part["objects"].collated()
        mine = INDEX.div(micro_batch, rounding_mode="floor") == at
        assert sorted(index.tolist()) == sorted((INDEX[mine] - at * micro_batch).tolist())
        assert set(rows["kind"].tolist()) == set(FIELDS["kind"][mine].tolist())
    joined = pytree.join(parts, sizes=[len(part["image"]) for part in parts])
    assert type(joined["objects"]) is BySample
    want = tree["objects"].collated()
    assert torch.equal(joined["objects"].collated()[0], want[0])
    assert torch.equal(joined["objects"].collated()[1]["box"], want[1]["box"])


def test_samples_without_rows_have_empty_fields() -> None:
    index, rows = by_sample(torch.empty(0), 3, box=torch.empty(0, 4)).collated()
    assert index.shape == (0,)
    assert rows["box"].shape == (0, 4)
    assert len(by_sample(torch.empty(0), 0, box=torch.empty(0, 4))) == 0


def test_a_row_that_changes_has_other_bits() -> None:
    many = torch.zeros(5000, dtype=torch.int64)
    ones = torch.ones(5000)
    other = ones.index_fill(0, torch.tensor(2500), 2.0)
    assert by_sample(many, 1, a=ones).bits() != by_sample(many, 1, a=other).bits()
    pair, zeros = torch.ones(2), torch.zeros(2)
    assert by_sample(zeros, 2, a=pair).bits() != by_sample(zeros + 1, 2, a=pair).bits()


@pytest.mark.parametrize(
    ("index", "samples", "fields", "message"),
    [
        (INDEX, 5, FIELDS, "to samples 0 to 4, and it holds 5"),
        (INDEX - 1, 6, FIELDS, "it holds -1"),
        (INDEX + 0.5, 9, FIELDS, "it holds 2.5"),
        (INDEX, 6, {}, "no field beside it"),
        (INDEX, 6, {"box": torch.rand(6, 4)}, "box has 6 for 7"),
    ],
)
def test_rows_of_no_sample_are_refused(
    index: torch.Tensor, samples: int, fields: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        by_sample(index, samples, **fields)


def test_another_number_of_samples_is_refused() -> None:
    with pytest.raises(BatchError, match=r"targets\['objects'\] has entries for 6 of 5"):
        pytree.marked({"objects": by_sample(INDEX, 6, **FIELDS)}, 5, "targets")
