from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.oracle import same, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import diagnose
from anybatch.batch import TensorBatch


def batch(n: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5), torch.randint(0, 3, (n,))


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 3))


def test_an_ordinary_model_is_exact_at_every_split_and_untouched() -> None:
    model, given = mlp(nn.Tanh()), batch()
    before = snapshot(model)
    report = anybatch.check(model, F.cross_entropy, given)
    assert report.exact
    assert [split.micro_batch for split in report.splits] == [1, 5, 6]
    assert report.dtype == "float64"
    assert all(split.worst <= report.bound for split in report.splits)
    assert {"loss", "0.weight.grad"} <= set(report.splits[0].errors)
    assert report.findings == ()
    assert same(before, snapshot(model))
    assert str(report).startswith("exact: 10 samples, float64")
    assert json.loads(report.to_json())["exact"] is True


def test_a_given_micro_batch_is_the_one_checked() -> None:
    report = anybatch.check(mlp(), F.cross_entropy, batch(), micro_batch=4)
    assert [split.micro_batch for split in report.splits] == [4]


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Decide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().abs().sum()) > 15 else x


class Spread(nn.Module):
    """Other rows for other numbers of samples: the first module to run is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.many(x) * 2 if len(x) > 6 else self.few(x)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(6), r'samples meet in BatchNorm \(1 \(BatchNorm1d\)\).*batchnorm="local"'),
        (Centre(), r"samples meet inside the model, first in 1:"),
        (Decide(), r"forward reads values of tensors at .*test_check.py:\d+"),
        (Spread(), r"another module ran for fewer rows"),
    ],
)
def test_what_is_not_exact_is_said_in_words_and_where(layer: nn.Module, words: str) -> None:
    report = anybatch.check(mlp(layer), F.cross_entropy, batch())
    assert not report.exact
    import re

    assert re.search(words, str(report), re.DOTALL), str(report)


def test_batchnorm_refusals_are_in_the_report() -> None:
    report = anybatch.check(mlp(nn.BatchNorm1d(6)), F.cross_entropy, batch())
    assert all(split.refused and "BatchNorm" in split.refused for split in report.splits)
    assert report.splits[0].worst == float("inf")


def test_a_coupled_loss_is_exact_and_told_its_price() -> None:
    report = anybatch.check(mlp(), lambda o, y: F.cross_entropy(o - o.mean(0), y), batch())
    assert report.exact
    assert "costs a second forward pass" in str(report)
    assert "Loss.per_sample" in str(report)


def test_buffers_that_forward_moves_are_named() -> None:
    model = mlp(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)))
    report = anybatch.check(model, F.cross_entropy, batch())
    assert report.exact
    assert "forward moves buffers (1.parametrizations.weight.0._u" in str(report)


def test_dropout_is_switched_off_to_compare_and_said() -> None:
    model = mlp(nn.Dropout(0.5))
    report = anybatch.check(model, F.cross_entropy, batch())
    assert report.exact
    assert "dropout was switched off to compare (1)" in str(report)
    assert model[1].p == 0.5


def test_other_random_draws_are_said() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape[1], x.shape[0]).T

    report = anybatch.check(mlp(Noise()), F.cross_entropy, batch())
    assert not report.exact
    assert "forward draws random numbers" in str(report)


def test_a_model_that_knows_only_float32_is_compared_as_it_is() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise RuntimeError("float32 only")
            return x

    report = anybatch.check(mlp(Narrow()), F.cross_entropy, batch())
    assert report.exact
    assert report.dtype == "the model's own precision"
    assert "does not run in float64 (float32 only)" in str(report)


def test_class_weights_in_float32_do_not_stand_in_the_way() -> None:
    weights = torch.tensor([1.0, 2.0, 5.0])
    assert anybatch.check(mlp(), nn.CrossEntropyLoss(weight=weights), batch()).exact
    report = anybatch.check(mlp(), lambda o, y: F.cross_entropy(o, y, weight=weights), batch())
    assert report.exact
    assert report.dtype == "the model's own precision"


def test_a_wrong_declaration_is_found_out() -> None:
    wrong = anybatch.Loss.ratio(lambda o, y: F.cross_entropy(o, y), lambda _: 1)
    report = anybatch.check(mlp(), wrong, batch())
    assert not report.exact
    literal = anybatch.Loss.algorithm1(F.cross_entropy)
    assert not anybatch.check(mlp(), literal, batch(), micro_batch=4).exact
    assert anybatch.check(mlp(), literal, batch(), micro_batch=5).exact


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (batch(1), "it holds one sample: give two"),
        ((torch.zeros(3, 5), torch.zeros(4)), r"inputs: 3, targets: 4"),
    ],
)
def test_a_batch_that_cannot_be_checked_is_refused(given: Any, message: str) -> None:
    with pytest.raises(anybatch.BatchError, match=message):
        anybatch.check(mlp(), F.cross_entropy, given)


def test_an_undeclared_loss_inside_is_refused() -> None:
    with pytest.raises(anybatch.LossError, match="must be declared"):
        anybatch.check(mlp(), None, batch())


def test_the_first_meeting_is_the_module_and_not_what_follows() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Sequential(nn.ReLU(), Centre()), nn.Linear(6, 3))
    x, _ = batch()
    assert diagnose.first_meeting(model, TensorBatch.of(x, None)) == "1.1"
    assert diagnose.first_meeting(mlp(), TensorBatch.of(x, None)) is None
