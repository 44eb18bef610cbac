"""README: "the gradient of the full batch", for every loss of the catalogue and every split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from benchmarks.mbs.cases import CASES, Case, splits
from benchmarks.mbs.loops import LOOPS
from benchmarks.mbs.problem import Problem, rows
from hypothesis import given
from hypothesis import strategies as st
from tests.oracle import assert_exact, error_of, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Loss


def engine_result(problem: Problem, micro_batch: int) -> dict[str, Tensor]:
    loss = problem.declared() if problem.declared else problem.loss_fn

    def run(model: nn.Module) -> Tensor:
        engine = Engine(model, loss, micro_batch=micro_batch)
        return engine.backward(problem.inputs, problem.targets)

    return state_after(problem.model, run)


def truth(problem: Problem) -> dict[str, Tensor]:
    def run(model: nn.Module) -> Tensor:
        copied = copy.copy(problem)
        object.__setattr__(copied, "model", model)
        return LOOPS["undivided"](copied, problem.batch)

    return state_after(problem.model, run)


def noise(problem: Problem, want: dict[str, Tensor]) -> dict[str, float]:
    """The error between two undivided runs with permuted rows (Law 1)."""
    order = torch.randperm(problem.batch)
    permuted = copy.copy(problem)
    object.__setattr__(permuted, "inputs", rows(problem.inputs, order))
    object.__setattr__(permuted, "targets", rows(problem.targets, order))
    return error_of(truth(permuted), want)


@pytest.mark.large
@pytest.mark.parametrize("variant", ["even", "ragged", "one", "larger"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_engine_gives_the_gradient_of_the_undivided_batch(case: Case, variant: str) -> None:
    problem = case.make(0)
    want = truth(problem)
    got = engine_result(problem, splits(problem.batch)[variant])
    assert_exact(got, want, noise(problem, want))


def test_the_catalogue_is_as_wide_as_claimed() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


LOSSES: dict[str, Any] = {
    "mean": nn.CrossEntropyLoss(ignore_index=0),
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double()),
    "smooth": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "coupled": lambda out, y: F.cross_entropy(out - out.mean(0), y),
    "per sample": Loss.per_sample(lambda out, y: F.cross_entropy(out, y, reduction="none")),
}


@given(
    name=st.sampled_from(sorted(LOSSES)),
    n=st.integers(1, 12),
    micro_batch=st.integers(1, 14),
    width=st.integers(1, 5),
    length=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_shapes_and_splits_drawn_at_random(
    name: str, n: int, micro_batch: int, width: int, length: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(n, length, width, dtype=torch.float64)
    if name == "per sample":
        x, y = x[:, 0], torch.randint(0, 3, (n,))
        want = undivided(model, F.cross_entropy, x, y)
        loss = LOSSES[name]
    else:
        y = torch.randint(0, 3, (n, length))
        base = LOSSES[name]

        def loss(out: Tensor, t: Tensor) -> Tensor:
            value: Tensor = base(out.transpose(1, 2), t)
            return value

        want = undivided(model, loss, x, y)
    got = state_after(model, lambda m: Engine(m, loss, micro_batch=micro_batch).backward(x, y))
    permuted = torch.randperm(n)
    fn = F.cross_entropy if name == "per sample" else loss
    assert_exact(got, want, error_of(undivided(model, fn, x[permuted], y[permuted]), want))


REDUCED: dict[str, tuple[Any, str]] = {
    "mean": (lambda out, y: F.cross_entropy(out.mean(1), y, ignore_index=0), "streaming"),
    "sum": (
        lambda out, y: F.cross_entropy(out.sum(dim=(1,), keepdim=True)[:, 0] / 9, y),
        "streaming",
    ),
    "largest": (lambda out, y: F.cross_entropy(out.amax(1), y), "streaming"),
    "both": (lambda out, y: F.mse_loss(out.mean((-1, 1)), y.double()), "streaming"),
    "logarithm": (lambda out, y: F.mse_loss(out.logsumexp(-1).prod(1), y.double()), "streaming"),
    "samples second": (
        lambda out, y: F.cross_entropy(out.transpose(0, 1).mean(0), y),
        "streaming",
    ),
    "samples": (lambda out, y: F.mse_loss(out.mean(0), out.detach().mean(0) + y[0]), "two-pass"),
    "all": (lambda out, y: F.mse_loss(out.mean((0, 1)), out.detach()[0, 0]), "two-pass"),
}


@pytest.mark.parametrize("micro_batch", [1, 4, 5])
@pytest.mark.parametrize("name", REDUCED)
def test_a_loss_of_outputs_that_are_reduced_is_exact(name: str, micro_batch: int) -> None:
    """Over dimensions other than that of the samples it is a sum over these, and streamed."""
    loss, mechanism = REDUCED[name]
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Unflatten(1, (4, 3))).double()
    x, y = torch.randn(14, 6, dtype=torch.float64), torch.randint(0, 3, (14,))
    mechanisms = []

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, loss, micro_batch=micro_batch)
        value = engine.backward(x, y)
        mechanisms.append(engine.plan.mechanism)
        return value

    assert_exact(state_after(model, run), undivided(model, loss, x, y))
    assert mechanisms == [mechanism]


def test_with_dropout_it_is_the_same_micro_batches_by_hand_under_the_same_masks() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = torch.randn(10, 6, dtype=torch.float64), torch.randint(0, 3, (10,))
    torch.manual_seed(5)
    got = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=4).backward(x, y))
    after = torch.rand(())
    torch.manual_seed(5)

    def by_hand(copied: nn.Module) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(0, 10, 4):
            part = F.cross_entropy(copied(x[i : i + 4]), y[i : i + 4], reduction="sum") / 10
            part.backward()
            total += part.detach()
        return total

    assert_exact(got, state_after(model, by_hand))
    assert torch.equal(after, torch.rand(())), "the generator has moved on by the same draws"
    other = undivided(model, F.cross_entropy, x, y)
    assert max(error_of(got, other).values()) > 1e-3, "the masks matter, so this test can fail"


def test_with_dropout_a_coupled_loss_meets_the_same_masks_in_both_passes() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x = torch.randn(10, 6, dtype=torch.float64)

    def coupled(out: Tensor) -> Tensor:
        return (out @ out.T).logsumexp(0).mean()

    torch.manual_seed(5)
    got = state_after(model, lambda m: Engine(m, coupled, micro_batch=4).backward(x))
    after = torch.rand(())
    torch.manual_seed(5)

    def by_hand(copied: nn.Module) -> Tensor:
        loss = coupled(torch.cat([copied(x[i : i + 4]) for i in range(0, 10, 4)]))
        loss.backward()
        return loss

    assert_exact(got, state_after(model, by_hand))
    assert torch.equal(after, torch.rand(())), "two passes draw as one"
