from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import same, snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import anybatch
from anybatch.tools import check
from anybatch.tools.check import TensorBatch

LITERAL = anybatch.Loss.algorithm1(F.cross_entropy)


def batch(n: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5), torch.randint(0, 3, (n,))


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 3))


def test_an_ordinary_model_is_exact_at_every_split_and_untouched() -> None:
    model, inputs = mlp(nn.Tanh()), batch()
    before = snapshot(model)
    report = anybatch.check(model, F.cross_entropy, inputs)
    assert report.exact
    assert [split.micro_batch for split in report.splits] == [1, 5, 6]
    assert report.dtype == "float64"
    assert all(split.worst <= report.bound for split in report.splits)
    assert {"loss", "0.weight.grad"} <= set(report.splits[0].errors)
    assert report.findings == ()
    assert same(before, snapshot(model))
    assert str(report).startswith("exact: 10 samples, float64")
    assert json.loads(report.to_json())["exact"] is True


def test_a_passed_micro_batch_is_the_one_checked() -> None:
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
        (
            nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)),
            r'samples meet in BatchNorm \(1.1 \(BatchNorm1d\)\).*batchnorm="local"',
        ),
        (Centre(), r"samples meet inside the model, first in 1:"),
        (nn.Sequential(nn.BatchNorm1d(6), Centre()), r"meet inside the model, first in 1.1:"),
        (Decide(), r"forward reads values of tensors at .*test_check.py:\d+"),
        (Spread(), r"another module ran for fewer rows"),
    ],
)
def test_what_is_not_exact_is_said_in_words_and_where(layer: nn.Module, words: str) -> None:
    report = anybatch.check(mlp(layer), F.cross_entropy, batch())
    assert not report.exact
    import re

    assert re.search(words, str(report), re.DOTALL), str(report)


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize(
    ("layer", "where"),
    [(nn.BatchNorm1d(6), "1 (BatchNorm1d)"), (Bare(), "a call of batch_norm in forward")],
)
def test_batchnorm_is_exact_at_every_split_and_its_price_is_reported(
    layer: nn.Module, where: str
) -> None:
    report = anybatch.check(mlp(layer), F.cross_entropy, batch())
    assert report.exact, str(report)
    assert [split.mechanism for split in report.splits] == ["lockstep"] * 3
    (found,) = report.findings
    assert f"samples meet in BatchNorm ({where}): micro-batches wait for each other" in found.text


def test_batchnorm_refusals_are_in_the_report() -> None:
    report = anybatch.check(mlp(nn.BatchNorm1d(6)), LITERAL, batch())
    assert not report.exact
    assert all(split.refused and "BatchNorm" in split.refused for split in report.splits)
    assert report.splits[0].worst == float("inf")


def test_a_coupled_loss_is_exact_and_its_price_is_reported() -> None:
    report = anybatch.check(mlp(), lambda o, y: F.cross_entropy(o - o.mean(0), y), batch())
    assert report.exact
    assert "costs a second forward pass" in str(report)
    assert "Loss.per_sample" in str(report)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.one(x), dim=1), F.normalize(self.other(x), dim=1)


def clip(outputs: tuple[Tensor, Tensor]) -> Tensor:
    scores = 5 * outputs[0] @ outputs[1].T
    right = torch.arange(len(scores))
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, target=right)) / 2


def info(outputs: tuple[Tensor, Tensor]) -> Tensor:
    scores = outputs[0] @ outputs[1].T / 0.2
    return F.cross_entropy(scores, torch.arange(len(scores)))


def others(outputs: tuple[Tensor, Tensor]) -> Tensor:
    scores = outputs[0] @ outputs[1].T
    return F.cross_entropy(scores, torch.arange(len(scores)).flip(0))


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (clip, "loss_fn = anybatch.contrastive(temperature=..., symmetric=True)"),
        (info, "loss_fn = anybatch.contrastive(temperature=..., symmetric=False)"),
        (others, "anybatch.Loss.per_sample"),
    ],
)
def test_a_loss_of_partners_is_reported_as_one(loss: Any, line: str) -> None:
    report = anybatch.check(Towers(), loss, (torch.randn(8, 6), None))
    assert report.exact
    assert line in str(report)
    assert str(report).count("loss_fn =") == 1


