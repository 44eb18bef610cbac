"""Losses over rows that an index assigns to samples, as detection collates its boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, state_of, undivided
from tests.pool import Pool, ranks
from torch import Tensor, nn

import anybatch
from anybatch import LazyBatch
from anybatch.core import pytree
from anybatch.errors import NotExactError
from anybatch.integrations.ultralytics import by_sample

INDEX = torch.tensor([0, 0, 2, 2, 2, 3, 4, 6, 6])


def problem(*, norm: bool) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    between = nn.BatchNorm1d(5) if norm else nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 5), between, nn.Linear(5, 3)).double()
    rows = {"box": torch.randn(9, 3).double(), "weight": torch.rand(9).double()}
    return model, torch.randn(7, 4).double(), {"objects": by_sample(INDEX, 7, **rows)}


def mean(outputs: Tensor, targets: Any) -> Tensor:
    index, rows = targets["objects"].collated()
    return (outputs[index] - rows["box"]).square().mean()


def weighted(outputs: Tensor, targets: Any) -> Tensor:
    index, rows = targets["objects"].collated()
    each = (outputs[index] - rows["box"]).square().mean(1)
    return (each * rows["weight"]).sum() / rows["weight"].sum()


def counted(outputs: Tensor, targets: Any) -> Tensor:
    index, rows = targets["objects"].collated()
    each = torch.zeros(len(outputs), dtype=outputs.dtype).index_add(0, index, rows["weight"])
    return (outputs.square().mean(1) * each).mean()


def divided(outputs: Tensor, targets: Any) -> Tensor:
    return outputs.square().sum() / targets["objects"].collated()[1]["weight"].sum()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("options", [{"micro_batch": 1}, {"micro_batch": 3}, {"memory": "3KiB"}])
@pytest.mark.parametrize("loss", [mean, weighted, counted, divided])
def test_gradients_are_those_of_the_undivided_batch(
    loss: Callable[..., Tensor], options: dict[str, Any], norm: bool
) -> None:
    model, x, y = problem(norm=norm)
    want = undivided(model, loss, x, y)
    assert_exact(
        state_after(model, lambda m: anybatch.Engine(m, loss, **options).backward(x, y)), want
    )


def test_a_lazy_batch_collates_them() -> None:
    model, x, y = problem(norm=True)
    entries = list(y["objects"])

    def collate(items: list[int]) -> tuple[Tensor, dict[str, Any]]:
        index = torch.tensor([at for at, i in enumerate(items) for _ in entries[i]["weight"]])
        rows = {
            name: torch.cat([torch.tensor(entries[i][name]) for i in items])
            for name in ("box", "weight")
        }
        return x[items], {"objects": by_sample(index, len(items), **rows)}

    def run(m: nn.Module) -> Tensor:
        batch = LazyBatch(range(7), collate_fn=collate)  # type: ignore[arg-type]
        return anybatch.Engine(m, weighted, micro_batch=2).backward(batch)

    assert_exact(state_after(model, run), undivided(model, weighted, x, y))


def test_a_declared_sum_over_them_is_refused() -> None:
    model, x, y = problem(norm=False)

    def num(outputs: Tensor, targets: Any) -> Tensor:
        return weighted(outputs, targets) * targets["objects"].collated()[1]["weight"].sum()

    loss = anybatch.Loss.ratio(num, lambda t: t["objects"].collated()[1]["weight"].sum())
    with pytest.raises(NotExactError, match="without a declaration"):
        anybatch.Engine(model, loss, micro_batch=2).backward(x, y)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(2) as found:
        yield found


def on_rank(rank: int, _size: int, norm: bool) -> dict[str, Tensor]:
    model, x, y = problem(norm=norm)
    begin, end = ((0, 4), (4, 7))[rank]
    targets = pytree.rows(y, begin, end, 7)
    return state_of(
        model, anybatch.Engine(model, weighted, micro_batch=2).backward(x[begin:end], targets)
    )


@pytest.mark.parametrize("norm", [False, True])
def test_over_ranks_they_are_those_of_all(pool: Pool, norm: bool) -> None:
    model, x, y = problem(norm=norm)
    want = undivided(model, weighted, x, y)
    for got in pool.run(on_rank, norm):
        assert_exact(got, want)
