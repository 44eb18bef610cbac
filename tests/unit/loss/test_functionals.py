"""Every functional of the table against torch: numerators add up, and divide to the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.loss import functionals

N = 7


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def sign(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape).double() * 2 - 1


def classes(*shape: int) -> Tensor:
    return torch.randint(0, 4, shape)


def layers() -> list[tuple[Callable[..., Any], dict[str, Callable[[], Tensor]], dict[str, Any]]]:
    """Return calls of the functional that takes its last layer; torch before 2.13 has none."""
    if not hasattr(F, "linear_cross_entropy"):
        return []
    flat = {"input": lambda: draw(N, 5), "target": lambda: classes(N)}
    deep = {"input": lambda: draw(N, 5), "target": lambda: classes(N, 3, 2)}
    likely = {"input": lambda: draw(N, 5), "target": lambda: draw(N, 4, 3).softmax(1)}
    weight, bias = torch.rand(4).double(), draw(4).requires_grad_()
    layer = {"linear_weight": draw(4, 5).requires_grad_()}
    wide = {"linear_weight": draw(4, 3, 2, 5).requires_grad_()}
    chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    options: list[tuple[Any, dict[str, Any]]] = [
        (flat, layer),
        (flat, {**layer, "linear_bias": bias, "weight": weight, "ignore_index": 1}),
        (flat, {**layer, "label_smoothing": 0.2, "weight": weight, "ignore_index": None}),
        (flat, {**layer, "linear_bias": bias, "options": chunks, "ignore_index": 2}),
        (flat, {**layer, "weight": weight, "options": chunks}),
        (deep, {**wide, "ignore_index": 3, "weight": weight}),
        (likely, {"linear_weight": draw(4, 3, 5).requires_grad_(), "weight": weight}),
    ]
    return [(F.linear_cross_entropy, rows, inputs) for rows, inputs in options]


LAYERS = layers()

# functional -> (arguments that hold samples, options); the samples lie along the first dimension
CALLS: list[tuple[Callable[..., Any], dict[str, Callable[[], Tensor]], dict[str, Any]]] = [
    (F.cross_entropy, {"input": lambda: draw(N, 4), "target": lambda: classes(N)}, {}),
    (
        F.cross_entropy,
        {"input": lambda: draw(N, 4, 3, 2), "target": lambda: classes(N, 3, 2)},
        {"ignore_index": 2, "weight": torch.rand(4).double(), "label_smoothing": 0.2},
    ),
    (
        F.cross_entropy,
        {"input": lambda: draw(N, 4, 3), "target": lambda: draw(N, 4, 3).softmax(1)},
        {"weight": torch.rand(4).double()},
    ),
    *LAYERS,
    (F.nll_loss, {"input": lambda: draw(N, 4), "target": lambda: classes(N)}, {"ignore_index": 1}),
    (
        F.nll_loss,
        {"input": lambda: draw(N, 4, 3, 3), "target": lambda: classes(N, 3, 3)},
        {"weight": torch.rand(4).double()},
    ),
    (
        F.binary_cross_entropy,
        {"input": lambda: draw(N, 3).sigmoid(), "target": lambda: torch.rand(N, 3).double()},
        {"weight": torch.rand(3).double()},
    ),
    (
        F.binary_cross_entropy_with_logits,
        {"input": lambda: draw(N, 3), "target": lambda: torch.rand(N, 3).double()},
        {"pos_weight": torch.rand(3).double(), "weight": torch.rand(1, 3).double()},
    ),
    (F.mse_loss, {"input": lambda: draw(N, 3), "target": lambda: draw(N, 3)}, {}),
    (F.l1_loss, {"input": lambda: draw(N, 3), "target": lambda: draw(N, 3)}, {}),
    (F.smooth_l1_loss, {"input": lambda: draw(N), "target": lambda: draw(N)}, {"beta": 0.3}),
    (F.huber_loss, {"input": lambda: draw(N, 2), "target": lambda: draw(N, 2)}, {"delta": 0.7}),
    (
        F.kl_div,
        {
            "input": lambda: draw(N, 3).log_softmax(-1),
            "target": lambda: draw(N, 3).softmax(-1),
        },
        {"reduction": "batchmean"},
    ),
    (
        F.kl_div,
        {"input": lambda: draw(N, 3).log_softmax(-1), "target": lambda: draw(N, 3)},
        {"reduction": "sum", "log_target": True},
    ),
    (
        F.poisson_nll_loss,
        {"input": lambda: draw(N, 3), "target": lambda: torch.rand(N, 3).double()},
        {"full": True},
    ),
    (
        F.gaussian_nll_loss,
        {
            "input": lambda: draw(N, 3),
            "target": lambda: draw(N, 3),
            "var": lambda: torch.rand(N, 1).double(),
        },
        {},
    ),
    (F.hinge_embedding_loss, {"input": lambda: draw(N, 3), "target": lambda: sign(N, 3)}, {}),
    (F.soft_margin_loss, {"input": lambda: draw(N, 3), "target": lambda: sign(N, 3)}, {}),
    (
        F.margin_ranking_loss,
        {"input1": lambda: draw(N), "input2": lambda: draw(N), "target": lambda: sign(N)},
        {"margin": 0.4},
    ),
    (
        F.cosine_embedding_loss,
        {"input1": lambda: draw(N, 3), "input2": lambda: draw(N, 3), "target": lambda: sign(N)},
        {"margin": 0.1},
    ),
    (
        F.triplet_margin_loss,
        {name: lambda: draw(N, 3) for name in ("anchor", "positive", "negative")},
        {"swap": True},
    ),
    (
        F.multi_margin_loss,
        {"input": lambda: draw(N, 4), "target": lambda: classes(N)},
        {"weight": torch.rand(4).double(), "p": 2},
    ),
    (
        F.multilabel_margin_loss,
        {"input": lambda: draw(N, 3), "target": lambda: torch.randint(-1, 3, (N, 3))},
        {},
    ),
    (
        F.multilabel_soft_margin_loss,
        {"input": lambda: draw(N, 3), "target": lambda: torch.randint(0, 2, (N, 3)).double()},
        {"weight": torch.rand(3).double()},
    ),
    (
        F.ctc_loss,
        {
            "log_probs": lambda: draw(9, N, 4).log_softmax(-1),
            "targets": lambda: torch.randint(1, 4, (N, 3)),
            "input_lengths": lambda: torch.randint(7, 10, (N,)),
            "target_lengths": lambda: torch.randint(0, 4, (N,)),
        },
        {"zero_infinity": True},
    ),
    (functionals.own_values, {"input": lambda: draw(N, 3)}, {"reduction": "mean"}),
    (
        functionals.own_weighted_values,
        {"input": lambda: draw(N, 3), "weight": lambda: draw(N).abs()},
        {"reduction": "mean"},
    ),
]


@pytest.mark.parametrize(
    ("function", "samples", "options"), CALLS, ids=[call[0].__name__ for call in CALLS]
)
def test_parts_add_up_to_the_mean_of_the_full_batch(
    function: Callable[..., Tensor],
    samples: dict[str, Callable[[], Tensor]],
    options: dict[str, Any],
) -> None:
    full = {name: make() for name, make in samples.items()} | options
    entry = functionals.TABLE[function]
    arguments = functionals.bind(function, (), full)
    assert entry.fits(arguments)
    numerator, denominator = 0.0, 0.0
    for part in (slice(0, 3), slice(3, 4), slice(4, N)):
        rows = {
            name: full[name][:, part] if entry.rows.get(name) == 1 else full[name][part]
            for name in samples
        }
        some = functionals.bind(function, (), full | rows)
        numerator += functionals.numerator(function, some)
        denominator += float(entry.count(some))
    assert float(entry.count(arguments)) == pytest.approx(denominator, rel=1e-15)
    divisor = denominator if functionals.divides(function, arguments) else 1.0
    want = function(**full)
    assert torch.allclose(numerator / divisor, want, rtol=1e-13, atol=1e-15)


def test_every_functional_of_the_table_is_tested_here() -> None:
    assert {call[0] for call in CALLS} == set(functionals.TABLE)


def test_only_sums_and_means_divide_in_a_recognised_way() -> None:
    ways = {"mean": True, "batchmean": None, "sum": False, "none": None}
    for reduction, divides in ways.items():
        assert functionals.divides(F.mse_loss, {"reduction": reduction}) is divides
    assert functionals.divides(F.kl_div, {"reduction": "batchmean"}) is True
    assert functionals.divides(F.mse_loss, {"reduction": "mean", "size_average": False}) is None
    assert functionals.divides(F.mse_loss, {"reduction": "mean", "reduce": False}) is None