def test_the_line_for_a_loss_of_partners_says_the_same() -> None:
    x, model = torch.randn(8, 6), Towers()
    declared = anybatch.contrastive(temperature=0.2, symmetric=True)
    loss = anybatch.Engine(model, declared, micro_batch=3).backward(x)
    torch.testing.assert_close(loss, clip(model(x)).detach())


def test_buffers_that_forward_moves_are_named() -> None:
    model = mlp(spectral_norm(nn.Linear(6, 6)))
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
    class Float32Only(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise RuntimeError("float32 only")
            return x

    report = anybatch.check(mlp(Float32Only()), F.cross_entropy, batch())
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
    assert not anybatch.check(mlp(), LITERAL, batch(), micro_batch=4).exact
    assert anybatch.check(mlp(), LITERAL, batch(), micro_batch=5).exact


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (batch(1), "it holds one sample: give two"),
        ((torch.zeros(3, 5), torch.zeros(4)), r"inputs: 3, targets: 4"),
    ],
)
def test_a_batch_that_cannot_be_checked_is_refused(inputs: Any, message: str) -> None:
    with pytest.raises(anybatch.errors.BatchError, match=message):
        anybatch.check(mlp(), F.cross_entropy, inputs)


def test_a_loss_that_is_nowhere_is_refused() -> None:
    with pytest.raises(
        anybatch.errors.LossError, match="without a loss_fn a model must return its loss"
    ):
        anybatch.check(mlp(), None, batch())


def test_a_batch_without_a_finite_loss_is_not_exact() -> None:
    """NaN equals NaN, so it was called exact."""
    x, _ = batch()
    report = anybatch.check(mlp(), nn.CrossEntropyLoss(), (x, torch.full((10,), -100)))
    assert not report.exact
    assert "itself gives NaN or infinite values (loss" in str(report)
    masked = mlp()
    masked.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan]))
    assert anybatch.check(masked, F.cross_entropy, batch()).exact


class Narrowed(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), (6,), self.weight.float(), self.bias.float())
        return normed.to(x.dtype)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (mlp(Narrowed(6)), F.cross_entropy),
        (mlp(), lambda o, y: F.cross_entropy(o.float(), y)),
        (mlp(), lambda o, y: F.cross_entropy(o.float(), y) + o.float().var()),
    ],
    ids=["layer norm", "logits", "coupled"],
)
@pytest.mark.parametrize("n", [10, 33])
def test_islands_of_float32_are_rounding(model: nn.Module, loss: Any, n: int) -> None:
    """Their noise was called dependence on the row order, or not measured, and they not exact."""
    report = anybatch.check(model, loss, batch(n))
    assert report.exact, str(report)
    assert report.dtype == "float64"
    assert 1e-8 < report.bound < 1e-4
    assert "computes in float32: undivided runs differ by" in str(report)


def test_rows_whose_place_in_the_batch_matters_are_no_rounding() -> None:
    class Position(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(len(x))[:, None]

    report = anybatch.check(mlp(Position()), F.cross_entropy, batch())
    assert not report.exact
    assert "the result depends on the order of the rows" in str(report)
    assert report.bound <= 1e-11


def test_a_refusal_is_printed_once_with_its_splits() -> None:
    """Three splits, three times the same long sentence."""
    text = str(anybatch.check(mlp(nn.BatchNorm1d(6)), LITERAL, batch()))
    assert text.count("micro-batches must wait") == 1
    assert "micro-batch 1, 5, 6  refused: micro-batches must wait" in text


def test_a_batch_that_cannot_be_cut_is_a_refused_split() -> None:
    """A BatchError of the engine, or the model's own error on a part, ended the check."""

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 10:
                raise ValueError("ten rows, please")
            return x

    report = anybatch.check(mlp(Fixed()), F.cross_entropy, batch())
    assert not report.exact
    assert "(ValueError: ten rows, please)" in str(report)
    assert "runs on the full batch and not on half of it (ten rows, please)" in str(report)

    class Squeezed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(len(x) // 5, 5, 6) if len(x) % 5 == 0 else x[:0]

    report = anybatch.check(mlp(Squeezed()), lambda o, y: (o**3).std(), batch(), micro_batch=4)
    assert [split.mechanism for split in report.splits] == ["refused"]
    assert report.splits[0].refused


def test_a_size_that_cannot_be_is_an_error_and_no_refused_split() -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match="micro_batch"):
            anybatch.check(mlp(), F.cross_entropy, batch(), micro_batch=size)


def test_a_single_row_that_batchnorm_cannot_take_is_said() -> None:
    """The comparison with batchnorm="local" raised."""
    report = anybatch.check(mlp(nn.BatchNorm1d(6)), LITERAL, batch(), micro_batch=1)
    assert "micro-batches of 1 cannot be normalised alone (Expected more than 1" in str(report)


def test_a_model_that_cannot_be_copied_is_refused_in_words() -> None:
    """A tensor that forward left on the module ended in torch's deepcopy error."""
    model = mlp()
    model.last = model(torch.zeros(1, 5))
    with pytest.raises(
        anybatch.errors.AnybatchError, match="needs a copy of the model.*not run yet"
    ):
        anybatch.check(model, F.cross_entropy, batch())


def test_the_persons_batch_is_not_changed() -> None:
    """check wrote x.grad, let the loss write to y, and refused x that requires grad."""
    x, y = torch.randn(10, 5, requires_grad=True), torch.randn(10, 3)
    before = y.clone()
    report = anybatch.check(mlp(), lambda o, t: F.mse_loss(o, t.sub_(1)), (x, y))
    assert x.grad is None
    assert torch.equal(y, before)
    assert report.dtype == "float64"
    wide = x.detach().double().requires_grad_()
    assert anybatch.check(mlp(), F.mse_loss, (wide, y)).exact
    assert wide.grad is None


def test_a_loss_that_reads_the_model_reads_the_copy() -> None:
    """A penalty on the person's own parameters gave them gradients, and the copy none."""
    model = mlp(nn.Tanh())
    weights = [model[0].weight]

    def penalty(out: Tensor, y: Tensor, *, factor: float = 0.5) -> Tensor:
        return F.cross_entropy(out, y) + factor * weights[0].square().sum() + model[2].bias.sum()

    for loss in (penalty, anybatch.Loss.per_sample(lambda o, y: penalty(o, y).expand(len(o)))):
        anybatch.check(model, loss, batch())
        assert all(p.grad is None for p in model.parameters())


def test_arrays_and_captions_are_permuted_with_their_rows() -> None:
    x = torch.arange(4.0)
    inputs = TensorBatch((x, np.arange(4)), {"c": ["0", "1", "2", "3"], "k": ["a"], "n": 1}, 4)
    turned = check.permuted(inputs, torch.tensor([2, 0, 3, 1]))
    assert turned.inputs[0].tolist() == [2.0, 0.0, 3.0, 1.0]
    assert turned.inputs[1].tolist() == [2, 0, 3, 1]
    assert turned.targets == {"c": ["2", "0", "3", "1"], "k": ["a"], "n": 1}


def test_a_sparse_buffer_does_not_stand_in_the_way() -> None:
    """Comparing it raised NotImplementedError."""
    model = mlp()
    model.register_buffer("edges", torch.eye(3).to_sparse())
    assert anybatch.check(model, F.cross_entropy, batch()).exact


class Drops(nn.Module):
    """Draws which samples lose their label, as guidance without a classifier does."""

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.out, self.drop = nn.Embedding(11, 4), nn.Linear(4, 2), nn.Dropout(0.3)

    def forward(self, y: Tensor) -> Tensor:
        one, other = (self.labels(y.where(torch.rand(len(y)) < 0.5, y * 0 + 10)) for _ in "ab")
        found: Tensor = self.out(self.drop(one * other))
        return found


def test_a_model_that_draws_is_compared_by_the_draws_of_the_batch() -> None:
    torch.manual_seed(0)
    batch = torch.arange(7), torch.randn(7, 2)
    separate = anybatch.check(Drops(), nn.MSELoss(), batch)
    assert not separate.exact
    assert 'check(model, loss_fn, batch, rng="batch")' in str(separate)
    assert "samples meet inside the model" not in str(separate)
    full = anybatch.check(Drops(), nn.MSELoss(), batch, rng="batch")
    assert full.exact, str(full)
    assert "switched off" not in str(full)
